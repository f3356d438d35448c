"""Small sums over ranks by other means than NCCL: whether to use them is tried out at start, by all ranks of a group together.

A decode step adds up a few KiB many times. NCCL is made for large tensors: for small ones its own machinery takes longer than the data. But what is quicker
depends on more (peer access, drivers, containers), so it has to prove itself first: the same sums, in time, on every rank. If it does not,
NCCL does everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.errors import OctavoError

TEST_SECONDS = 2.0
"""For the test at start."""


class SmallSums(Protocol):
    """A way to add up small tensors. Every rank calls it with the same shapes, and gets the same bits."""

    @property
    def described(self) -> str:
        """For people: what it is, and up to which size."""

    def sum(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sum of all ranks' x; None where that is not for this way. Which it is depends on nothing that could differ between ranks."""

    def abandon(self) -> None:
        """From any thread: sums wait for no other rank any more, and are void."""

    def close(self) -> None:
        """It will not be used any more."""


class Trial(Protocol):
    """A way that has not proved itself. Its steps are called in this order, each only after the one before has gone well on all ranks."""

    def unusable(self) -> str | None:
        """Why it cannot be here; None if nothing speaks against it. Quick, and touches nothing."""

    def open(self) -> str | None:
        """Take what it needs, together with the other ranks; what is wrong, or raises it."""

    def test(self, seconds: float) -> str | None:
        """What is wrong with its sums; None if they are right. Returns in time, even if they do not end."""

    def close(self) -> None:
        """It will not be used any more."""


class Candidate(SmallSums, Trial, Protocol):
    """Small sums on trial."""


@dataclass(frozen=True)
class Verdict:
    """Which way sums go, and why."""

    small: SmallSums | None
    """None: all of them as large ones go."""
    words: str


def what_fails(candidate: Trial, smallest: Callable[[int], int], seconds: float = TEST_SECONDS) -> str | None:
    """Goes through the steps of a trial. None if all have gone well on all ranks; else a reason, on every rank, and it is closed.

    Args:
        smallest: of the numbers that all ranks give.
        seconds: for the test.

    Raises:
        OctavoError: a test has left a GPU unusable.
    """
    for step in (candidate.unusable, candidate.open, lambda: candidate.test(seconds)):
        why: str | None
        try:
            why = step()
        except OctavoError:
            raise  # of a GPU that nothing more can be done with
        except Exception as e:
            why = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no message'}"
        # Everybody answers, also who has failed: the others wait for it.
        if not smallest(int(why is None)):
            candidate.close()
            return why or "another rank cannot use symmetric memory"
    return None


def try_out(candidate: Candidate, smallest: Callable[[int], int], *, seconds: float = TEST_SECONDS, otherwise: str = "NCCL") -> Verdict:
    """The verdict, the same on every rank. See `what_fails`.

    Args:
        otherwise: what adds up all else, for people.
    """
    began = time.monotonic()
    why = what_fails(candidate, smallest, seconds)
    if why is not None:
        return off(why, otherwise)
    return Verdict(candidate, f"{candidate.described}; self-test passed in {time.monotonic() - began:.1f} s")


def off(words: str, otherwise: str = "NCCL") -> Verdict:
    """Nothing to try."""
    return Verdict(None, f"{otherwise} for all sizes: {words}")
