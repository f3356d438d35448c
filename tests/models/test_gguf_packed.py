"""GGUF weights that stay packed outside of the compiled CPU decoder, as on a GPU: the same logits as from the dequantised file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.config.types import ParallelConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.models.loader import keeps_gguf_packed, load_model
from octavo.ops.packed import DenseWeight, ExpertsWeight, Int4Weight, Int8Weight, OffsetWeight, SegmentedWeight, TableWeight
from octavo.ops.registry import load_ops
from tests.models.contiguous import run
from tests.models.test_gguf_families import CASES, load_file, metadata_of
from tests.support.bundled import bundled_model_path
from tests.support.gguf_blocks import small_blocks
from tests.support.gguf_models import Array, tensors_of, write_model
from tests.support.thread_group import together
from tests.support.tiny_models import config_for, tiny_model
from tests.unit.weights.test_gguf_coded import KINDS, PACKED, UNPACKED

IDS = [5, 7, 11, 13, 17, 19]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}


def packed_and_plain(folder: Path, type_of: Callable[[str], str], family: str = "llama", **overrides: Any) -> tuple[Path, Path]:
    """Two files with the same weights: matrices in blocks of random bytes, and what the gguf package makes of them."""
    arch, more = ("llama", {"rope.dimension_count": 64}) if family == "llama" else (CASES[family][0], CASES[family][3])
    model = tiny_model(CASES[family][1] if family in CASES else family, **(SIZES | overrides))
    tensors = tensors_of(model, arch)
    packed: dict[str, tuple[Array, gguf.GGMLQuantizationType]] = {}
    for seed, (name, value) in enumerate(sorted(tensors.items())):
        if value.ndim < 2 or name.endswith("bias") or "ffn_gate_inp" in name:
            continue
        kind = gguf.GGMLQuantizationType[type_of(name)]
        raw = small_blocks(kind.name, value.size // value.shape[-1], value.shape[-1], seed)
        packed[name] = raw.reshape(*value.shape[:-1], -1), kind
        tensors[name] = gguf.quants.dequantize(raw, kind).reshape(value.shape).astype(np.float32)
    metadata = metadata_of(model, arch, more)
    write_model(folder / "plain.gguf", arch, metadata, tensors)
    write_packed(folder / "packed.gguf", arch, metadata, tensors, packed)
    return folder / "packed.gguf", folder / "plain.gguf"


def write_packed(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Array], packed: Mapping[str, Any]) -> None:
    add = gguf.GGUFWriter.add_tensor

    def instead(self: Any, name: str, value: Array, *args: Any, **options: Any) -> None:
        if name in packed:
            add(self, name, packed[name][0], raw_dtype=packed[name][1])
        else:
            add(self, name, value, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", instead)
        write_model(path, arch, metadata, tensors)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", [*PACKED, *UNPACKED])
def test_logits_of_the_dequantised_file(name: str, tmp_path: Path) -> None:
    packed, plain = packed_and_plain(tmp_path, lambda _: name)
    expected = run(load_file(plain), IDS)
    assert 0.1 < float(expected.std()) < 100
    model: Any = load_file(packed, ops="reference")
    assert distance(run(model, IDS), expected) < 1e-5
    assert distance(run(load_file(packed, ops="cpu"), IDS), expected) < 1e-5
    wanted = DenseWeight if name in UNPACKED else KINDS.get(name, OffsetWeight)
    for weight in (model._layers[0].attention.qkv.weight, model._layers[1].mlp.down.weight, model._head.weight):
        assert isinstance(weight, wanted)


def test_mixtures_stay_side_by_side(tmp_path: Path) -> None:
    """As in files of kind Q4_K_M, where v and some down projections have more bits."""
    packed, plain = packed_and_plain(tmp_path, lambda tensor: "Q6_K" if "attn_v" in tensor else "Q4_0" if "ffn_up" in tensor else "Q4_K")
    model: Any = load_file(packed, ops="reference")
    assert distance(run(model, IDS), run(load_file(plain), IDS)) < 1e-5
    parts = model._layers[0].attention.qkv.weight.parts
    assert [type(part) for part in parts] == [OffsetWeight, OffsetWeight, DenseWeight]
    gate_up = model._layers[0].mlp.gate_up.weight
    assert isinstance(gate_up, SegmentedWeight)
    assert [type(part) for part in gate_up.parts] == [OffsetWeight, Int4Weight]


@pytest.mark.parametrize(("kind", "wanted"), [("Q4_0", Int4Weight), ("Q8_0", Int8Weight), ("MXFP4", TableWeight), ("Q4_1", None)])
def test_experts(kind: str, wanted: type | None, tmp_path: Path) -> None:
    packed, plain = packed_and_plain(tmp_path, lambda _: kind, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    model: Any = load_file(packed, ops="reference")
    assert distance(run(model, IDS), run(load_file(plain), IDS)) < 1e-5
    experts: ExpertsWeight = model._layers[0].mlp.gate_up
    assert experts.low_bit is None if wanted is None else isinstance(experts.low_bit, wanted)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "IQ4_XS"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    packed, plain = packed_and_plain(tmp_path, lambda _: name)
    parsed = gguf_config(packed)
    config = replace(config_for(packed, hf_config=parsed), parallel=ParallelConfig(tensor=2))

    def rank(group: Any) -> tuple[torch.Tensor, Any]:
        model = load_model(config, load_ops("reference"), torch.device("cpu"), lambda *_: None, group)
        return run(model, IDS), model

    expected = run(load_file(plain), IDS)
    for logits, model in together(2, rank):
        assert distance(logits, expected) < 1e-5
        assert isinstance(model._layers[0].mlp.down.weight, KINDS.get(name, OffsetWeight))


def gguf_config(path: Path) -> dict[str, Any]:
    from octavo.checkpoint.gguf_config import gguf_hf_config
    from octavo.checkpoint.gguf_file import read_gguf

    parsed = read_gguf(str(path))
    return gguf_hf_config(parsed.metadata, parsed.tensors)


NEWER = pytest.mark.skipif("NVFP4" not in gguf.GGMLQuantizationType.__members__, reason="the gguf package is too old for it")
WRITTEN = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
"""What the gguf package can write."""
REST = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", pytest.param("NVFP4", marks=NEWER)]
"""What it can read besides, and nobody here has kernels for."""


@pytest.mark.parametrize("ops", ["reference", "cpu", "native"])
@pytest.mark.parametrize("name", WRITTEN)
def test_every_type_that_the_gguf_package_writes(name: str, ops: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    model = tiny_model("llama", **SIZES)
    tensors, metadata = tensors_of(model, "llama"), metadata_of(model, "llama", {"rope.dimension_count": 64})
    write_model(tmp_path / "packed.gguf", "llama", metadata, tensors, name)
    plain = {n: v if v.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(v, kind), kind) for n, v in tensors.items()}
    write_model(tmp_path / "plain.gguf", "llama", metadata, plain)
    expected = run(load_file(tmp_path / "plain.gguf"), IDS)
    found = run(load_file(tmp_path / "packed.gguf", ops=ops), IDS)
    assert distance(found, expected) < (2e-3 if ops == "native" and name == "Q5_1" else 1e-5)  # which has scales in float16 there


@pytest.mark.parametrize("ops", ["reference", "cpu", "native"])
@pytest.mark.parametrize("name", REST)
def test_types_without_kernels(name: str, ops: str, tmp_path: Path) -> None:
    packed, plain = packed_and_plain(tmp_path, lambda _: name)
    expected = run(load_file(plain), IDS)
    assert 0.1 < float(expected.std()) < 100
    assert distance(run(load_file(packed, ops=ops), IDS), expected) < (3e-3 if ops == "native" else 1e-5)


@NEWER
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_scales_beside_blocks_with_scales_of_eight_bits(family: str, tmp_path: Path) -> None:
    """NVFP4's: one number a matrix, of experts as many, and one for inputs, which stay as they are."""
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}
    packed, plain = packed_and_plain(tmp_path, lambda _: "NVFP4", family, **more)
    name = "blk.1.ffn_up_exps" if family == "mixtral" else "blk.1.ffn_up"
    outer = np.array([2.0, 0.5, 3.0, 0.25] if family == "mixtral" else [2.0], np.float32)

    def rewritten(path: Path, change: Callable[[dict[str, Array]], None], file: Path) -> None:
        reader = gguf.GGUFReader(path)
        tensors = {t.name: np.array(t.data) for t in reader.tensors}
        kinds = {t.name: t.tensor_type for t in reader.tensors}
        change(tensors)
        arch = "llama"
        metadata = {k: v.contents() for k, v in reader.fields.items() if k.startswith("llama.")}
        writer = gguf.GGUFWriter(file, arch)
        for key, value in metadata.items():
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        for one, value in tensors.items():
            writer.add_tensor(one, value, raw_dtype=kinds.get(one))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def scaled(tensors: dict[str, Array]) -> None:
        value = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = (value * outer.reshape(-1, *[1] * (value.ndim - 1))).astype(np.float32)

    rewritten(plain, scaled, tmp_path / "scaled.gguf")
    sidecars = {f"{name}.scale": outer, f"{name}.input_scale": np.ones_like(outer)}
    rewritten(packed, lambda t: t.update(sidecars), tmp_path / "with.gguf")
    expected = run(load_file(tmp_path / "scaled.gguf"), IDS)
    assert distance(expected, run(load_file(plain), IDS)) > 0.01
    for ops in ("cpu", "native"):
        assert distance(run(load_file(tmp_path / "with.gguf", ops=ops), IDS), expected) < 3e-3
    for wrong, says in ((np.array([np.nan], np.float32), "greater than 0"), (np.ones(3, np.float32), "has 3 scales")):
        rewritten(packed, lambda t, wrong=wrong: t.update({f"{name}.scale": wrong}), tmp_path / "wrong.gguf")  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=says):
            load_file(tmp_path / "wrong.gguf")


@NEWER
@pytest.mark.parametrize("ops", ["cpu", "native"])
def test_a_type_that_nobody_unpacks_is_named(ops: str, tmp_path: Path) -> None:
    model = tiny_model("llama", **SIZES)
    tensors, metadata = tensors_of(model, "llama"), metadata_of(model, "llama", {"rope.dimension_count": 64})
    name = "blk.0.ffn_up.weight"
    raw = np.zeros((512, 36), np.uint8), gguf.GGMLQuantizationType.Q1_0
    write_packed(tmp_path / "m.gguf", "llama", metadata, tensors, {name: raw})
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has type Q1_0, which cannot be read"):
        load_file(tmp_path / "m.gguf", ops=ops)


def test_what_it_takes_is_known_before(tmp_path: Path) -> None:
    packed, _ = packed_and_plain(tmp_path, lambda tensor: "Q6_K" if "attn_v" in tensor else "Q4_K")
    model = load_file(packed, ops="reference")
    fits, little = int(model.weights_bytes * 1.02), int(model.weights_bytes * 0.95)
    load_file(packed, ops="reference", total_bytes=fits)
    with pytest.raises(ConfigError, match="The weights of tiny need"):
        load_file(packed, ops="reference", total_bytes=little)


@pytest.mark.parametrize(
    ("name", "ops"), [("Q4_K", "reference"), ("Q4_K", "cpu"), ("Q4_K", "native"), ("IQ3_S", "cpu"), ("IQ3_S", "native")]
)
def test_scales_that_are_no_numbers_are_named(name: str, ops: str, tmp_path: Path) -> None:
    packed, _ = packed_and_plain(tmp_path, lambda _: name)
    (found,) = (t for t in gguf.GGUFReader(packed).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(packed.read_bytes())
    data[int(found.data_offset) : int(found.data_offset) + 2] = np.float16("nan").tobytes()
    packed.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight holds scales that are NaN or infinite"):
        load_file(packed, ops=ops)


def test_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real file: Q4_1 with a Q8_0 embedding."""
    path = Path(bundled_model_path())
    packed, plain = (load_file(path, ops=ops) for ops in ("reference", "cpu"))
    ids = list(range(100, 108))
    assert distance(run(packed, ids), run(plain, ids)) < 1e-4
    assert packed.weights_bytes < 0.5 * plain.weights_bytes


@pytest.mark.parametrize("name", [*PACKED, *UNPACKED])
def test_compiled_decoders_keep_them_small(name: str, tmp_path: Path) -> None:
    """What their kernels do not take as it is becomes groups of 4 or 8 bits where it can, else 16 bits, and never 32."""
    packed, plain = packed_and_plain(tmp_path, lambda _: name)
    model, whole = load_file(packed, ops="native"), load_file(plain, ops="native")
    assert distance(run(model, IDS), run(whole, IDS)) < 2e-3
    bits = 32 * model.weights_bytes / whole.weights_bytes
    kept = {**dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), 5.0), **dict.fromkeys(("Q5_1", "Q5_K", "Q6_K"), 9.0), "Q2_K": 16.0}
    assert bits < kept.get(name, 8.5) + 0.1
    fits, little = int(model.weights_bytes * 1.02), int(model.weights_bytes * 0.9)
    load_file(packed, ops="native", total_bytes=fits)
    with pytest.raises(ConfigError, match="The weights of tiny need"):
        load_file(packed, ops="native", total_bytes=little)


def test_where_they_stay_packed() -> None:
    """Where `linear` reads them as they are, that is: on a GPU in 16 bits, and not where it would unpack them in every step."""
    pytest.importorskip("triton")
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    kernels, invariant = load_ops("cuda"), load_ops("cuda", batch_invariant=True)
    assert keeps_gguf_packed(kernels, cuda, torch.bfloat16) and keeps_gguf_packed(kernels, cuda, torch.float16)
    assert not keeps_gguf_packed(kernels, cuda, torch.float32)
    assert not keeps_gguf_packed(invariant, cuda, torch.bfloat16)
    assert not keeps_gguf_packed(load_ops("cpu"), cpu, torch.float32)
