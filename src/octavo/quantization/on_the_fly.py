"""Weights of a full-precision checkpoint rounded to 8 bits while they are loaded."""

from __future__ import annotations

from typing import Literal

import torch

from octavo.ops.coded import Activations, CodedRows

OnTheFly = Literal["fp8", "int8"]

FLOAT8_MAX = 448.0


def round_weight(weight: torch.Tensor, method: OnTheFly, amax: torch.Tensor | None = None) -> CodedRows:
    """A weight [rows, columns], none of which may be NaN or infinite, with a scale for each row; inputs are rounded by token.

    Args:
        amax: [rows, 1] float32, the largest magnitude in each row, where these are some of its columns.
    """
    largest = FLOAT8_MAX if method == "fp8" else 127.0
    values = weight.float()
    amax = largest_of_rows(values) if amax is None else amax
    scales = torch.where(amax > 0, amax, largest) / largest
    codes = (values / scales).clamp(-largest, largest)
    if method == "fp8":
        return CodedRows(codes.to(torch.float8_e4m3fn), 8, scales, activations=Activations("float8"))
    return CodedRows(codes.round().to(torch.int8), 8, scales, activations=Activations("int8"))


def largest_of_rows(weight: torch.Tensor) -> torch.Tensor:
    """[rows, columns] -> [rows, 1] float32: the largest magnitudes."""
    return weight.float().abs().amax(1, keepdim=True)
