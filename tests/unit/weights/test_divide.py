"""A part of a stored tensor is that part, however it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.weights.arrange import with_shape
from octavo.weights.divide import Part, divided
from octavo.weights.safetensors import open_safetensors
from octavo.weights.stored import StoredTensor

MATRIX = torch.arange(48, dtype=torch.float32).reshape(6, 8)


def in_memory(tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor("x", tuple(tensor.shape), tensor.nbytes, "memory", lambda out: out.copy_(tensor))


@contextmanager
def in_file(folder: Path, tensor: torch.Tensor) -> Iterator[StoredTensor]:
    save_file({"x": tensor}, folder / "x.safetensors")
    yield from open_safetensors(str(folder / "x.safetensors"))


@pytest.mark.parametrize("stored", ["memory", "file"])
@pytest.mark.parametrize("rows", [None, [2, 3, 4], [5, 0, 1], []])
@pytest.mark.parametrize("columns", [None, [4, 5, 6, 7], [0, 1, 6, 7]])
def test_a_part_of_a_matrix(tmp_path: Path, stored: str, rows: list[int] | None, columns: list[int] | None) -> None:
    wanted = Part(None if rows is None else np.array(rows, np.int64), None if columns is None else np.array(columns))
    expected = MATRIX[rows if rows is not None else slice(None)][:, columns if columns is not None else slice(None)]
    with in_file(tmp_path, MATRIX) if stored == "file" else nullcontext(in_memory(MATRIX)) as whole:
        part = divided(whole, wanted)
        assert part.shape == tuple(expected.shape)
        out = torch.full(part.shape, -1.0, dtype=torch.float64)
        part.copy_into(out)
    assert torch.equal(out, expected.double())
    assert part.nbytes == expected.nbytes


def test_a_part_of_a_vector_and_of_another_shape() -> None:
    out = torch.empty(2)
    divided(with_shape(in_memory(MATRIX[:1]), (8,)), Part(np.array([3, 4]))).copy_into(out)
    assert out.tolist() == [3.0, 4.0]


def test_a_run_of_rows_is_all_that_is_read() -> None:
    asked = []
    stored = StoredTensor(
        "x", (6, 8), 192, "memory", lambda out: pytest.fail("all of it was read"), lambda region, out: asked.append(region)
    )
    divided(stored, Part(np.array([2, 3]), np.arange(4, 8))).copy_into(torch.empty(2, 4))
    assert asked == [(slice(2, 4), slice(4, 8))]
