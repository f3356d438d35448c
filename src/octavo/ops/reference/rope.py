"""Rotary position embedding."""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """See `ops.registry.Rope`. Overwrites nothing."""
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)  # the products below are float32 by type promotion
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
