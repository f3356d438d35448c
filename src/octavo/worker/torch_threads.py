"""How many threads torch runs, while there are workers that set it. It may belong to a user's program, which goes on without them."""

from __future__ import annotations

import weakref

import torch

_workers: weakref.WeakSet[object] = weakref.WeakSet()
"""Those of this process that set it. One that failed while it was built gives nothing back, and is forgotten."""
_before: list[int] = []
"""What the first of them found."""


def take(worker: object, threads: int) -> None:
    """Set it for a worker, which gives it back in the end."""
    if not _workers:
        _before[:] = [torch.get_num_threads()]
    _workers.add(worker)
    torch.set_num_threads(threads)


def give_back(worker: object) -> None:
    """A worker is gone. After the last it is as the first had found it."""
    if worker in _workers:
        _workers.remove(worker)
        if not _workers:
            torch.set_num_threads(_before[0])
