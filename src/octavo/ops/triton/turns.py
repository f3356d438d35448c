"""When a kernel that follows another on the device lets the next one start: see `launch.overlap_supported`."""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.launch import overlap_supported

LATE, EARLY = 1, 2
"""When a kernel lets the next one start: when the one before it has ended, or at once; 0: it is launched without overlap.

EARLY is for what stands in front of a product that fills whole SMs and reads its weights ahead (`ops.cuda.dense`): its thread blocks
take the places of the product before, SM by SM, instead of after the last of them. Smaller blocks would crowd onto the first free SMs.
"""


def overlap(rows: int, device: torch.device, *, whole_sms: bool = False) -> int:
    """Of a kernel between two products of so many rows.

    Args:
        whole_sms: products of one row fill whole SMs too: those with low-bit weights do (`ops.cuda.low_bit`).
    """
    return 0 if not overlap_supported(device) else EARLY if rows > 1 or whole_sms else LATE


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """Wait for the kernel before, let the next one start: first of all things that depend on what another kernel wrote."""
    if OVERLAP == 2:
        gdc_launch_dependents()
    if OVERLAP > 0:
        gdc_wait()
    if OVERLAP == 1:
        gdc_launch_dependents()
