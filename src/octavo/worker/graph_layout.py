"""What a captured step is told: the columns of a line of the upload ring, and where they lie.

A line begins with the columns that the device copies, and ends with the block-table diffs, which are applied straight from it.
"""

from __future__ import annotations

import functools
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

    @property
    def max_diffs(self) -> int:
        """Every row may begin a block, and chunks fill some more."""
        return _aligned(self.shape.rows + (self.shape.tokens // self.block_size if self.shape.chunks else 0))

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


def decode_rows(max_rows: int) -> list[int]:
    """Numbers of rows that decode steps are captured for, ascending: fine where a row more costs much, coarse where it does not."""
    steps = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, max_rows, 64)]
    return [*(rows for rows in steps if rows < max_rows), max_rows]


def chunk_tokens(max_tokens: int) -> list[int]:
    """Numbers of tokens that steps with prompt chunks are captured for, ascending; the same idea."""
    steps = [16, *range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, max_tokens, 256)]
    return [*(tokens for tokens in steps if tokens < max_tokens), max_tokens]


MIN_CHUNK_STEP = 16
"""Tokens of the smallest shape with chunks."""


def graph_shapes(max_rows: int, max_tokens: int, largest_chunks: int) -> list[GraphShape]:
    """The shapes to capture, ascending by tokens.

    Args:
        max_rows, max_tokens: of a step, as the scheduler plans it.
        largest_chunks: most tokens of a captured step with prompt chunks.
    """
    most = min(max_rows, max_tokens)
    shapes = [GraphShape(rows, rows) for rows in decode_rows(most)]
    if (largest := min(largest_chunks, max_tokens)) >= MIN_CHUNK_STEP:
        # A chunk has 16 tokens on average, or there are few of them; steps of more run uncaptured.
        shapes += [GraphShape(min(most, tokens), tokens, max(8, tokens // 16)) for tokens in chunk_tokens(largest)]
    return sorted(shapes, key=lambda s: (s.tokens, s.chunks))


def capture_order(shapes: list[GraphShape]) -> tuple[list[GraphShape], list[GraphShape]]:
    """(the shapes to capture before anything else, the others), in order.

    With the first, every step has a graph that is at most about twice too large. The largest come before all, so that the others
    fit into the memory they took; the others from small to large, since small steps are the more frequent.
    """
    kinds = [[s for s in shapes if bool(s.chunks) is chunks] for chunks in (True, False)]
    targets = [(kind, target) for kind in kinds if kind for target in _halvings(kind[-1].tokens)]
    first = [next(s for s in kind if s.tokens >= target) for kind, target in sorted(targets, key=lambda pair: -pair[1])]
    first = list(dict.fromkeys([*(kind[-1] for kind in kinds if kind), *first]))
    return first, [s for s in shapes if s not in first]


def _halvings(number: int) -> list[int]:
    """number, half of it rounded up, and so on to 1."""
    return [number] if number == 1 else [number, *_halvings(-(-number // 2))]
