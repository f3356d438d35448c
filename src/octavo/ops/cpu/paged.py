"""A step's attention through the compiled kernels: which tokens, which rows, and where each layer's cache is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.ops.cpu.abi import Cache, Engine, Step, loaded


@dataclass(frozen=True)
class PagedStep:
    """Attention of one step over every layer's cache. Is an `Attend`; a compiled decoder takes it apart instead of calling it."""

    step: Step
    caches: ctypes.Array[Cache]
    """By layer."""
    owner: object
    """Keeps the tensors that `step` and `caches` point into."""
    engine: Callable[[], Engine]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `attention.Attend`. Computes in float32."""
        tokens, heads, dim = q.shape
        q32, k32, v32 = (_rows(t) for t in (q, k, v))
        out = torch.empty(tokens, heads, dim)
        loaded().octavo_attention(
            self.engine().handle,
            ctypes.byref(self.caches[layer]),
            ctypes.byref(self.step),
            *(argument for t in (q32, k32, v32) for argument in (t.data_ptr(), t.stride(0))),
            out.data_ptr(),
        )
        return out.to(q.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """float32 with the heads of a token side by side."""
    x = x.float()
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
