"""The reference operations against float64 definitions, and every faster implementation against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from octavo.errors import ConfigError
from octavo.ops.cpu import linear as cpu_linear
from octavo.ops.registry import Ops, load_ops

OPS = ["reference", "cpu"]


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return load_ops(request.param)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 4, 16), (0, 8)])
def test_rms_norm(ops: Ops, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype) * 3, randn(shape[-1], seed=1, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = ops.rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))


def test_rms_norm_of_large_half_precision_does_not_overflow(ops: Ops) -> None:
    x = torch.full((2, 16), 300.0, dtype=torch.float16)  # the square is beyond float16
    torch.testing.assert_close(ops.rms_norm(x, torch.ones(16, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_rms_norm_of_zeros_is_zero(ops: Ops) -> None:
    assert not ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


def test_rms_norm_of_a_strided_slice(ops: Ops) -> None:
    whole, weight = randn(4, 6, 8), randn(8, seed=1)
    torch.testing.assert_close(ops.rms_norm(whole[:, 2:5], weight, 1e-6), ops.rms_norm(whole, weight, 1e-6)[:, 2:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(ops: Ops, dtype: torch.dtype) -> None:
    x, residual, weight = randn(5, 32, dtype=dtype), randn(5, 32, seed=1, dtype=dtype), randn(32, seed=2, dtype=dtype)
    total = x + residual
    normed, new_residual = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(new_residual, total)
    torch.testing.assert_close(normed, load_ops("reference").rms_norm(total, weight, 1e-6), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 8, 2])
def test_rope_rotates_pairs_half_a_head_apart(ops: Ops, rotary_dim: int, dtype: torch.dtype) -> None:
    fused = randn(6, 5, 16, dtype=dtype)
    x = fused[:, 1:4]  # a slice, as q and k are of qkv
    angles = randn(6, rotary_dim // 2, seed=3).double() * 5
    half = rotary_dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((pairs.real, pairs.imag, x[..., rotary_dim:].double()), dim=-1)
    out = ops.rope(x.clone(), torch.cat((angles.cos(), angles.sin()), dim=-1).float())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_mul(ops: Ops, activation: str, dtype: torch.dtype) -> None:
    gate_up = randn(7, 24, dtype=dtype)
    gate, up = gate_up[:, :12].double(), gate_up[:, 12:].double()
    activated = {
        "silu": gate / (1 + torch.exp(-gate)),
        "gelu": gate * 0.5 * (1 + torch.erf(gate / 2**0.5)),
        "gelu_tanh": gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
    }[activation]
    torch.testing.assert_close(ops.gated_mul(gate_up, activation).double(), activated * up, **tolerance(dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 32), (1, 16), (130, 65)])
def test_linear(ops: Ops, rows: int, out_features: int, in_features: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = randn(rows, in_features, dtype=dtype), randn(out_features, in_features, seed=1, dtype=dtype)
    b = randn(out_features, seed=2, dtype=dtype) if bias else None
    packed = ops.pack_linear(weight)
    assert (packed.out_features, packed.in_features, packed.nbytes) == (out_features, in_features, weight.nbytes)
    out = ops.linear(x, packed, b)
    assert out.dtype == dtype
    expected = x.double() @ weight.double().T + (0 if b is None else b.double())
    scale = in_features**0.5
    torch.testing.assert_close(out.double() / scale, expected / scale, **tolerance(dtype))


def test_linear_keeps_no_reference_to_the_plain_weight() -> None:
    """The packed copy replaces the weight: changing the plain one afterwards changes nothing."""
    if not cpu_linear.available():
        pytest.skip("this torch has no oneDNN")
    ops, weight, x = load_ops("cpu"), randn(32, 16), randn(3, 16, seed=1)
    packed = ops.pack_linear(weight)
    before = ops.linear(x, packed, None)
    weight.zero_()
    assert packed.layout == "onednn"
    assert torch.equal(ops.linear(x, packed, None), before)
    assert before.abs().sum() > 0


def test_cpu_linear_does_not_depend_on_the_batch() -> None:
    """A request gives the same tokens alone and in company. Plain F.linear does not promise that: its kernels go by row count."""
    if not cpu_linear.available():
        pytest.skip("this torch has no oneDNN")
    ops, x = load_ops("cpu"), randn(64, 96, seed=1)
    packed = ops.pack_linear(randn(160, 96))
    alone = torch.cat([ops.linear(row[None], packed, None) for row in x])
    for count in (2, 3, 5, 8, 13, 16, 17, 32, 33, 64):
        assert torch.equal(ops.linear(x[:count], packed, None), alone[:count])
        assert torch.equal(ops.linear(x[-count:], packed, None), alone[-count:])


def test_linear_takes_strided_rows(ops: Ops) -> None:
    wide, packed = randn(6, 80), ops.pack_linear(randn(48, 32, seed=1))
    torch.testing.assert_close(ops.linear(wide[:, 16:48], packed, None), ops.linear(wide[:, 16:48].contiguous(), packed, None))
    torch.testing.assert_close(ops.linear(wide[::2, :32], packed, None), ops.linear(wide[::2, :32].contiguous(), packed, None))


def test_embedding(ops: Ops) -> None:
    table = randn(10, 4)
    assert torch.equal(ops.embedding(torch.tensor([3, 0, 3]), table), table[[3, 0, 3]])


def test_linear_matches_plain_torch_to_rounding() -> None:
    ops, weight, x = load_ops("cpu"), randn(576, 192), randn(17, 192, seed=1)
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight), None), F.linear(x, weight), atol=1e-4, rtol=1e-4)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tpu.*cpu or cuda"):
        load_ops("tpu")
