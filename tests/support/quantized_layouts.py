"""Quantised weights written byte for byte as each format is published, one code at a time, with what they stand for by its formula."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """One weight as a checkpoint has it."""

    config: dict[str, Any]
    """quantization_config"""
    tensors: Tensors
    weight: torch.Tensor
    """[rows, columns] float32"""
    input_scale: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def bit_words(codes: Iterable[int], bits: int) -> list[int]:
    """Codes one behind the other from the lowest bit of int32 words on."""
    whole, count = 0, 0
    for code in codes:
        whole |= int(code) << (count * bits)
        count += 1
    words = -(-count * bits // 32)
    return [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(words)]


def as_int32(rows: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32).copy())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _numbers(rows: int, columns: int, groups: int, bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, columns], zeros and scales [rows, groups]."""
    rng = generator(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=rng)
    zeros = torch.randint(0, 1 << bits, (rows, groups), generator=rng)
    scales = (torch.rand(rows, groups, generator=rng) * 0.02 + 0.005) * 8 / (1 << (bits - 1))
    return codes, zeros, scales.half()


def awq(rows: int, columns: int, group: int, seed: int = 0) -> Layout:
    width = columns if group == -1 else group
    groups = columns // width
    codes, zeros, scales = _numbers(rows, columns, groups, 4, seed)
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def words(values: torch.Tensor) -> list[int]:
        return [sum(int(values[8 * w + order[i]]) << (4 * i) for i in range(8)) for w in range(len(values) // 8)]

    tensors = {
        "qweight": as_int32([words(codes[:, c]) for c in range(columns)]),
        "qzeros": as_int32([words(zeros[:, g]) for g in range(groups)]),
        "scales": scales.T.contiguous(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Layout(config, tensors, _affine(codes, zeros, scales, torch.arange(columns) // width))


def _affine(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    return scales.float()[:, group_of] * (codes - zeros[:, group_of]).float()


def gptq(
    rows: int, columns: int, group: int, *, bits: int = 4, version: int = 1, act_order: bool = False, sym: bool = False, seed: int = 0
) -> Layout:
    width = columns if group == -1 else group
    groups = -(-columns // width)
    codes, zeros, scales = _numbers(rows, columns, groups, bits, seed)
    if sym:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    group_of = torch.arange(columns) // width
    if act_order:
        group_of = group_of[torch.randperm(columns, generator=generator(seed + 1))]
    stored = zeros if version == 2 else (zeros - 1) & ((1 << bits) - 1)
    tensors = {
        "qweight": as_int32([bit_words(codes[r], bits) for r in range(rows)]).T.contiguous(),
        "qzeros": as_int32([bit_words(stored[:, g], bits) for g in range(groups)]),
        "scales": scales.T.contiguous(),
        "g_idx": group_of.int(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": sym}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    return Layout(config, tensors, _affine(codes, zeros, scales, group_of))


def squeezellm(rows: int, columns: int, *, bits: int = 4, outliers: int = 0, full: int = 0, seed: int = 0) -> Layout:
    rng = generator(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=rng)
    table = torch.randn(rows, 1 << bits, generator=rng).mul(0.05).half().sort(1).values
    weight = table.float().gather(1, codes)
    tensors = {"qweight": as_int32([bit_words(codes[r], bits) for r in range(rows)]).T.contiguous(), "lookup_table": table}
    if outliers:
        places = torch.randperm(rows * columns, generator=rng)[:outliers].sort().values
        sparse = torch.zeros(rows * columns)
        sparse[places] = torch.randn(outliers, generator=rng)
        begins = torch.cat((torch.zeros(1), torch.bincount(places // columns, minlength=rows).cumsum(0)))
        tensors |= {"rows": begins.int(), "cols": (places % columns).int(), "vals": sparse[places]}
        weight = weight + sparse.view(rows, columns)
    if full:
        index = torch.randperm(rows, generator=rng)[:full]
        dense = torch.randn(columns, full, generator=rng)
        tensors |= {"full_rows": dense, "full_row_indices": index.int()}
        weight = weight.index_add(0, index, dense.T)
    return Layout({"quant_method": "squeezellm", "wbits": bits}, tensors, weight)


def fp8(rows: int, columns: int, *, scale: str = "tensor", static: bool = False, seed: int = 0) -> Layout:
    """scale: tensor, channel, or block (of 32 x 32, under DeepSeek's name)."""
    rng = generator(seed)
    codes = torch.randn(rows, columns, generator=rng).mul(60).to(torch.float8_e4m3fn)
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    tensors: Tensors = {"weight": codes}
    if scale == "block":
        scales = torch.rand(-(-rows // 32), -(-columns // 32), generator=rng) * 1e-3 + 1e-4
        config["weight_block_size"] = [32, 32]
        tensors["weight_scale_inv"] = scales
        wide = torch.stack([torch.stack([scales[r // 32, c // 32] for c in range(columns)]) for r in range(rows)])
    else:
        scales = torch.rand(rows if scale == "channel" else 1, 1, generator=rng) * 1e-3 + 1e-4
        tensors["weight_scale"] = scales if scale == "channel" else scales.reshape(())
        wide = scales
    given = 0.02 if static else None
    if static:
        tensors["input_scale"] = torch.tensor(0.02)
    return Layout(config, tensors, codes.float() * wide, given)


def int8(rows: int, columns: int, seed: int = 0) -> Layout:
    rng = generator(seed)
    codes = torch.randint(-127, 128, (rows, columns), generator=rng).to(torch.int8)
    scales = torch.rand(rows, 1, generator=rng) * 1e-3 + 1e-4
    return Layout({"quant_method": "int8"}, {"weight": codes, "weight_scale": scales}, codes.float() * scales)


def compressed(
    rows: int,
    columns: int,
    *,
    layout: str = "pack-quantized",
    bits: int = 4,
    strategy: str = "group",
    group: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    inputs: str | None = None,
    seed: int = 0,
) -> Layout:
    """Integers as compressed-tensors has them."""
    groups = columns // group if strategy == "group" else 1
    codes, zeros, scales = _numbers(rows, columns, groups, bits, seed)
    middle = 1 << (bits - 1)
    if symmetric:
        zeros = torch.full_like(zeros, middle)
    if strategy == "tensor":
        scales, zeros = scales[:1].expand(rows, 1), zeros[:1].expand(rows, 1)
    width = group if strategy == "group" else columns
    group_of = torch.arange(columns) // width
    if act_order:
        group_of = group_of[torch.randperm(columns, generator=generator(seed + 1))]
    stored_scales = scales[:1, 0].contiguous() if strategy == "tensor" else scales.contiguous()
    tensors: Tensors = {"weight_scale": stored_scales}
    if layout == "pack-quantized":
        tensors["weight_packed"] = as_int32([bit_words(codes[r], bits) for r in range(rows)])
        tensors["weight_shape"] = torch.tensor([rows, columns])
    else:
        tensors["weight"] = (codes - middle).to(torch.int8)
    if not symmetric:
        packed = as_int32([bit_words(zeros[:, g], bits) for g in range(groups)]).T.contiguous()
        tensors["weight_zero_point"] = packed if layout == "pack-quantized" else (zeros - middle).to(torch.int8)
    if act_order:
        tensors["weight_g_idx"] = group_of.int()
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group if strategy == "group" else None,
        "actorder": "group" if act_order else None,
    }
    return _with_inputs(weights, inputs, layout, tensors, _affine(codes, zeros, scales, group_of), "int")


def _with_inputs(weights: dict[str, Any], inputs: str | None, layout: str, tensors: Tensors, weight: torch.Tensor, kind: str) -> Layout:
    rounded = None
    if inputs is not None:
        rounded = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": inputs == "dynamic", "strategy": "token"}
    if inputs == "static":
        tensors["input_scale"] = torch.tensor([0.03])
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rounded}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return Layout(config, tensors, weight, 0.03 if inputs == "static" else None)


def compressed_fp8(rows: int, columns: int, *, strategy: str = "channel", inputs: str | None = None, seed: int = 0) -> Layout:
    base = fp8(rows, columns, scale=strategy, seed=seed)
    scales = next(t for name, t in base.tensors.items() if name.startswith("weight_scale"))
    tensors = {"weight": base.tensors["weight"], "weight_scale": scales.reshape(1) if strategy == "tensor" else scales}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [32, 32]
    return _with_inputs(weights, inputs, "float-quantized", tensors, base.weight, "float")


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def float4(rows: int, columns: int, *, kind: str, seed: int = 0) -> Layout:
    """kind: nvfp4 or mxfp4."""
    rng, group = generator(seed), 16 if kind == "nvfp4" else 32
    codes = torch.randint(0, 16, (rows, columns), generator=rng)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    tensors: Tensors = {"weight_packed": packed}
    if kind == "nvfp4":
        stored = (torch.rand(rows, columns // group, generator=rng) * 200 + 20).to(torch.float8_e4m3fn)
        tensors |= {"weight_scale": stored, "weight_global_scale": torch.tensor([9000.0])}
        scales = stored.float() / 9000.0
    else:
        octets = torch.randint(115, 124, (rows, columns // group), generator=rng).to(torch.uint8)
        tensors["weight_scale"] = octets
        scales = torch.tensor([[2.0 ** (int(o) - 127) for o in row] for row in octets])
    weight = torch.tensor(_FP4)[codes] * scales.repeat_interleave(group, 1)
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group" if kind == "nvfp4" else "group",
        "group_size": group,
    }
    return _with_inputs(weights, None, f"{kind}-pack-quantized", tensors, weight, "float")


def nf4(rows: int, columns: int, *, nested: bool = False, block: int = 64, seed: int = 0) -> Layout:
    rng = generator(seed)
    codes = torch.randint(0, 16, (rows * columns,), generator=rng)
    table = torch.linspace(-1, 1, 16).pow(3)
    count = rows * columns // block
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    tensors: Tensors = {"weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
    if nested:
        octets = torch.randint(0, 256, (count,), generator=rng).to(torch.uint8)
        nested_table, nested_scales = torch.linspace(-1, 1, 256), torch.rand(-(-count // 16), generator=rng) * 0.02
        state |= {"nested_blocksize": 16, "nested_offset": 0.05, "nested_dtype": "float32"}
        tensors |= {"weight.absmax": octets, "weight.nested_absmax": nested_scales, "weight.nested_quant_map": nested_table}
        scales = torch.tensor([float(nested_table[int(o)]) * float(nested_scales[i // 16]) + 0.05 for i, o in enumerate(octets)])
    else:
        scales = torch.rand(count, generator=rng) * 0.1
        tensors["weight.absmax"] = scales
    blob = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = blob
    weight = (table[codes] * scales.repeat_interleave(block)).view(rows, columns)
    return Layout({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, tensors, weight)


def llm_int8(rows: int, columns: int, seed: int = 0) -> Layout:
    rng = generator(seed)
    codes = torch.randint(-127, 128, (rows, columns), generator=rng).to(torch.int8)
    scales = torch.rand(rows, generator=rng) * 0.2 + 0.01
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Layout({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, codes.float() * scales[:, None] / 127)


LAYOUTS: dict[str, Callable[[int, int, int], Layout]] = {
    "awq-32": lambda r, c, s: awq(r, c, 32, s),
    "awq-whole": lambda r, c, s: awq(r, c, -1, s),
    "gptq-32": lambda r, c, s: gptq(r, c, 32, seed=s),
    "gptq-v2": lambda r, c, s: gptq(r, c, 64, version=2, seed=s),
    "gptq-sym": lambda r, c, s: gptq(r, c, 32, sym=True, seed=s),
    "gptq-8": lambda r, c, s: gptq(r, c, 32, bits=8, seed=s),
    "gptq-8-sym": lambda r, c, s: gptq(r, c, -1, bits=8, sym=True, seed=s),
    "gptq-3": lambda r, c, s: gptq(r, c, 32, bits=3, seed=s),
    "gptq-2": lambda r, c, s: gptq(r, c, 32, bits=2, seed=s),
    "gptq-act-order": lambda r, c, s: gptq(r, c, 32, act_order=True, seed=s),
    "gptq-8-act-order": lambda r, c, s: gptq(r, c, 64, bits=8, act_order=True, version=2, seed=s),
    "gptq-16": lambda r, c, s: gptq(r, c, 16, seed=s),
    "squeezellm": lambda r, c, s: squeezellm(r, c, seed=s),
    "squeezellm-3-sparse": lambda r, c, s: squeezellm(r, c, bits=3, outliers=40, full=3, seed=s),
    "fp8-tensor": lambda r, c, s: fp8(r, c, seed=s),
    "fp8-channel": lambda r, c, s: fp8(r, c, scale="channel", seed=s),
    "fp8-block": lambda r, c, s: fp8(r, c, scale="block", seed=s),
    "fp8-static": lambda r, c, s: fp8(r, c, static=True, seed=s),
    "int8": int8,
    "w4a16": lambda r, c, s: compressed(r, c, seed=s),
    "w4a16-asym": lambda r, c, s: compressed(r, c, symmetric=False, seed=s),
    "w4a16-channel": lambda r, c, s: compressed(r, c, strategy="channel", seed=s),
    "w4a16-act-order": lambda r, c, s: compressed(r, c, act_order=True, seed=s),
    "w8a16": lambda r, c, s: compressed(r, c, bits=8, strategy="channel", seed=s),
    "w8a8": lambda r, c, s: compressed(r, c, bits=8, layout="int-quantized", strategy="channel", inputs="dynamic", seed=s),
    "w8a8-asym": lambda r, c, s: compressed(r, c, bits=8, layout="int-quantized", strategy="channel", symmetric=False, seed=s),
    "w8a8-static": lambda r, c, s: compressed(r, c, bits=8, layout="int-quantized", strategy="tensor", inputs="static", seed=s),
    "compressed-fp8": lambda r, c, s: compressed_fp8(r, c, inputs="dynamic", seed=s),
    "compressed-fp8-tensor": lambda r, c, s: compressed_fp8(r, c, strategy="tensor", inputs="static", seed=s),
    "compressed-fp8-block": lambda r, c, s: compressed_fp8(r, c, strategy="block", inputs="dynamic", seed=s),
    "nvfp4": lambda r, c, s: float4(r, c, kind="nvfp4", seed=s),
    "mxfp4": lambda r, c, s: float4(r, c, kind="mxfp4", seed=s),
    "nf4": lambda r, c, s: nf4(r, c, seed=s),
    "nf4-nested": lambda r, c, s: nf4(r, c, nested=True, seed=s),
    "llm-int8": llm_int8,
}
"""Name -> (rows, columns, seed) -> a weight. Rows are a multiple of 32, columns of 64."""
