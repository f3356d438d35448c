"""Triton kernels for NVIDIA GPUs. Each has a plain torch counterpart in `ops/reference` or in its tests."""

from __future__ import annotations

from typing import Any


def overrides() -> dict[str, Any]:
    """The operations of `ops.registry.Ops` that these kernels replace."""
    from octavo.ops.triton.gated_mul import gated_mul
    from octavo.ops.triton.launch import prefer_shared_memory
    from octavo.ops.triton.linear import TritonLinear
    from octavo.ops.triton.rms_norm import add_rms_norm, rms_norm
    from octavo.ops.triton.sampling import draw_tokens

    prefer_shared_memory()
    linear = TritonLinear()
    return {
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "gated_mul": gated_mul,
        "pack_linear": linear.pack,
        "linear": linear.linear,
        "draw": draw_tokens,
    }
