"""Which format a checkpoint's weights are read with."""

from __future__ import annotations

import re
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
    """auto-round writes other tools' layouts and says which in `packing_format`. Layers may have settings of their own."""
    packing = settings.text("packing_format", settings.text("backend", "auto_round:auto_gptq"))
    own = _own_settings(settings)
    if "awq" in packing:
        usual = {key: settings.values.get(key) for key in ("bits", "group_size")}  # zero points are in the file in any case
        for name, values in own.items():
            if values is not None and any(values.get(key, value) != value for key, value in usual.items()):
                raise UnsupportedModel(
                    f"{settings.where}: extra_config has other settings for {name}, which are read with GPTQ's packing alone "
                    "(packing_format auto_round:auto_gptq)."
                )
        return awq(settings)
    if "gptq" in packing:
        dynamic = {("-:" if values is None else "+:") + _pattern(name): values or {} for name, values in own.items()}
        dynamic |= settings.section("dynamic").values
        return gptq(Settings({**settings.values, "checkpoint_format": "gptq", "dynamic": dynamic}, settings.where))
    raise UnsupportedModel(
        f"{settings.where}: packing_format {packing!r} is not supported. Supported: auto_round:auto_gptq, auto_round:auto_awq."
    )


_OWN: Final = ("bits", "group_size", "sym")
_NAME: Final = re.compile(r"[\w.]+")
_PLAIN: Final = 16
"""Bits from which on a layer is stored in full precision."""


def _own_settings(settings: Settings) -> dict[str, dict[str, Any] | None]:
    """Names, or patterns of them -> what is stored otherwise there; None: in full precision.

    Raises:
        CheckpointError: a value is impossible.
    """
    section, found = settings.section("extra_config"), dict[str, dict[str, Any] | None]()
    for name in section.values:
        one = section.section(name)
        plain = one.has("bits") and one.integer("bits") >= _PLAIN
        found[name] = None if plain else {key: one.values[key] for key in _OWN if one.has(key)}
    return found


def _pattern(name: str) -> str:
    """Of the modules that a name of auto-round's means: one, or those in whose names a pattern is found."""
    return f"{re.escape(name)}$" if _NAME.fullmatch(name) else f".*(?:{name})"


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
