"""Copies between host and device that never wait for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`. On a CPU it shares the array's memory: treat both as read-only.

    A pinned staging buffer lets the copy run behind the kernels already queued; torch's pinned-memory cache keeps the buffer
    alive until the stream has read it.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_many(arrays: list[npt.NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """Several int32 arrays in one transfer: a copy costs more to launch than its few kilobytes take to move.

    Each starts at a multiple of 16 bytes, which kernels are specialised for.
    """
    if device.type == "cpu":
        return [upload(array, device) for array in arrays]
    places = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays)]).tolist()
    packed = np.empty(places[-1], np.int32)
    for place, array in zip(places, arrays, strict=False):
        packed[place : place + array.size] = array.reshape(-1)
    on_device = upload(packed, device)
    return [on_device[place : place + array.size].view(array.shape) for place, array in zip(places, arrays, strict=False)]


def download(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the host. From a device it is filled only once the stream gets there: wait for an event before reading."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
