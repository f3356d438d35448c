"""How many threads torch runs, while there are workers that set it. It may belong to a user's program, which goes on without them."""

from __future__ import annotations

import torch

_before: list[int] = []
"""What each worker of this process found; the first entry is the program's own."""


def take(threads: int) -> None:
    """Set it for a worker, which gives it back in the end."""
    _before.append(torch.get_num_threads())
    torch.set_num_threads(threads)


def give_back() -> None:
    """A worker is gone. After the last it is as the first had found it."""
    before = _before.pop()
    if not _before:
        torch.set_num_threads(before)
