"""Queries that grow with their position, which keeps attention sharp over long sequences (Nakanishi 2025). Imports torch where it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QueryGrowth:
    """At position p they are multiplied with 1 + beta * log(1 + floor(p / length))."""

    beta: float
    length: int

    def factor(self, positions: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens] float32"""
        return 1.0 + self.beta * (positions.float() / self.length).floor().log1p()
