"""PyTorch files: tensors come out, anything else is refused and never run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.weights.pickled import INDEX, open_pickled, pickled_files


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
    with pytest.raises(CheckpointError, match="nothing of it was run"):
        read(file)
    assert not victim.exists()


@pytest.mark.parametrize("keep", [0, 3, 200])
def test_truncated_files_are_named(tmp_path: Path, keep: int) -> None:
    torch.save({"a": torch.randn(100)}, tmp_path / "m.bin")
    (tmp_path / "m.bin").write_bytes((tmp_path / "m.bin").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        read(tmp_path / "m.bin")


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
    with pytest.raises(CheckpointError, match="weight_map"):
        pickled_files(str(tmp_path))
