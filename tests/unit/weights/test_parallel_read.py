"""Pieces of files by several threads: every byte in its place, whatever the sizes; and what happens to broken files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.weights.parallel_read import ParallelReader
from octavo.weights.safetensors import open_safetensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_byte_arrives(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = torch.randint(0, 256, (data.draw(st.integers(1, 3000)),), dtype=torch.uint8)
    path = tmp_path_factory.mktemp("bytes") / "file"
    path.write_bytes(content.numpy().tobytes())
    begin = data.draw(st.integers(0, len(content) - 1))
    size = data.draw(st.integers(1, len(content) - begin))
    destination = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    with ParallelReader(DEVICE, threads=data.draw(st.integers(1, 4)), piece=data.draw(st.integers(1, 700))) as reader:
        reader.read(str(path), begin, destination)
    assert torch.equal(destination.cpu(), content[begin : begin + size])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_neighbours_arrive_each_in_its_place(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=12))
    begin = data.draw(st.integers(0, 50))
    content = torch.randint(0, 256, (begin + sum(sizes) + 3,), dtype=torch.uint8)
    path = tmp_path_factory.mktemp("bytes") / "file"
    path.write_bytes(content.numpy().tobytes())
    with ParallelReader(DEVICE, threads=3, piece=data.draw(st.integers(1, 100))) as reader:
        arrivals = reader.begin(str(path), begin, [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for size in sizes])
        got = [arrival.wait().cpu() for arrival in arrivals]
    for one, expected in zip(got, content[begin:].split([*sizes, 3]), strict=False):
        assert torch.equal(one, expected)


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    with ParallelReader(DEVICE, piece=16) as reader, pytest.raises(CheckpointError, match="ends before byte 104"):
        reader.read(str(path), 8, torch.zeros(100, dtype=torch.uint8, device=DEVICE))


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with ParallelReader(DEVICE) as reader, pytest.raises(CheckpointError, match="cannot be read at byte 0"):
        reader.read(str(tmp_path / "none"), 0, torch.zeros(4, dtype=torch.uint8, device=DEVICE))


class Recorder(ParallelReader):
    """Notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), piece=64)
        self.read_sizes: list[int] = []

    def read(self, path: str, offset: int, destination: torch.Tensor) -> None:
        self.read_sizes.append(destination.nbytes)
        if destination.device.type != "meta":
            super().read(path, offset, destination)


def test_only_what_needs_no_conversion_goes_past_the_mapping(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(5, 8).bfloat16(), "b": torch.randn(3, 4), "c": torch.randn(2, 2).half()}, path)
    with Recorder() as reader:
        for stored in open_safetensors(str(path), reader):
            stored.copy_into(torch.empty(stored.shape, dtype=torch.bfloat16, device="meta"))
    assert reader.read_sizes == [80]


def test_offsets_are_those_of_the_header(tmp_path: Path) -> None:
    tensors = {"z": torch.randn(7, 3), "a": torch.randn(4), "m": torch.randn(2, 2, 2)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    from octavo.weights.safetensors import _entries

    with ParallelReader(DEVICE, piece=16) as reader:
        for name, entry in _entries(str(path)).items():
            destination = torch.empty(tensors[name].shape, device=DEVICE)
            reader.read(str(path), entry.begin, destination)
            assert (entry.shape, entry.dtype) == (tensors[name].shape, torch.float32)
            assert torch.equal(destination.cpu(), tensors[name])
