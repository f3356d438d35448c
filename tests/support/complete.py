"""Weights as products want them."""

from __future__ import annotations

from typing import TypeVar

import torch

T = TypeVar("T")


def complete(weight: T) -> T:
    """A weight once it is in memory: see `ops.registry.Linear`. In an engine, loading ends so."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return weight
