"""bitsandbytes: 4-bit codes of the NF4 and FP4 tables with a scale for each run of weights, and LLM.int8 (Dettmers et al.)."""

from __future__ import annotations

import json
import math

import torch

from octavo.errors import UnsupportedModel
from octavo.ops.coded import CodedRows
from octavo.quantization.pieces import FLOATS, Format, Pieces
from octavo.quantization.random_codes import Storage, everywhere
from octavo.quantization.settings import Settings

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)
_FP4 = (0.0, 0.0052, 0.6667, 1.0, 0.3333, 0.5, 0.1667, 0.25, -0.0, -0.0052, -0.6667, -1.0, -0.3333, -0.5, -0.1667, -0.25)
"""About what these tables hold, for weights that are made up: checkpoints bring their own."""
_FOUR = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")


def bitsandbytes(settings: Settings) -> Format:
    left_out = settings.strings("llm_int8_skip_modules")
    if settings.flag("load_in_8bit"):
        made_up = everywhere(Storage("signed", scale_dtype=torch.float32), left_out)
        return Format("bitsandbytes", frozenset(("weight", "SCB")), frozenset(("SCB",)), _int8, made_up, frozenset(("weight_format",)))
    names = frozenset(("weight", *_FOUR, *_STATES))
    if (kind := settings.text("bnb_4bit_quant_type", "nf4")) not in ("nf4", "fp4"):
        raise UnsupportedModel(f"{settings.where}: bnb_4bit_quant_type {kind!r} is not supported. Supported: nf4, fp4.")
    table = _FP4 if kind == "fp4" else _NF4
    made_up = everywhere(Storage("table", group=64, scale_dtype=torch.float32, table=table), left_out)
    return Format("bitsandbytes", names, names - {"weight"}, _table, made_up)


def _int8(pieces: Pieces) -> CodedRows:
    codes = pieces.of("weight", torch.int8, dims=2)
    scales = pieces.magnitudes("SCB", shape=(codes.shape[0],)).float() / 127.0
    return CodedRows(codes, 8, scales[:, None])


def _table(pieces: Pieces) -> CodedRows:
    name = next((s for s in _STATES if s in pieces), _STATES[0])
    try:
        state = json.loads(bytes(pieces.of(name, torch.uint8).cpu().tolist()))
        rows, columns = (int(size) for size in state["shape"])
        block = int(state["blocksize"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise pieces.fail(name, "JSON with shape and blocksize") from None
    if min(rows, columns, block) < 1 or columns % block:
        raise UnsupportedModel(f"{pieces.module}: runs of {block} weights that cross rows of {columns} are not supported.")
    packed = pieces.of("weight", torch.uint8)
    if packed.numel() * 2 != rows * columns:
        raise pieces.fail("weight", f"two codes a byte for {rows} x {columns} weights")
    octets = packed.reshape(-1)
    codes = torch.stack((octets >> 4, octets & 15), -1).view(rows, columns)
    table = pieces.scales("weight.quant_map", shape=(16,))
    scales = _absmax(pieces, state, rows * columns // block).view(rows, columns // block)
    return CodedRows(codes, 4, scales, table=table[None], group=block)


def _absmax(pieces: Pieces, state: dict[str, float], count: int) -> torch.Tensor:
    if "weight.nested_absmax" not in pieces:
        return pieces.magnitudes("weight.absmax", shape=(count,)).float()
    codes = pieces.shaped("weight.absmax", torch.uint8, shape=(count,))
    table = pieces.scales("weight.nested_quant_map", shape=(256,)).float()
    try:
        block, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
    except (ValueError, KeyError, TypeError, OverflowError):
        raise pieces.fail("weight.nested_absmax", "described by nested_blocksize and nested_offset") from None
    if not math.isfinite(offset):
        raise pieces.fail("weight.nested_absmax", f"beside a nested_offset that is a number, not {offset}")
    nested = pieces.finite("weight.nested_absmax", pieces.of("weight.nested_absmax", *FLOATS)).float()
    if block < 1 or nested.numel() != -(-count // block):
        raise pieces.fail("weight.nested_absmax", f"one number for each {block} of {count} scales")
    return table[codes.long()] * nested.repeat_interleave(block)[:count] + offset
