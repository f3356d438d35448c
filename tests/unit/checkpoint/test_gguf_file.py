"""The GGUF parser: what a writer wrote comes back, and no damaged file does anything but raise `CheckpointError`."""

from __future__ import annotations

import os
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.checkpoint import gguf_file
from octavo.checkpoint.gguf_config import gguf_hf_config
from octavo.checkpoint.gguf_file import GGML_TYPES, GgufTensor, read_gguf
from octavo.errors import CheckpointError, UnsupportedModel
from tests.support.bundled import bundled_model_path


def write(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_token_list(["a", "é", "Ġthe", "", "<|end|>"])
    writer.add_token_types([1, 1, 1, 1, 3])
    writer.add_token_scores([0.5, -1.0, 0.0, 2.0, -3.5])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(4)
    writer.add_bool("test.flag", True)
    writer.add_uint8("test.u8", 255)
    writer.add_int8("test.i8", -7)
    writer.add_uint16("test.u16", 65535)
    writer.add_int16("test.i16", -30000)
    writer.add_int32("test.i32", -(2**31))
    writer.add_uint64("test.u64", 2**63)
    writer.add_int64("test.i64", -(2**62))
    writer.add_float64("test.f64", 0.1)
    writer.add_array("test.flags", [True, False, True])
    rng = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": rng.standard_normal((5, 64), dtype=np.float32),
        "half": rng.standard_normal((3, 2, 8), dtype=np.float32).astype(np.float16),
        "vector": rng.standard_normal(7, dtype=np.float32),
    }
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    packed = gguf.quants.quantize(rng.standard_normal((4, 64), dtype=np.float32), GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    write(path)
    return path


def test_metadata_of_every_type_comes_back(sound: Path) -> None:
    metadata = read_gguf(str(sound)).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"] == ["a", "é", "Ġthe", "", "<|end|>"]
    assert metadata["tokenizer.ggml.token_type"] == [1, 1, 1, 1, 3]
    assert metadata["tokenizer.ggml.scores"] == [0.5, -1.0, 0.0, 2.0, -3.5]
    assert metadata["test.flag"] is True
    assert metadata["test.flags"] == [True, False, True]
    names = ("u8", "i8", "u16", "i16", "i32", "u64", "i64", "f64")
    assert [metadata[f"test.{n}"] for n in names] == [255, -7, 65535, -30000, -(2**31), 2**63, -(2**62), 0.1]
    assert all(type(metadata[f"test.{n}"]) is (float if n == "f64" else int) for n in names)


def test_the_tokenizers_part_can_be_left_out(sound: Path) -> None:
    whole, rest = read_gguf(str(sound)), read_gguf(str(sound), tokenizer=False)
    assert any(key.startswith("tokenizer.") for key in whole.metadata)
    assert rest.metadata == {key: value for key, value in whole.metadata.items() if not key.startswith("tokenizer.")}
    assert (rest.tensors, rest.data_offset) == (whole.tensors, whole.data_offset)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_what_is_left_out_is_checked_all_the_same(tmp_path: Path, tokenizer: bool) -> None:
    lists = [
        struct.pack("<IIQ", 9, 8, 2) + text(b"a") + struct.pack("<Q", 1 << 40),
        struct.pack("<IIQ", 9, 6, 1 << 20),
        struct.pack("<I", 99),
    ]
    for content in lists:
        path = tmp_path / "bad.gguf"
        path.write_bytes(header(values=1, rest=text(b"tokenizer.ggml.tokens") + content))
        with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens"):
            read_gguf(str(path), tokenizer=tokenizer)


def test_tensors_are_where_the_directory_says(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tensors = write(path)
    parsed, raw = read_gguf(str(path)), path.read_bytes()
    assert set(parsed.tensors) == {*tensors, "packed"}
    for name, value in tensors.items():
        info = parsed.tensors[name]
        assert info.shape == value.shape
        assert info.offset >= parsed.data_offset
        assert raw[info.offset : info.offset + info.nbytes] == value.tobytes()
    assert parsed.tensors["packed"].type == "Q8_0"
    assert parsed.tensors["packed"].shape == (4, 64)
    assert parsed.tensors["packed"].nbytes == 4 * 2 * 34


def test_block_sizes_agree_with_the_gguf_package() -> None:
    newer = {"NVFP4", "Q1_0"} - set(GGMLQuantizationType.__members__)  # than the oldest package that is asked for
    for kind, (name, block_values, block_bytes) in GGML_TYPES.items():
        if name not in newer:
            assert GGMLQuantizationType[name] == kind
            assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (block_values, block_bytes)


def test_every_truncation_is_an_error(sound: Path, tmp_path: Path) -> None:
    whole = sound.read_bytes()
    cut = tmp_path / "cut.gguf"
    header = read_gguf(str(sound)).data_offset
    lengths = [*range(0, header, 7), *range(header, len(whole), 101), len(whole) - 1]
    last = max(t.offset + t.nbytes for t in read_gguf(str(sound)).tensors.values())
    for length in lengths:
        cut.write_bytes(whole[:length])
        if length >= last:  # padding after the last tensor is not missed
            continue
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf(str(cut))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_crashes_nor_allocates_much(sound: Path, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(sound.read_bytes())
    header = read_gguf(str(sound)).data_offset
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    tracemalloc.start()
    try:
        parsed = read_gguf(str(path))
        gguf_hf_config(parsed.metadata, parsed.tensors)
    except (CheckpointError, UnsupportedModel):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(damaged)


def header(*, version: int = 3, tensors: int = 0, values: int = 0, rest: bytes = b"", magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, values) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "truncated"),
        (header(magic=b"GGML"), "not a GGUF file"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), r"is a big-endian GGUF file, .* Convert it again"),
        (header(tensors=2**60), "truncated"),
        (header(values=2**60), "truncated"),
        (header(values=1, rest=text(b"k") + struct.pack("<I", 99) + bytes(64)), "unknown type 99"),
        (header(values=1, rest=struct.pack("<Q", 2**40) + bytes(64)), "name of"),
        (header(values=1, rest=text(b"\xff\xfe") + struct.pack("<I", 0) + bytes(64)), "not UTF-8"),
        (header(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, 2**50) + bytes(64)), "array of"),
        (header(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 2**20) + bytes(64)), "truncated"),
        (header(values=1, rest=text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(64)), "unknown type 9"),
        (header(values=2, rest=(text(b"k") + struct.pack("<IB", 0, 1)) * 2 + bytes(64)), "twice"),
        (header(tensors=1, rest=tensor(kind=77) + bytes(256)), "'t' has the unknown type 77"),
        (header(tensors=1, rest=tensor(dims=(31,), kind=2) + bytes(256)), "cannot hold"),
        (header(tensors=1, rest=tensor(dims=(0,)) + bytes(256)), "cannot hold"),
        (header(tensors=1, rest=tensor(dims=(2**40, 2**40)) + bytes(256)), "truncated"),
        (header(tensors=1, rest=tensor(dims=(1,) * 5) + bytes(256)), "5 dimensions"),
        (header(tensors=1, rest=tensor(offset=3) + bytes(256)), "not aligned"),
        (header(tensors=2, rest=tensor() + tensor(offset=256) + bytes(1024)), "twice"),
        (header(tensors=2, rest=tensor() + tensor(b"u", offset=64) + bytes(1024)), "overlaps"),
        (header(tensors=1, rest=tensor(offset=64) + bytes(512)), r"'t' has the offset 64, but it is the first, so it must be 0"),
        (
            header(tensors=2, rest=tensor(kind=1) + tensor(b"u", offset=128) + bytes(1024)),
            r"'u' has the offset 128, but tensor 't' ends at 64, so it must be 64: a type or a shape is damaged",
        ),
        (header(values=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 7) + bytes(64)), "no power of two"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(str(path))
    assert "bad.gguf" in str(caught.value)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q4_1"])
@pytest.mark.parametrize("padded", [True, False])
def test_the_type_of_the_last_tensor_shows_by_the_files_end(sound: Path, tmp_path: Path, kind: str, padded: bool) -> None:
    """What all others show by the next one's place."""
    raw = bytearray(sound.read_bytes())
    end = read_gguf(str(sound)).tensors["packed"]
    if not padded:
        del raw[end.offset + end.nbytes :]
    entry = raw.index(struct.pack("<Q", 6) + b"packed") + 14 + 4 + 2 * 8
    assert struct.unpack_from("<I", raw, entry) == (GGMLQuantizationType.Q8_0,)
    struct.pack_into("<I", raw, entry, GGMLQuantizationType[kind])
    (path := tmp_path / "flipped.gguf").write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=rf"'packed' is the last one and has type {kind}, but .* which it has as Q8_0: its type is damaged"
    ):
        read_gguf(str(path))


def test_what_is_appended_does_no_harm(sound: Path, tmp_path: Path) -> None:
    (path := tmp_path / "longer.gguf").write_bytes(sound.read_bytes() + bytes(1000))
    assert set(read_gguf(str(path)).tensors) == set(read_gguf(str(sound)).tensors)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.gguf"):
        read_gguf(str(tmp_path / "nothing.gguf"))
    with pytest.raises(CheckpointError):
        read_gguf(str(tmp_path))


def test_invalid_text_inside_values_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(values=1, rest=text(b"k") + struct.pack("<I", 8) + text(b"a\xffb") + bytes(64)))
    assert read_gguf(str(path)).metadata == {"k": "a\ufffdb"}


def test_nested_arrays(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2B", 0, 2, 5, 6)
    path = tmp_path / "m.gguf"
    path.write_bytes(header(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 2) + inner * 2 + bytes(64)))
    assert read_gguf(str(path)).metadata == {"k": [[5, 6], [5, 6]]}


def test_hf_config(sound: Path) -> None:
    parsed = read_gguf(str(sound))
    config = gguf_hf_config(parsed.metadata, parsed.tensors)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "vocab_size": 5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 4,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    }
    assert {k: config[k] for k in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def metadata(**changes: Any) -> dict[str, Any]:
    base = {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 10,
    }
    return base | {k.replace("__", "."): v for k, v in changes.items()}


def test_hf_config_of_scaled_rope() -> None:
    config = gguf_hf_config(
        metadata(llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0)
        | {"llama.rope.scaling.original_context_length": 128, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}
    )
    assert config["rope_parameters"] == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    assert config["eos_token_id"] == [2, 7]
    assert config["tie_word_embeddings"] is False
    assert gguf_hf_config(metadata(), {"output.weight": GgufTensor("", "F32", (1,), 0, 4)})["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("tokens", "types", "named", "ids"),
    [
        (["a", "<|eot_id|>", "<|eom_id|>"], [1, 3, 3], {"eos": 1}, [1, 2]),
        (["a", "</s>", "<end_of_turn>"], [1, 3, 4], {"eos": 1}, [1, 2]),
        (["a", "</s>", "<|im_end|>"], [1, 3, 1], {"eos": 1}, 1),  # an ordinary word
        (["a", "<|user|>", "<|observation|>", "</s>"], [1, 3, 3, 3], {"eos": 3, "eot": 1, "eom": 2}, [3, 1, 2]),
        (["<|return|>", "<|end|>", "<|call|>"], [3, 3, 3], {"eos": 0, "eot": 1}, [0, 2]),  # gpt-oss goes on behind <|end|>
        (["a", "<|im_end|>"], [1, 3], {}, 1),
        (["a", "b"], [1, 1], {}, None),
        (["a", "<|im_end|>"], [1], {"eos": 0}, 0),  # a damaged list of types
        (["a", ["<|im_end|>"]], [1, 3], {"eos": 0}, 0),
    ],
)
def test_whatever_ends_a_turn_ends_a_reply(tokens: list[Any], types: list[int], named: dict[str, int], ids: Any) -> None:
    more: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    more |= {f"tokenizer.ggml.{key}_token_id": i for key, i in named.items()}
    assert gguf_hf_config(metadata() | more).get("eos_token_id") == ids


def test_hf_config_refuses_what_it_cannot_translate() -> None:
    with pytest.raises(UnsupportedModel, match=r"'plamo'.*llama.*safetensors"):
        gguf_hf_config(metadata(general__architecture="plamo"))
    for stateful in ("mamba", "qwen3next", "lfm2"):
        with pytest.raises(
            UnsupportedModel, match=rf"'{stateful}' is not supported: its layers keep a state.*Take another model"
        ) as caught:
            gguf_hf_config(metadata(general__architecture=stateful))
        assert "safetensors" not in str(caught.value)
    with pytest.raises(CheckpointError, match="expert_used_count"):
        gguf_hf_config(metadata(llama__expert_count=8))
    for key, value in (("llama.block_count", None), ("llama.attention.head_count", 0), ("llama.embedding_length", float("nan"))):
        with pytest.raises(CheckpointError, match=key):
            gguf_hf_config(metadata() | {key: value})
    with pytest.raises(CheckpointError, match="head_count"):
        gguf_hf_config(metadata() | {"llama.attention.head_count": [4, 4]})
    tensors = {name: GgufTensor(name, "F32", (1,), 0, 4) for name in ("output.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight")}
    assert gguf_hf_config(metadata(), tensors)["num_hidden_layers"] == 2
    with pytest.raises(CheckpointError, match=r"block_count is 4000000, but the file has the tensors of 2 layers"):
        gguf_hf_config(metadata() | {"llama.block_count": 4_000_000}, tensors)


@pytest.mark.parametrize(
    ("arch", "key", "tensor", "message"),
    [
        (
            "llama",
            "rope.dimension_count",
            "attn_q",
            r"4 heads of 1073741840 values \(llama.rope.dimension_count\) need 4294967360 rows.* has 64",
        ),
        ("llama", "attention.key_length", "attn_q", r"4 heads of 1073741840 values \(llama.attention.key_length\)"),
        ("llama", "embedding_length", "attn_k", r"\(llama.embedding_length / attention.head_count\).* blk.0.attn_k.weight has 64"),
        ("phi3", "attention.key_length", "attn_qkv", r"blk.0.attn_qkv.weight has 64"),
        ("phi2", "rope.dimension_count", "attn_q", r"phi2.rope.dimension_count is 1073741840, but a head has 16 values"),
    ],
)
def test_the_size_of_a_head_is_held_against_the_tensors(arch: str, key: str, tensor: str, message: str) -> None:
    """What is made of it is as large as it says."""
    sound = {name.replace("llama", arch): value for name, value in metadata(general__architecture=arch).items()}
    name = f"blk.0.{tensor}.weight"
    tensors = {n: GgufTensor(n, "F32", (64, 64), 0, 4) for n in (name, "blk.1.attn_q.weight")}
    assert gguf_hf_config(sound, tensors)["head_dim"] == 16
    with pytest.raises(CheckpointError, match=message):
        gguf_hf_config(sound | {f"{arch}.{key}": 2**30 + 16}, tensors)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count", "vocab_size"])
def test_a_key_that_is_missing_is_said_to_be(key: str) -> None:
    without = metadata()
    del without[f"llama.{key}"]
    with pytest.raises(CheckpointError, match=rf"llama\.{re.escape(key)} is missing\. Download or convert"):
        gguf_hf_config(without)


def test_no_width_of_the_feed_forward_blocks_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"llama\.feed_forward_length must be at least 1, got 0"):
        gguf_hf_config(metadata() | {"llama.feed_forward_length": 0})


@pytest.mark.model
def test_bundled_model() -> None:
    path = bundled_model_path()
    parsed = read_gguf(path)
    assert len(parsed.tensors) == 272
    assert len(parsed.metadata["tokenizer.ggml.tokens"]) == 49152
    assert parsed.tensors["token_embd.weight"] == GgufTensor("token_embd.weight", "Q8_0", (49152, 576), 1785664, 30081024)
    assert max(t.offset + t.nbytes for t in parsed.tensors.values()) <= os.path.getsize(path)


@pytest.mark.parametrize("first", [1, 40, 1000])
def test_however_little_is_read_at_first(tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same header, and the same error wherever the file ends."""

    def outcome() -> object:
        try:
            return read_gguf(str(path))
        except CheckpointError as error:
            return str(error)

    path = tmp_path / "model.gguf"
    write(path)
    whole = path.read_bytes()
    for end in (*range(0, len(whole), 61), len(whole)):
        path.write_bytes(whole[:end])
        expected = outcome()
        with monkeypatch.context() as patch:
            patch.setattr(gguf_file, "_FIRST_READ", first)
            assert outcome() == expected
    assert not isinstance(expected, str)


def test_a_header_that_is_cut_short_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two reads."""
    path = tmp_path / "model.gguf"
    write(path)
    parse = gguf_file._parse

    def cut(cursor: Any) -> Any:
        os.truncate(path, 300)
        return parse(cursor)

    monkeypatch.setattr(gguf_file, "_FIRST_READ", 200)
    monkeypatch.setattr(gguf_file, "_parse", cut)
    with pytest.raises(CheckpointError, match=r"the file ends at 300 \(truncated"):
        read_gguf(str(path))
