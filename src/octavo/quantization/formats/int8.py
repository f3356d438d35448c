"""8-bit integer weights with a scale for each output, and inputs rounded to 8 bits while running."""

from __future__ import annotations

import torch

from octavo.ops.coded import Activations, CodedRows
from octavo.quantization.pieces import Format, Pieces
from octavo.quantization.random_codes import Storage, everywhere
from octavo.quantization.settings import Settings


def int8(settings: Settings) -> Format:
    made_up = everywhere(Storage("signed", scale_dtype=torch.float32, activations="int8"), settings.strings("modules_to_not_convert"))
    return Format("int8", frozenset(("weight", "weight_scale")), frozenset(("weight_scale",)), _read, made_up)


def _read(pieces: Pieces) -> CodedRows:
    codes = pieces.of("weight", torch.int8, dims=2)
    scales = pieces.magnitudes("weight_scale")
    rows = codes.shape[0]
    if scales.numel() not in (1, rows):
        raise pieces.fail("weight_scale", f"one number, or one for each of {rows} outputs")
    return CodedRows(codes, 8, scales.reshape(-1, 1), row_block=rows // scales.numel(), activations=Activations("int8"))
