"""`TensorGroup`: the ranks that share each layer, and the two things that they do together in a forward pass.

Shoeybi et al. 2019 (Megatron-LM): the first matrix of a block is divided by its rows, the second by its columns, so that a block costs
one sum over ranks; embedding and head are divided by vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.config.types import ParallelConfig
from octavo.parallel.pipeline import NO_PIPELINE, Pipeline


@dataclass(frozen=True)
class Rows:
    """What a model adds up and then norms."""

    dim: int
    dtype: torch.dtype
    patience: float
    """Seconds that a GPU waits for another one in a step, before the step is given up."""


class TensorGroup(Protocol):
    """Every rank calls the same methods in the same order, with tensors of the same shape."""

    @property
    def rank(self) -> int:
        """Of this process, from 0."""

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, the same bits on each; x may be overwritten.

        Args:
            x: contiguous.
        """

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`sum` of x, then `ops.registry.AddRmsNorm`, at once; None, and nothing done, where that is not for one kernel.

        Args:
            x, residual: [tokens, dim] contiguous; residual the same on all ranks. Both may be overwritten.
        """

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x [rows, n] -> [rows, size * n], in the order of the ranks."""


class Alone:
    """A group of one. Implements `TensorGroup`."""

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()


@dataclass(frozen=True)
class Ranks:
    """A rank's place among those that compute a model together."""

    group: TensorGroup = ALONE
    """Those that share its layers."""
    pipeline: Pipeline = NO_PIPELINE
    """Those that have the others."""
    smallest: Callable[[int], int] = lambda number: number
    """The smallest of the numbers that all ranks give. Waits for all: not for a step."""
    number: int = 0
    """Of this rank, among all."""
    local_rank: int = 0
    """Among the ranks of this host: which GPU it takes."""
    sums: str = ""
    """How small sums over `group` go, for people."""
    check: Callable[[], None] = lambda: None
    """After a step has ended: raises if a rank of `group` did not take part in it."""
    abandon: Callable[[], None] = lambda: None
    """From any thread: nothing on this rank's device waits for the others any more. Sums under way have no result."""
    close: Callable[[], None] = lambda: None
    """Leave the others."""

    def device(self, kind: str, parallel: ParallelConfig) -> torch.device:
        """What this rank computes on: a GPU of its own, or what all share."""
        if kind != "cuda" or parallel.world * parallel.data == 1:
            return torch.device(kind)
        index = parallel.first_device + self.local_rank
        return torch.device(kind, index % parallel.shared_gpus if parallel.shared_gpus else index)


ONE_RANK = Ranks()
