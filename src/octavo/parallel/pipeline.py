"""`Pipeline`: the ranks that have the layers before and behind this one's, and what passes between them."""

from __future__ import annotations

from typing import Protocol

import torch


class Pipeline(Protocol):
    """This rank's place. Every stage calls for the same steps in the same order."""

    @property
    def stage(self) -> int:
        """From 0."""

    @property
    def stages(self) -> int: ...

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with what the stage before sends next, and return it."""

    def send(self, x: torch.Tensor) -> None:
        """Hand x to the stage behind."""


class NoPipeline:
    """All layers are here. Implements `Pipeline`."""

    stage = 0
    stages = 1

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("there is no stage before this one")

    def send(self, x: torch.Tensor) -> None:
        raise RuntimeError("there is no stage behind this one")


NO_PIPELINE = NoPipeline()
