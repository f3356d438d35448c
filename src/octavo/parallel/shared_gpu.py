"""`SharedGpu`: what NCCL does between GPUs, for ranks that share one, between which it does not work.

For those who develop Octavo and have fewer GPUs than ranks (`OCTAVO_SHARE_GPUS=1`): the same kernels, graphs and order of steps as on
several GPUs, but no speed, since the GPU takes turns between processes and whoever waits keeps it until its turn is over. Everything
goes in pieces through memory that all ranks see, and is launched without waiting, so that it can be captured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from octavo.parallel.symmetric import Signals, share

PIECE_BYTES = 4 << 20
THERE, TAKEN = 1, 2
"""Channels of signals between two ranks."""


class SharedGpu:
    """Implements `distributed.Carrier`, between the ranks of a group. They all make one."""

    name = "the shared GPU's memory"
    patience = 60.0

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self._buffer, self._handle = share(PIECE_BYTES, group, device)
        self._signals = Signals(self._handle, device)

    def sum(self, x: torch.Tensor) -> None:
        """See `Carrier.sum`."""
        for piece in _pieces(x):
            total, *others = self._of_all(piece)
            for other in others:
                total = total + other
            self._handle.barrier()
            piece.copy_(total)

    def gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Carrier.gather`."""
        places = zip(*(_pieces(part) for part in out.view(self._size, -1)), strict=True)
        for piece, parts in zip(_pieces(x), places, strict=True):
            for part, theirs in zip(parts, self._of_all(piece), strict=True):
                part.copy_(theirs)
            self._handle.barrier()

    def send(self, x: torch.Tensor, to: int) -> None:
        """See `Carrier.send`."""
        for piece in _pieces(x):
            self._memory(self._rank, piece).copy_(piece)
            self._handle.put_signal(to, THERE)
            self._handle.wait_signal(to, TAKEN)

    def receive(self, out: torch.Tensor, sender: int) -> None:
        """See `Carrier.receive`."""
        for piece in _pieces(out):
            self._handle.wait_signal(sender, THERE)
            piece.copy_(self._memory(sender, piece))
            self._handle.put_signal(sender, TAKEN)

    def _of_all(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's piece, until the next barrier."""
        self._memory(self._rank, piece).copy_(piece)
        self._handle.barrier()
        return [self._memory(rank, piece) for rank in range(self._size)]

    def _memory(self, rank: int, piece: torch.Tensor) -> torch.Tensor:
        memory: torch.Tensor = self._handle.get_buffer(rank, piece.shape, piece.dtype)
        return memory

    def abandon(self) -> None:
        """See `Carrier.abandon`."""
        self._signals.let_go_for_good()

    def close(self) -> None:
        """See `Carrier.close`."""
        self._signals.close()


def _pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of a contiguous tensor."""
    yield from torch.split(x.view(-1), PIECE_BYTES // x.element_size())
