"""What is asked of the driver about launches."""

from __future__ import annotations

import ctypes

import pytest
import torch

from octavo.ops.coded import CodedRows
from octavo.ops.triton import low_bit as low_bit_module
from octavo.ops.triton import rms_norm as rms_norm_module
from octavo.ops.triton import turns
from octavo.ops.triton.launch import PREFERRED_CARVEOUT, overlap_supported, prefer_shared_memory
from octavo.ops.triton.linear import TritonLinear
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


def test_small_kernels_let_products_start_early_whose_blocks_fill_an_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "overlap_supported", lambda device: True)
    device = torch.device("cpu")
    assert [turns.overlap(rows, device) for rows in (1, 2)] == [turns.LATE, turns.EARLY]
    assert turns.overlap(1, device, whole_sms=True) == turns.EARLY


def test_products_of_one_row_fill_sms_where_most_weights_are_low_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.zeros(64, 256, dtype=torch.uint8)

    def fills(low_bit_weights: int, dense_weights: int, group: int = 128) -> bool:
        linear = TritonLinear()
        for _ in range(low_bit_weights):
            linear.pack_coded(CodedRows(codes, 4, torch.ones(64, 256 // group).half(), group=group), torch.bfloat16)
        for _ in range(dense_weights):
            linear.pack(torch.zeros(64, 256).bfloat16())
        return linear.fills_whole_sms

    assert not fills(2, 1)  # the kernels do not run here
    monkeypatch.setattr(low_bit_module, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(low_bit_module.cuda, "prepare", lambda *_: None)
    monkeypatch.setattr(low_bit_module.ordered, "prepare", lambda *_: None)
    for group in (32, 128):
        assert fills(2, 1, group) and not fills(1, 1, group)
