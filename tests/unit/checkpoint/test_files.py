"""The one door to a model's files: what bears a file's name and is none is said, and never waited for."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.checkpoint.files import is_there, read_json_object
from octavo.checkpoint.gguf_file import read_gguf
from octavo.checkpoint.local import open_folder, quantization_config
from octavo.checkpoint.pooling import pooling_settings
from octavo.checkpoint.resolve import resolve_checkpoint, tokenizer_source
from octavo.checkpoint.types import Checkpoint
from octavo.config.args import EngineArgs
from octavo.errors import CheckpointError
from octavo.frontend.text.tokenizer import load_tokenizer
from octavo.weights.pickled import open_pickled, pickled_files
from octavo.weights.safetensors import open_safetensors, weight_files

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _nothing(path: Path) -> None:
    path.symlink_to("/no/such/file")


def _circle(path: Path) -> None:
    path.symlink_to(path)


STANDINS = [
    pytest.param(_pipe, "is a named pipe, not a regular file", id="pipe"),
    pytest.param(_folder, "is a folder, not a regular file", id="folder"),
    pytest.param(_nothing, "is a link to /no/such/file, which does not exist", id="dangling"),
    pytest.param(_circle, "leads back to itself", id="circle"),
]


def _model(folder: Path) -> Checkpoint:
    return open_folder(folder, "m", None, "auto")


def _tokenizer(folder: Path) -> object:
    if not os.path.lexists(folder / "tokenizer_config.json"):
        (folder / "tokenizer_config.json").write_text("{}")
    return load_tokenizer(Checkpoint(str(folder), "m", "config", {}, {}, ()), EngineArgs(model=str(folder)))


DOORS: list[tuple[str, Callable[[Path], object]]] = [
    ("config.json", _model),
    ("generation_config.json", _model),
    ("model.safetensors", _model),
    ("model.safetensors.index.json", _model),
    ("shard-1.safetensors", _model),
    ("model.safetensors", lambda folder: weight_files(str(folder))),
    ("shard-1.safetensors", lambda folder: weight_files(str(folder))),
    ("model.safetensors", lambda folder: list(open_safetensors(str(folder / "model.safetensors")))),
    ("pytorch_model.bin", lambda folder: pickled_files(str(folder))),
    ("pytorch_model.bin.index.json", lambda folder: pickled_files(str(folder))),
    ("pytorch_model.bin", lambda folder: list(open_pickled(str(folder / "pytorch_model.bin")))),
    ("quantize_config.json", lambda folder: quantization_config(folder, {})),
    ("modules.json", lambda folder: pooling_settings(_model(folder), "pooling")),
    ("model.gguf", lambda folder: read_gguf(str(folder / "model.gguf"))),
    ("model.gguf", lambda folder: resolve_checkpoint(str(folder / "model.gguf"), load_format="gguf")),
    ("tokenizer.json", lambda folder: tokenizer_source(str(folder / "tokenizer.json"))),
    ("tokenizer.json", _tokenizer),
    ("tokenizer_config.json", _tokenizer),
    ("tokenizer.model", _tokenizer),
    ("tekken.json", _tokenizer),
    ("vocab.txt", _tokenizer),
    ("merges.txt", _tokenizer),
]


@pytest.mark.parametrize(("stand_in", "says"), STANDINS)
@pytest.mark.parametrize(("name", "door"), DOORS)
@pytest.mark.timeout(20)
def test_what_is_no_file_is_said_at_every_door(
    tmp_path: Path, name: str, door: Callable[[Path], object], stand_in: Callable[[Path], None], says: str
) -> None:
    if (name, stand_in) in (("model.gguf", _folder), ("tokenizer.json", _folder)) and door is not _tokenizer:
        pytest.skip("a folder may be called so")
    if name != "config.json":
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    stand_in(tmp_path / name)
    with pytest.raises(CheckpointError, match=says) as raised:
        door(tmp_path)
    assert name in str(raised.value)
    assert "Did you mean" not in str(raised.value)


def test_links_to_files_are_files(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "link").symlink_to("blob")
    assert is_there(tmp_path / "link")
    assert not is_there(tmp_path / "missing")
    assert not is_there(tmp_path / "blob" / "inside")


@pytest.mark.parametrize("depth", [101, 900, 100_000])
def test_deep_nesting_is_said(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a":' * depth + "1" + "}" * depth)
    with pytest.raises(CheckpointError, match=r"config\.json .* nested too deeply"):
        read_json_object(path)


def test_usual_nesting_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 100 + "1" + "}" * 100)
    assert "a" in read_json_object(path)


def test_a_number_of_many_digits_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"vocab_size": ' + "9" * 6000 + "}")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON: it holds a number of too many digits"):
        read_json_object(path)


@pytest.mark.parametrize("closed", [False, True])
def test_a_deep_header_of_safetensors_is_said(tmp_path: Path, closed: bool) -> None:
    header = (b'{"a":' * 100_000) + (b"1" + b"}" * 100_000 if closed else b"")
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=r"not a sound safetensors file: .*nested"):
        list(open_safetensors(str(path)))


def test_deep_indices_are_said(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    for name, door in (("model.safetensors.index.json", weight_files), ("pytorch_model.bin.index.json", pickled_files)):
        (tmp_path / name).write_text('{"a":' * 100_000)
        with pytest.raises(CheckpointError, match="nested too deeply"):
            door(str(tmp_path))
