"""8-bit floating point beside its scales: the layout of DeepSeek-V3 (blocks of 128 x 128), of AutoFP8 and of ModelOpt."""

from __future__ import annotations

import torch

from octavo.errors import UnsupportedModel
from octavo.ops.coded import ActivationKind, Activations, CodedRows
from octavo.quantization.pieces import Format, Pieces
from octavo.quantization.random_codes import Storage, everywhere
from octavo.quantization.settings import Settings

_NAMES = frozenset(("weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale"))
_MARKS = frozenset(("weight_scale", "weight_scale_inv"))


def fp8(settings: Settings) -> Format:
    """
    Raises:
        UnsupportedModel: an activation scheme that is not known.
    """
    scheme = settings.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise UnsupportedModel(f"{settings.where}: activation_scheme {scheme!r} is not supported. Supported: dynamic, static.")
    blocks = settings.block_size("weight_block_size")
    ignored, static = frozenset(("input_scale_ub",)), scheme == "static"
    by_channel = settings.text("quant_method", "fp8") == "fbgemm_fp8"  # the config does not say so, but only this tool does it
    high, wide = blocks or (1 if by_channel else 0, 0)
    storage = Storage(
        "float8", group=wide, row_block=high, scale_dtype=torch.float32, activations="float8", calibrated=static and blocks is None
    )
    left_out = (*settings.strings("modules_to_not_convert"), *settings.strings("ignored_layers"))
    made_up = everywhere(storage, left_out)
    scale = "weight_scale" if blocks is None else "weight_scale_inv"
    return Format("fp8", _NAMES, _MARKS, lambda pieces: read_float8(pieces, blocks, static=static), made_up, ignored, scale)


def modelopt(settings: Settings) -> Format:
    """
    Raises:
        UnsupportedModel: another algorithm than FP8.
    """
    inner = settings.section("quantization") if settings.has("quantization") else settings
    algorithm = inner.text("quant_algo", "none")
    if algorithm != "fp8":
        raise UnsupportedModel(f"{inner.where}: quant_algo {algorithm!r} is not supported. Supported: FP8.")
    storage = Storage("float8", row_block=0, scale_dtype=torch.float32, activations="float8", calibrated=True)
    made_up = everywhere(storage, (*inner.strings("exclude_modules"), *inner.strings("ignore")))
    return Format("modelopt", _NAMES, _MARKS, lambda pieces: read_float8(pieces, None, static=True), made_up, first_missing="weight_scale")


def read_float8(pieces: Pieces, blocks: tuple[int, int] | None, *, static: bool) -> CodedRows:
    """
    Args:
        blocks: rows and columns that share a scale; None: one for all, or one a row.
        static: the input is rounded with a calibrated scale, where the checkpoint has one.
    """
    codes = float8_codes(pieces, "weight")
    usual, other = ("weight_scale", "weight_scale_inv")[:: 1 if blocks is None else -1]
    name = other if other in pieces else usual  # the same thing: what a code is worth
    activations = activation_format(pieces, "float8", static=static)
    rows, columns = codes.shape
    if blocks is not None:
        shape = (-(-rows // blocks[0]), -(-columns // blocks[1]))
        scales = pieces.magnitudes(name, shape=shape, why=f" for blocks of {blocks[0]} x {blocks[1]}").float()
        return CodedRows(codes, 8, scales, row_block=blocks[0], group=blocks[1], activations=activations)
    scales = pieces.magnitudes(name).float()
    if scales.numel() not in (1, rows):
        raise pieces.fail(name, f"one number, or one for each of {rows} outputs")
    return CodedRows(codes, 8, scales.reshape(-1, 1), row_block=rows // scales.numel(), activations=activations)


def float8_codes(pieces: Pieces, name: str) -> torch.Tensor:
    """[rows, columns] float8_e4m3fn without NaN."""
    codes = pieces.of(name, torch.float8_e4m3fn, dims=2)
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        pieces.finite(name, codes)
    return codes


def activation_format(pieces: Pieces, kind: ActivationKind, *, static: bool) -> Activations:
    """How the input is rounded: with the module's calibrated scale, or with one for each token."""
    if not static:
        return Activations(kind)
    name = "activation_scale" if "activation_scale" in pieces else "input_scale"  # as transformers calls it
    scales = pieces.scales(name).float()
    if bool((scales <= 0).any()):
        raise pieces.fail(name, "greater than 0")
    return Activations(kind, scales.amax())
