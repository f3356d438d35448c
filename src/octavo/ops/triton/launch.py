"""How kernels follow each other on the device."""

from __future__ import annotations

import functools

import torch


@functools.cache
def overlap_supported(device: torch.device) -> bool:
    """Whether a kernel can be set up while the one before it still runs (programmatic dependent launch, Hopper on).

    Every kernel that is launched so waits (`gdc_wait`) before it touches what earlier kernels wrote, and only then lets the next
    one start (`gdc_launch_dependents`): so whatever a kernel reads before its wait must be at least two kernels old.
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
