"""What a captured step is told: the columns of a line of the upload ring, and where they lie.

A line begins with the columns that the device copies, and ends with the block-table diffs, which are applied straight from it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from octavo.attention.base import GraphShape

T = TypeVar("T", npt.NDArray[np.int32], torch.Tensor)

HEADER = 4
NUM_ROWS, NUM_TOKENS, NUM_SAMPLED, NUM_DIFFS = range(HEADER)
"""The header's numbers: each in a place of its own, because kernels read them by address."""


@dataclass(frozen=True)
class Columns(Generic[T]):
    """The parts of a line, on the host or on the device; each 1-D, and empty where the shape has no use for it."""

    header: T
    """HEADER numbers, 4 places apart."""
    slots: T
    """A row."""
    contexts: T
    """A row: tokens including those of this step."""
    modes: T
    """A sampled row."""
    keys: T
    """2 numbers a sampled row."""
    offsets: T
    """A row: what makes a token's place in the step its position. Shapes with chunks only, like the next four."""
    row_of_token: T
    last_tokens: T
    """A sampled row: the place in the step of its last token; 0 past the real ones."""
    sampled_slots: T
    sampled_positions: T
    plan: T
    """The attention plan."""
    diffs: T
    """Slots, then indices, then blocks of new block-table entries."""


def _aligned(size: int) -> int:
    """Up to a multiple of 16 bytes, which kernels are specialised for."""
    return -(-size // 4) * 4


@dataclass(frozen=True)
class Layout:
    """Where the columns of a shape lie: offsets in int32 numbers, all at multiples of 16 bytes."""

    shape: GraphShape
    plan_size: int
    block_size: int
    kinds: int = 1
    """Of cache, each with a block table."""

    @property
    def max_diffs(self) -> int:
        """Every row may begin a block, and chunks fill some more."""
        return _aligned(self.kinds * (self.shape.rows + (self.shape.tokens // self.block_size if self.shape.chunks else 0)))

    @functools.cached_property
    def bounds(self) -> list[tuple[int, int]]:
        rows = _aligned(self.shape.rows)
        more = rows if self.shape.chunks else 0
        tokens = _aligned(self.shape.tokens) if self.shape.chunks else 0
        sizes = [4 * HEADER, rows, rows, rows, 2 * rows, more, tokens, more, more, more, _aligned(self.plan_size), 3 * self.max_diffs]
        ends = np.cumsum(sizes).tolist()
        return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    @property
    def size(self) -> int:
        return self.bounds[-1][1]

    @property
    def diffs_at(self) -> int:
        """Where the diffs begin, and what is copied ends."""
        return self.bounds[-1][0]

    def split(self, line: T) -> Columns[T]:
        return Columns(*(line[begin:end] for begin, end in self.bounds))


CHUNK_STEPS = (16, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Numbers of tokens that steps with prompt chunks are captured for. Below 200, reading the weights takes longer than computing with
them, so that room costs little; larger ones than the last keep a GPU busy for longer than their launches take."""
CHUNK_ROWS = (32, 256)
"""Rows that such shapes have room for, if not for all: the head multiplies by every row there is room for."""


@dataclass(frozen=True)
class CapturePlan:
    """What to capture, in order."""

    largest: tuple[GraphShape, ...]
    """The largest of both kinds of steps: the others fit into the memory that these took."""
    next: tuple[GraphShape, ...]
    """With these, every step that has a graph in the end has one that is at most about twice too large."""
    rest: tuple[GraphShape, ...]
    """From small to large: small steps are the more frequent."""

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        return (*self.largest, *self.next, *self.rest)


def decode_rows(max_rows: int) -> list[int]:
    """Numbers of rows that decode steps are captured for, ascending: fine where a row more costs much, coarse where it does not."""
    steps = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, max_rows, 64)]
    return [*(rows for rows in steps if rows < max_rows), max_rows]


def capture_plan(max_rows: int, max_tokens: int, slow: Collection[int] = ()) -> CapturePlan:
    """The shapes worth capturing for steps of up to so many rows and tokens.

    Args:
        slow: rows of decode steps that a larger shape is quicker for (`slow_rows`); the largest is never one.
    """
    most = min(max_rows, max_tokens)
    kinds = [[GraphShape(rows, rows) for rows in decode_rows(most) if rows not in slow]]
    limit = min(max_tokens, CHUNK_STEPS[-1])
    tokens = [*(n for n in CHUNK_STEPS if n < limit), limit] if limit >= CHUNK_STEPS[0] else []
    fewer = 0
    for room in (*(rows for rows in CHUNK_ROWS if rows < most), most):
        # Room for more rows than the smaller kind has is of use only to steps of more tokens. A chunk has 16 tokens on average, or
        # there are few of them: steps of more run uncaptured.
        kinds.append([GraphShape(min(room, n), n, max(8, n // 16)) for n in tokens if n > fewer])
        fewer = room
    kinds = [kind for kind in kinds if kind]
    largest = list(dict.fromkeys([kinds[-1][-1], kinds[0][-1]]))
    coarse = [next(s for s in kind if s.tokens >= target) for kind in kinds for target in _halvings(kind[-1].tokens)]
    then = [s for s in dict.fromkeys(sorted(coarse, key=lambda s: -s.tokens)) if s not in largest]
    every = sorted({s for kind in kinds for s in kind}, key=lambda s: (s.tokens, s.chunks, s.rows))
    return CapturePlan(tuple(largest), tuple(then), tuple(s for s in every if s not in largest and s not in then))


def _halvings(number: int) -> list[int]:
    """number, half of it rounded up, and so on to 1."""
    return [number] if number == 1 else [number, *_halvings(-(-number // 2))]
