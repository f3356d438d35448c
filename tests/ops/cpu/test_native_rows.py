"""Row kernels (norm, rotation, gated activations) against the reference operations, at every level."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.cpu import abi
from octavo.ops.reference import OPS


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [1, 7, 8, 16, 33, 576])
def test_rms_norm(level: str, dim: int) -> None:
    wide, weight = randn(5, dim + 3) * 4, randn(dim, seed=1)
    x, out = wide[:, 2 : 2 + dim], torch.empty(5, dim)
    abi.loaded().octavo_rms_norm(x.data_ptr(), x.stride(0), 5, dim, weight.data_ptr(), 1e-5, out.data_ptr(), dim)
    torch.testing.assert_close(out, OPS.rms_norm(x, weight, 1e-5), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (40, 40), (80, 32), (6, 2), (128, 64)])
def test_rope(level: str, head_dim: int, rotary_dim: int) -> None:
    x, angles = randn(4, 3, head_dim), randn(4, rotary_dim // 2, seed=2) * 9
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    expected = OPS.rope(x.clone(), cos_sin)
    abi.loaded().octavo_rope(x.data_ptr(), x.stride(0), 4, 3, head_dim, cos_sin.data_ptr(), rotary_dim)
    torch.testing.assert_close(x, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dim", [1, 8, 21, 96])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_mul(level: str, activation: str, dim: int) -> None:
    gate_up = randn(6, 2 * dim)
    gate_up[:, :dim] *= torch.tensor([0.01, 0.3, 1.0, 5.0, 30.0, 200.0])[:, None]
    out = torch.empty(6, dim)
    number = abi.ACTIVATIONS[activation]  # type: ignore[index]
    abi.loaded().octavo_gated_mul(gate_up.data_ptr(), 6, dim, number, out.data_ptr())
    expected = OPS.gated_mul(gate_up.double(), activation)  # type: ignore[arg-type]
    torch.testing.assert_close(out.double(), expected, atol=5e-7, rtol=5e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_nan_passes_through_activations(level: str, activation: str) -> None:
    gate_up, out = torch.ones(1, 32), torch.empty(1, 16)
    gate_up[0, 3], gate_up[0, 16 + 5] = torch.nan, torch.nan
    number = abi.ACTIVATIONS[activation]  # type: ignore[index]
    abi.loaded().octavo_gated_mul(gate_up.data_ptr(), 1, 16, number, out.data_ptr())
    assert out.isnan().nonzero()[:, 1].tolist() == [3, 5]


def test_nan_passes_through_norms(level: str) -> None:
    x, out, weight = torch.ones(2, 16), torch.empty(2, 16), torch.ones(16)
    x[1, 4] = torch.nan
    abi.loaded().octavo_rms_norm(x.data_ptr(), 16, 2, 16, weight.data_ptr(), 1e-5, out.data_ptr(), 16)
    assert out[0].isfinite().all() and out[1].isnan().all()
