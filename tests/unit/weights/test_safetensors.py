"""Which files make up a model, and what is said about bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.weights.safetensors import open_safetensors, weight_files


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"")


def test_tensors_come_back_converted(tmp_path: Path) -> None:
    stored = {"a": torch.randn(3, 4).to(torch.bfloat16), "b": torch.randn(5).double(), "c": torch.randn(2, 2).half()}
    save_file(stored, path := tmp_path / "model.safetensors")
    seen = {}
    for tensor in open_safetensors(str(path)):
        destination = torch.empty(tensor.shape)
        tensor.copy_into(destination)
        seen[tensor.name] = destination
        assert tensor.nbytes == stored[tensor.name].nbytes
        assert tensor.file == str(path)
    assert set(seen) == set(stored)
    for name, value in stored.items():
        assert torch.equal(seen[name], value.float())


def test_single_file_wins_over_a_consolidated_copy(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "consolidated.safetensors")
    assert weight_files(str(tmp_path)) == [str(tmp_path / "model.safetensors")]


def test_index_decides(tmp_path: Path) -> None:
    touch(tmp_path, "model-1.safetensors", "model-2.safetensors", "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "model-2.safetensors", "y": "model-1.safetensors", "z": "model-2.safetensors"}})
    )
    assert weight_files(str(tmp_path)) == [str(tmp_path / f"model-{i}.safetensors") for i in (1, 2)]


def test_any_names_do_without_an_index(tmp_path: Path) -> None:
    touch(tmp_path, "weights-b.safetensors", "weights-a.safetensors", "consolidated.00.safetensors")
    assert weight_files(str(tmp_path)) == [str(tmp_path / f"weights-{c}.safetensors") for c in "ab"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, not a list"),
        ('{"weight_map": 3}', "not a sound index"),
        ('{"weight_map": {"x": 3, "y": "a.safetensors"}}', "not a sound index"),
        ('{"weight_map": {"x": 3}}', "names the file 3"),
        ('{"weight_map": {"x": "../../etc/passwd"}}', "same folder"),
        ('{"weight_map": {"x": "model-9.safetensors"}}', r"model-9\.safetensors: missing"),
    ],
)
def test_bad_index(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        weight_files(str(tmp_path))


def test_pickled_weights_are_named_with_what_to_do(tmp_path: Path) -> None:
    touch(tmp_path, "pytorch_model.bin", "config.json")
    with pytest.raises(CheckpointError, match=r"PyTorch weights.*pytorch_model\.bin.*safetensors"):
        weight_files(str(tmp_path))


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dummy"):
        weight_files(str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be read"):
        weight_files(str(tmp_path / "nowhere"))


def test_every_truncation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    save_file({"first": torch.randn(8, 8), "second": torch.randn(16)}, whole := tmp_path / "whole.safetensors")
    content, cut = whole.read_bytes(), tmp_path / "cut.safetensors"
    for length in range(0, len(content), 3):
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            list(open_safetensors(str(cut)))


def test_truncated_data_names_the_tensor(tmp_path: Path) -> None:
    save_file({"first": torch.randn(8, 8), "second": torch.randn(16)}, path := tmp_path / "m.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"tensor second ends at byte \d+, the file has \d+ \(truncated"):
        list(open_safetensors(str(path)))


@pytest.mark.parametrize("position", [0, 3, 8, 12, 20, 40])
def test_damaged_header(tmp_path: Path, position: int) -> None:
    save_file({"first": torch.randn(8, 8)}, path := tmp_path / "m.safetensors")
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        list(open_safetensors(str(path)))


def test_integers_are_no_weights(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(4)}, path := tmp_path / "m.safetensors")
    (stored,) = open_safetensors(str(path))
    with pytest.raises(CheckpointError, match="ids has dtype I64"):
        stored.copy_into(torch.empty(4))
