"""Damaged GGUF files on the compiled kernels: a clear error, or a model that runs to its end; never a crash."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from octavo.attention.native_cpu import NativeCpuAttention
from octavo.checkpoint.gguf_config import gguf_hf_config
from octavo.checkpoint.gguf_file import read_gguf
from octavo.errors import CheckpointError, ConfigError, OctavoError
from octavo.models import decoder, program
from octavo.models.decoder import Model
from octavo.models.program_loader import load_program
from octavo.ops.cpu import abi, decoder_kernels
from octavo.weights.gguf_bytes import GgufBytes
from octavo.worker import worker
from octavo.worker.compiled_worker import compiled_worker
from tests.models.test_loading import load_gguf, write_gguf
from tests.support.paged_batches import Pool, step_batch
from tests.support.tiny_models import config_for, save_tiny, tiny_model

pytestmark = pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    write_gguf(path, tiny_model("llama", hidden_size=64, intermediate_size=96, head_dim=16), "llama", GGMLQuantizationType.Q4_1)
    return path


def logits_of(model: Model) -> torch.Tensor:
    """Of a prompt of 20 tokens through the paged cache."""
    attention = NativeCpuAttention(model.layer_specs, 4, 16, torch.float16, torch.device("cpu"))
    batch = step_batch([0], [20], Pool(4, 16, seed=0).tables([20]), 16)
    ids = torch.arange(20) % model.spec.vocab_size
    batch.token_ids.copy_(ids)
    return model.logits(model.forward(ids, batch.positions, attention.plan(batch)))


def outcome(path: Path) -> str:
    try:
        model = load_gguf(path, ops="native", activations="int16")
    except OctavoError as error:
        assert str(error), "an error says what is wrong"
        return "refused"
    return "finite" if bool(logits_of(model).isfinite().all()) else "not finite"


@pytest.mark.parametrize("part", ["header", "weights"])
def test_flipped_bits(sound: Path, tmp_path: Path, part: str) -> None:
    """In the header most are noticed; in weights they change numbers, at worst to ones that are none, which is refused."""
    whole, parsed = sound.read_bytes(), read_gguf(str(sound))
    random, seen = np.random.default_rng(7), set()
    begin, end = (0, parsed.data_offset) if part == "header" else (parsed.data_offset, len(whole))
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[random.integers(begin, end)] ^= 1 << random.integers(0, 8)
        (tmp_path / "bad.gguf").write_bytes(damaged)
        seen.add(outcome(tmp_path / "bad.gguf"))
    assert outcome(sound) == "finite"
    if part == "header":
        assert "refused" in seen
    else:
        assert "finite" in seen and "not finite" not in seen


def test_scales_that_are_no_numbers(sound: Path, tmp_path: Path) -> None:
    """They are refused with the tensor's name, wherever they are."""
    whole, parsed = bytearray(sound.read_bytes()), read_gguf(str(sound))
    whole[parsed.data_offset :] = b"\xff" * (len(whole) - parsed.data_offset)
    (tmp_path / "bad.gguf").write_bytes(whole)
    assert outcome(tmp_path / "bad.gguf") == "refused"
    whole = bytearray(sound.read_bytes())
    last = max((t for t in parsed.tensors.values() if len(t.shape) == 2), key=lambda t: t.offset)
    place = last.offset + last.nbytes - 20  # its last block, which begins with the scale
    whole[place : place + 2] = np.float16("nan").tobytes()
    (tmp_path / "bad.gguf").write_bytes(whole)
    with pytest.raises(OctavoError, match=rf"tensor {re.escape(last.name)} holds scales"):
        load_gguf(tmp_path / "bad.gguf", ops="native", activations="int16")


def test_truncations(sound: Path, tmp_path: Path) -> None:
    whole = sound.read_bytes()
    for size in np.linspace(0, len(whole) - 1, 40, dtype=int):
        (tmp_path / "bad.gguf").write_bytes(whole[:size])
        assert outcome(tmp_path / "bad.gguf") == "refused"


@pytest.mark.parametrize("cut_before", [1, 2, 7])
@pytest.mark.parametrize("way", ["program", "native", "cpu"])
def test_cut_short_while_it_is_loaded(sound: Path, tmp_path: Path, way: str, cut_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped pages of the part that is gone would end the process."""
    path, calls = tmp_path / "short.gguf", 0
    shutil.copy(sound, path)
    read = GgufBytes.read

    def cut(self: GgufBytes, name: str, offset: int, nbytes: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == cut_before:
            os.truncate(path, offset + nbytes // 2)
        return read(self, name, offset, nbytes)

    monkeypatch.setattr(GgufBytes, "read", cut)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))}: .*tensor '.+' ends at byte \d+, but the file has \d+ \(truncated"):
        if way == "program":
            parsed = read_gguf(str(path))
            config = config_for(path, hf_config=gguf_hf_config(parsed.metadata, parsed.tensors))
            config = replace(config, device=replace(config.device, native_kernels=True))
            load_program(config, decoder_kernels(), lambda *_: None)
        else:
            load_gguf(path, ops=way)
    assert calls == cut_before


@pytest.mark.parametrize("length", [2**24, 2**31 - 1])
def test_a_context_for_which_there_is_no_cache_is_refused_before_its_tables(
    sound: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take a second for each million of positions, and gigabytes."""
    parsed = read_gguf(str(sound))
    config = config_for(sound, hf_config=gguf_hf_config(parsed.metadata, parsed.tensors), max_model_len=length)
    config = replace(
        config,
        device=replace(config.device, native_kernels=True),
        cache=replace(config.cache, memory_bytes=2**26, num_blocks_override=None),
    )

    def table(*_: object) -> None:
        raise AssertionError("a table was made")

    monkeypatch.setattr(program, "rotation_table", table)
    with pytest.raises(ConfigError, match=rf"max_model_len={length} needs .* of KV cache"):
        compiled_worker(config, lambda *_: None)
    with pytest.raises(AssertionError, match="a table was made"):
        compiled_worker(replace(config, model=replace(config.model, max_model_len=256)), lambda *_: None)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("length", [2**24, 2**31 - 1])
def test_torchs_worker_refuses_it_before_its_tables_too(sound: Path, length: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = read_gguf(str(sound))
    config = config_for(sound, hf_config=gguf_hf_config(parsed.metadata, parsed.tensors), max_model_len=length)
    config = replace(
        config,
        device=replace(config.device, native_kernels=kernels == "native"),
        cache=replace(config.cache, memory_bytes=2**26, num_blocks_override=None),
    )

    def table(*_: object) -> None:
        raise AssertionError("a table was made")

    for module, name in ((program, "rotation_table"), (decoder, "cos_sin_table"), (worker, "SlotTables")):
        monkeypatch.setattr(module, name, table)
    with pytest.raises(ConfigError, match=rf"max_model_len={length} needs .* of KV cache"):
        worker.Worker(config, lambda *_: None)
    with pytest.raises(AssertionError, match="a table was made"):
        worker.Worker(replace(config, model=replace(config.model, max_model_len=256)), lambda *_: None)


def test_transformers_models_are_refused_before_tables_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "llama")
    config = config_for(tmp_path, max_model_len=2**24)
    config = replace(
        config,
        model=replace(config.model, implementation="transformers"),
        cache=replace(config.cache, memory_bytes=2**20, num_blocks_override=None),
    )

    def table(*_: object, **__: object) -> None:
        raise AssertionError("a table was made")

    monkeypatch.setattr(worker, "SlotTables", table)
    with pytest.raises(ConfigError, match=r"max_model_len=16777216 needs .* of KV cache"):
        worker.Worker(config, lambda *_: None)
    with pytest.raises(AssertionError, match="a table was made"):
        worker.Worker(replace(config, model=replace(config.model, max_model_len=256)), lambda *_: None)


def test_unknown_block_type(sound: Path, tmp_path: Path) -> None:
    """The type of the first matrix, in the directory, becomes one that nobody knows."""
    whole = bytearray(sound.read_bytes())
    name = b"token_embd.weight"
    place = whole.index(name) + len(name) + 4 + 2 * 8
    assert int.from_bytes(whole[place : place + 4], "little") == int(GGMLQuantizationType.Q4_1)
    whole[place : place + 4] = (77).to_bytes(4, "little")
    (tmp_path / "bad.gguf").write_bytes(whole)
    with pytest.raises(OctavoError, match=r"token_embd.weight.*77"):
        load_gguf(tmp_path / "bad.gguf", ops="native")
