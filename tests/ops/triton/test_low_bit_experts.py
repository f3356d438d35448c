"""Experts whose weights stay in few bits against the same experts dequantised."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.coded import dequantize
from octavo.ops.packed import ExpertsWeight
from octavo.ops.reference import OPS
from octavo.ops.reference.experts import pack_coded_experts
from octavo.ops.triton.experts import experts
from tests.support.quantized_layouts import LAYOUTS
from tests.unit.quantization.test_formats import read

from .paged import relative_error
from .test_low_bit import half, on

NAMES = ["awq-32", "mxfp4", "squeezellm", "nf4", "gptq-v2", "gptq-8", "fp8-block", "fp8-channel", "w4a16-channel", "int8"]
COUNT = 4


def weights_of(name: str, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> tuple[ExpertsWeight, ExpertsWeight]:
    """Experts as they are stored, and dequantised."""
    coded = on(read(LAYOUTS[name](COUNT * rows, columns, 1)), device)
    return pack_coded_experts(coded, COUNT, dtype), ExpertsWeight.plain(dequantize(coded, dtype).view(COUNT, rows, columns))


@pytest.mark.parametrize("tokens", [1, 21, 70])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (192, 96)])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_dequantised(name: str, hidden: int, inner: int, tokens: int, device: torch.device) -> None:
    if name in ("gptq-v2", "nf4") and inner % 64:
        pytest.skip("groups of 64")
    dtype = half(device)
    gate_up, plain_gate_up = weights_of(name, 2 * inner, hidden, device, dtype)
    down, plain_down = weights_of(name, hidden, inner, device, dtype)
    assert gate_up.low_bit is not None and down.low_bit is not None
    assert gate_up.nbytes < 0.75 * plain_gate_up.nbytes
    x = (torch.randn(tokens, hidden, device=device) / 4).to(dtype)
    chosen = torch.stack([torch.randperm(COUNT)[:2] for _ in range(tokens)]).to(device)
    factors = torch.rand(tokens, 2, device=device)
    biases = [torch.randn(COUNT, n, device=device).to(dtype) for n in (2 * inner, hidden)]
    arguments = (x, chosen, factors)
    expected = OPS.experts(
        *(t.double() if t.is_floating_point() else t for t in arguments), *_double(plain_gate_up, plain_down, biases), "silu"
    )
    assert relative_error(experts(*arguments, gate_up, down, biases[0], biases[1], "silu"), expected) < 5e-3
    assert relative_error(OPS.experts(*arguments, gate_up, down, biases[0], biases[1], "silu"), expected) < 5e-3


def _double(
    gate_up: ExpertsWeight, down: ExpertsWeight, biases: list[torch.Tensor]
) -> tuple[ExpertsWeight, ExpertsWeight, torch.Tensor, torch.Tensor]:
    return ExpertsWeight.plain(gate_up.data.double()), ExpertsWeight.plain(down.data.double()), biases[0].double(), biases[1].double()


def test_what_stays_packed_and_what_does_not(device: torch.device) -> None:
    for name in ("gptq-act-order", "squeezellm-3-sparse", "nvfp4", "gptq-16"):
        packed, plain = weights_of(name, 32, 64, device, torch.float32)
        assert packed.low_bit is None
        torch.testing.assert_close(packed.data, plain.data)


def test_float32_takes_dequantised_weights(device: torch.device) -> None:
    gate_up, _ = weights_of("awq-32", 64, 64, device, torch.float32)
    down, _ = weights_of("awq-32", 64, 32, device, torch.float32)
    x, chosen = torch.randn(3, 64, device=device), torch.tensor([[0, 1], [2, 3], [1, 0]], device=device)
    factors = torch.rand(3, 2, device=device)
    out = experts(x, chosen, factors, gate_up, down, None, None, "silu")
    torch.testing.assert_close(out, OPS.experts(x, chosen, factors, gate_up, down, None, None, "silu"), atol=1e-4, rtol=1e-4)
