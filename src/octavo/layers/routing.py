"""What a config can ask of a mixture of experts' router. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Routing:
    """How scores become a choice. All of it stays on the device."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    """The weights of a token's experts add up to one."""
    scale: float = 1.0
    """On the weights, in the end."""
    groups: int = 1
    top_groups: int = 1
    """Only experts of the best `top_groups` of `groups` groups can be chosen (DeepSeek-V2, 2024)."""
    group_score: Literal["best", "best_two"] = "best"
    """A group is as good as its best expert, or as the sum of its best two."""
