"""The CUDA C++ kernel for prompt attention: on a GPU compiled by NVRTC, elsewhere by the C++ compiler, a block's threads in turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.ops.cuda.chunk_plan import plan_chunks
from octavo.ops.cuda.paged_prefill import Form, arguments, boxes, form_of, paged_prefill, source
from tests.ops.triton.paged import PagedCase, attention_reference, paged_case, relative_error
from tests.support.cuda_emulator import COMPILER, MACHINE, emulated

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = pytest.mark.skipif(not ON_GPU and COMPILER is None, reason="needs an NVIDIA GPU or a C++ compiler")

SMS = 3
"""Fewer than there are items, so that blocks go on to a next one."""
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


def run(case: PagedCase, **options: int) -> torch.Tensor:
    _, heads, head_dim = case.q.shape
    _, kv_heads, block, _ = case.key_cache.shape
    form = form_of(case.q.dtype, case.key_cache.dtype, head_dim, block, kv_heads, heads // kv_heads)
    assert form is not None
    form = replace(form, **options)
    items = torch.from_numpy(plan_chunks(np.array(case.starts), np.array(case.counts), 0, form.tokens)).to(DEVICE)
    out = torch.full_like(case.q, float("nan"))
    scale = head_dim**-0.5
    if ON_GPU:
        return paged_prefill(case.q, case.key_cache, case.value_cache, case.block_tables, items, out, form, scale=scale)
    packed = arguments(case.block_tables, items, out, form, scale=scale)
    kernel = emulated(source(form, MACHINE.read_text()), "paged_prefill", 3)
    kernel(packed, *boxes(case.q, case.key_cache, case.value_cache, form), SMS, 1, 1)
    return out


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (4, 1, 128)])
def test_matches_float64(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = paged_case([0, 150, 70], [40, 1, 20], heads, kv_heads, head_dim, device=DEVICE, dtype=dtype)
    assert relative_error(run(case), attention_reference(case, scale=head_dim**-0.5)) < LIMITS[dtype]
