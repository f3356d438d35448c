"""Attention with linear biases (ALiBi, Press et al. 2022), as numbers that are added to queries and keys.

A score gains slope * position of the key (that less the query's position differs by the same for all keys of a query, which softmax does
not see). That is a product too: of the slope, behind the query, and of the position, behind the key. So any attention computes it, and the
cache keeps it. A position is split in two whole numbers, which the narrowest of our types holds exactly up to position 65,536.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

ALIBI_WIDTH: Final = 8
"""By how much heads grow: two numbers, and zeros that keep rows aligned."""
_STEP: Final = 256


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of the paper: a geometric series, with every other one of the next longer series behind it."""
    power = 2 ** math.floor(math.log2(heads))

    def series(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    return tuple(series(power) + series(2 * power)[::2][: heads - power])


def with_positions(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, slopes: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v for an attention that multiplies scores with `scale`.

    Args:
        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim].
        positions: [tokens]
        slopes: [heads] float32

    Returns:
        The same, `ALIBI_WIDTH` wider.
    """
    dim = q.shape[-1]
    wide = [t.new_zeros(*t.shape[:-1], dim + ALIBI_WIDTH) for t in (q, k, v)]
    for new, old in zip(wide, (q, k, v), strict=True):
        new[..., :dim] = old
    wide[0][..., dim] = (slopes * (_STEP / scale)).to(q.dtype)
    wide[0][..., dim + 1] = (slopes / scale).to(q.dtype)
    wide[1][..., dim] = (positions // _STEP).to(k.dtype).unsqueeze(1)
    wide[1][..., dim + 1] = (positions % _STEP).to(k.dtype).unsqueeze(1)
    return wide[0], wide[1], wide[2]
