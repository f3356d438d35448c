"""PyTorch files: tensors come out, anything else is refused and never run."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.checkpoint.files import read_json_object
from octavo.checkpoint.gguf_file import read_gguf
from octavo.errors import CheckpointError, plain_text
from octavo.weights.pickled import INDEX, open_pickled, pickled_files
from octavo.weights.safetensors import open_safetensors


def read(path: Path) -> dict[str, torch.Tensor]:
    out = {}
    for stored in open_pickled(str(path)):
        stored.copy_into(tensor := torch.empty(stored.shape))
        out[stored.name] = tensor
    return out


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_come_out_as_they_went_in(tmp_path: Path, zipped: bool) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "shared": torch.randn(6)[1:4]}
    torch.save({**tensors, "step": 7}, tmp_path / "m.bin", _use_new_zipfile_serialization=zipped)
    for name, tensor in read(tmp_path / "m.bin").items():
        torch.testing.assert_close(tensor, tensors[name].float())


class Evil:
    def __reduce__(self) -> object:
        return (Path.touch, (Path(self.where),))

    def __init__(self, where: str) -> None:
        self.where = where


@pytest.mark.parametrize("plain", [True, False])
def test_code_is_never_run(tmp_path: Path, plain: bool) -> None:
    victim, file = tmp_path / "was-here", tmp_path / "pytorch_model.bin"
    if plain:
        file.write_bytes(pickle.dumps({"a": Evil(str(victim))}))
    else:
        torch.save({"a": Evil(str(victim))}, file)
    with pytest.raises(CheckpointError, match="nothing of it was run") as caught:
        read(file)
    assert not victim.exists()
    assert not any(advice in str(caught.value) for advice in ("weights_only", "trust", "can still be loaded"))


@pytest.mark.parametrize("keep", [0, 3, 200])
def test_truncated_files_are_named(tmp_path: Path, keep: int) -> None:
    torch.save({"a": torch.randn(100)}, tmp_path / "m.bin")
    (tmp_path / "m.bin").write_bytes((tmp_path / "m.bin").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        read(tmp_path / "m.bin")


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "module"])
def test_tensors_that_training_tools_put_one_level_down(tmp_path: Path, key: str) -> None:
    torch.save({"epoch": 3, key: {"a": torch.ones(2), "b": torch.zeros(3)}, "optimizer": {"lr": 0.1}}, tmp_path / "m.bin")
    assert set(read(tmp_path / "m.bin")) == {"a", "b"}


@pytest.mark.parametrize("stored", [{}, {"epoch": 3, "args": {"lr": 0.1}}, {"state_dict": {}}, {1: torch.ones(2)}])
def test_files_without_named_tensors_say_what_they_hold(tmp_path: Path, stored: dict[object, object]) -> None:
    torch.save(stored, tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=r"m\.bin must hold tensors by name, at the top or under state_dict, model, .*; it holds"):
        read(tmp_path / "m.bin")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 538\n", "a pointer of Git LFS"),
        (b"\n<!DOCTYPE html><html><head><title>Access denied", "a web page"),
    ],
)
def test_what_lies_in_the_place_of_a_file_is_told(tmp_path: Path, content: bytes, says: str) -> None:
    for name in ("m.bin", "model.safetensors", "m.gguf", "config.json"):
        (tmp_path / name).write_bytes(content)
    readers: dict[str, Callable[[str], object]] = {
        "m.bin": lambda path: read(Path(path)),
        "model.safetensors": lambda path: list(open_safetensors(path)),
        "config.json": lambda path: read_json_object(Path(path)),
        "m.gguf": read_gguf,
    }
    for name, reader in readers.items():
        if name == "m.gguf" and not content:
            continue  # a file of no bytes cannot be mapped, and says so
        with pytest.raises(CheckpointError, match=says) as told:
            reader(str(tmp_path / name))
        assert str(told.value).startswith(str(tmp_path / name))


def test_messages_have_no_codes_for_terminals(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(pickle.dumps({"a": Evil(str(tmp_path / "x"))}))
    with pytest.raises(CheckpointError) as told:
        read(tmp_path / "m.bin")
    assert "\x1b" not in str(told.value)
    assert plain_text("\x1b[1mbold\x1b[0m, \x1b[38;5;9mred\x07") == "bold, red"


def test_integers_are_no_weights(tmp_path: Path) -> None:
    torch.save({"ids": torch.arange(3)}, tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match="ids has dtype"):
        read(tmp_path / "m.bin")


def test_which_files(tmp_path: Path) -> None:
    assert pickled_files(str(tmp_path)) == []
    (tmp_path / "pytorch_model.bin").touch()
    assert pickled_files(str(tmp_path)) == [str(tmp_path / "pytorch_model.bin")]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "b.bin", "c": "a.bin"}}))
    with pytest.raises(CheckpointError, match=r"missing: a\.bin"):
        pickled_files(str(tmp_path))
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).touch()
    assert [Path(f).name for f in pickled_files(str(tmp_path))] == ["a.bin", "b.bin"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../b.bin"}}))
    with pytest.raises(CheckpointError, match="missing"):
        pickled_files(str(tmp_path))
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        pickled_files(str(tmp_path))


def _cut(path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:-200])


def _foreign(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello", "x")


def _pickle_alone(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": [1] * 10}, protocol=4))


@pytest.mark.parametrize("damage", [_cut, _foreign, _pickle_alone])
def test_what_torch_advises_is_left_out(tmp_path: Path, damage: Callable[[Path], None], recwarn: pytest.WarningsRecorder) -> None:
    """It is for who writes such files, or for torch's own developers."""
    damage(path := tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=r"m\.bin( holds|: not a sound PyTorch file: ).*[^ .?]\. (Download|Take) .*\.$") as told:
        read(path)
    assert not re.search(r"PyTorch\)|enforce|please|internal|If you|Could this", str(told.value))
    assert not recwarn.list
