"""Unit tests run torch on one thread: their tensors are tiny, and idle OpenMP threads spin at each other's expense."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
