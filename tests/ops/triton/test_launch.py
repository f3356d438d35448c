"""What is asked of the driver about launches."""

from __future__ import annotations

import ctypes

import pytest
import torch

from octavo.ops.triton import rms_norm as rms_norm_module
from octavo.ops.triton.launch import PREFERRED_CARVEOUT, overlap_supported, prefer_shared_memory
from octavo.ops.triton.rms_norm import rms_norm


def test_nothing_to_ask_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prefer_shared_memory.cache_clear()
    prefer_shared_memory()
    prefer_shared_memory.cache_clear()
    assert not overlap_supported(torch.device("cpu"))


@pytest.mark.gpu
def test_kernels_are_loaded_with_one_division_of_memory(device: torch.device) -> None:
    prefer_shared_memory()
    # No other test uses this width, so the kernel is loaded here.
    rms_norm(torch.ones(2, 304, device=device).bfloat16(), torch.ones(304, device=device).bfloat16(), 1e-5)
    loaded = [kernel for cache in rms_norm_module._rms_norm_kernel.device_caches.values() for kernel in cache[0].values()]
    driver, preferred = ctypes.CDLL("libcuda.so.1"), []
    for kernel in loaded:
        value = ctypes.c_int()
        assert driver.cuFuncGetAttribute(ctypes.byref(value), PREFERRED_CARVEOUT, ctypes.c_void_p(kernel.function)) == 0
        preferred.append(value.value)
    assert 100 in preferred
