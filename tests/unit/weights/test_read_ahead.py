"""Tensors read before their turn: the same numbers in the same order, no more ahead than is allowed, faults where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.weights import read_ahead
from octavo.weights.parallel_read import Arrival, ParallelReader
from octavo.weights.read_ahead import AHEAD_TENSORS, in_advance
from octavo.weights.safetensors import open_safetensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TENSORS = {
    "bias": torch.randn(7),
    "codes": torch.randint(-(2**31), 2**31, (6, 5), dtype=torch.int32),
    "empty": torch.empty(0, 3),
    "half": torch.randn(9, 4).half(),
    "matrix": torch.randn(12, 8).bfloat16(),
    "single": torch.tensor(2.5),
}


class Recorder(ParallelReader):
    """Notes what it was asked for together."""

    def __init__(self) -> None:
        super().__init__(DEVICE, threads=2, piece=16)
        self.begun: list[list[int]] = []

    def begin(self, path: str, offset: int, destinations: Sequence[torch.Tensor]) -> list[Arrival]:
        self.begun.append([one.nbytes for one in destinations])
        return super().begin(path, offset, destinations)


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("most", [0, 40, 1 << 20], ids=["nothing", "some", "all"])
def test_the_same_numbers_in_the_same_order(path: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", most)
    names = []
    with ParallelReader(DEVICE, threads=3, piece=10) as reader:
        for stored in open_safetensors(path, reader, lambda name: name != "bias"):
            names.append(stored.name)
            wanted = TENSORS[stored.name]
            assert stored.raw is not None
            assert torch.equal(stored.raw(DEVICE).cpu(), wanted)
            if not wanted.is_floating_point():
                with pytest.raises(CheckpointError, match="I32"):
                    stored.copy_into(torch.empty(stored.shape))
                continue
            for dtype in (torch.bfloat16, torch.float32):
                destination = torch.empty(stored.shape, dtype=dtype, device=DEVICE)
                stored.copy_into(destination)
                assert torch.equal(destination.cpu(), wanted.to(dtype))
            if wanted.ndim == 2 and wanted.numel():
                assert stored.copy_region is not None
                part = torch.empty(2, 3)
                stored.copy_region((slice(1, 3), slice(0, 3)), part)
                assert torch.equal(part, wanted[1:3, :3].float())
    assert names == sorted(TENSORS)


def sizes(*names: str) -> list[int]:
    return [TENSORS[name].nbytes for name in names]


def test_the_next_are_on_their_way(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", TENSORS["codes"].nbytes)
    monkeypatch.setattr(read_ahead, "RUN_BYTES", 0)
    with Recorder() as reader:
        tensors = open_safetensors(path, reader, lambda _: True)
        assert next(tensors).name == "bias"
        assert reader.begun == [sizes("bias"), sizes("codes")], "what passes the limit is on its way already"
        assert next(tensors).name == "codes"
        assert reader.begun[2:] == [sizes("half")], "past the one without a byte"
        assert [stored.name for stored in tensors] == sorted(TENSORS)[2:]
    assert reader.begun == [sizes(name) for name in sorted(TENSORS) if name != "empty"]


def test_neighbours_are_read_together(path: str) -> None:
    """The file has them as bias, single, codes, matrix, half; their turns are those of their names."""
    with Recorder() as reader:
        assert len(list(open_safetensors(path, reader, lambda _: True))) == len(TENSORS)
    assert reader.begun == [sizes("bias", "single"), sizes("codes", "matrix"), sizes("half")]
    with Recorder() as reader:
        for stored in open_safetensors(path, reader, lambda name: name != "codes"):
            assert stored.raw is not None
            assert torch.equal(stored.raw(DEVICE).cpu(), TENSORS[stored.name])
    assert [one for one in reader.begun if one != sizes("codes")] == [sizes("bias", "single"), sizes("half"), sizes("matrix")]


def test_large_ones_wait_for_their_place(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "LARGEST_BYTES", TENSORS["matrix"].nbytes - 1)
    destination = torch.empty(12, 8, dtype=torch.bfloat16, device=DEVICE)
    with Recorder() as reader:
        for stored in open_safetensors(path, reader, lambda _: True):
            if stored.name == "matrix":
                assert sizes("matrix") not in reader.begun
                stored.copy_into(destination)
    assert torch.equal(destination.cpu(), TENSORS["matrix"])


def test_how_many_are_made_ahead() -> None:
    made = []

    def items() -> Iterator[tuple[int, int]]:
        for i in range(200):
            made.append(i)
            yield i, 0

    ahead = [len(made) - 1 - item for item in in_advance(items())]
    assert max(ahead) == ahead[0] == AHEAD_TENSORS
    assert made == list(range(200))


class Lossy(ParallelReader):
    """Does not find the third thing that it is asked for."""

    asked = 0

    def begin(self, path: str, offset: int, destinations: Sequence[torch.Tensor]) -> list[Arrival]:
        self.asked += 1
        return super().begin(path, offset + (1 << 20) * (self.asked == 3), destinations)


def test_a_fault_comes_with_its_tensor(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "RUN_BYTES", 0)
    with Lossy(DEVICE, threads=2, piece=16) as reader:
        for stored in open_safetensors(path, reader, lambda _: True):
            assert stored.raw is not None
            if stored.name == "half":
                with pytest.raises(CheckpointError, match="ends before byte"):
                    stored.raw(DEVICE)
            else:
                assert torch.equal(stored.raw(DEVICE).cpu(), TENSORS[stored.name])
