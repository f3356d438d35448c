"""Which format a checkpoint's weights are read with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from octavo.config.quantization import quantization_method
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.ops.coded import CodedRows
from octavo.quantization.formats.awq import awq
from octavo.quantization.formats.bitsandbytes import bitsandbytes
from octavo.quantization.formats.compressed_tensors import FP4_TABLE, MXFP4_RUN, compressed_tensors
from octavo.quantization.formats.fp8 import fp8, modelopt
from octavo.quantization.formats.gptq import gptq
from octavo.quantization.formats.int8 import int8
from octavo.quantization.formats.squeezellm import squeezellm
from octavo.quantization.pieces import Format, Pieces
from octavo.quantization.random_codes import Storage
from octavo.quantization.settings import Settings


def _auto_round(settings: Settings) -> Format:
    """auto-round writes other tools' layouts and says which in `packing_format`."""
    packing = settings.text("packing_format", settings.text("backend", "auto_round:auto_gptq"))
    if "awq" in packing:
        return awq(settings)
    if "gptq" in packing:
        return gptq(Settings({**settings.values, "checkpoint_format": "gptq"}, settings.where))
    raise UnsupportedModel(
        f"{settings.where}: packing_format {packing!r} is not supported. Supported: auto_round:auto_gptq, auto_round:auto_awq."
    )


def _not_by_module(pieces: Pieces) -> CodedRows:
    """gpt-oss quantises experts alone, all of a layer in one tensor: `weights.mxfp4` reads them."""
    raise CheckpointError(f"{pieces.module}: quantised with mxfp4, which is for experts.")


def _experts_alone(module: str, shape: tuple[int, int]) -> Storage | None:
    return Storage("table", group=MXFP4_RUN, scale_dtype=torch.bfloat16, table=FP4_TABLE) if ".experts" in module else None


_FORMATS: Final[Mapping[str, Callable[[Settings], Format]]] = {
    "awq": awq,
    "gptq": gptq,
    "auto-round": _auto_round,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "modelopt": modelopt,
    "int8": int8,
    "squeezellm": squeezellm,
    "bitsandbytes": bitsandbytes,
    "mxfp4": lambda _: Format("mxfp4", frozenset(), frozenset(), _not_by_module, _experts_alone),
}


def stored_format(hf_config: Mapping[str, Any], where: str) -> Format | None:
    """The format of a checkpoint's weights; None where they are not quantised.

    Args:
        where: the file that the config comes from, for messages.

    Raises:
        UnsupportedModel: a method, a width or a packing that Octavo does not read.
        CheckpointError: a value of the quantization_config is missing or impossible.
    """
    values = hf_config.get("quantization_config")
    if values is None:
        return None
    method = quantization_method(None, hf_config, where)
    assert method is not None and isinstance(values, Mapping)
    try:
        return _FORMATS[method](Settings(values, f"{where}: quantization_config"))
    except RecursionError:
        raise CheckpointError(f"{where}: quantization_config is nested too deeply.") from None
