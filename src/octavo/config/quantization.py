"""Which way of storing low-bit weights a model is loaded with: what the checkpoint says, and what the user asked for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from octavo.errors import CheckpointError, ConfigError, UnsupportedModel

METHODS: Final[Mapping[str, str]] = {
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "gptq_bitblas": "gptq",
    "gptqmodel": "gptq",
    "auto-round": "auto-round",
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "compressed-tensors": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "ptpc_fp8": "fp8",
    "modelopt": "modelopt",
    "int8": "int8",
    "w8a8_int8": "int8",
    "squeezellm": "squeezellm",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "mxfp4",
}
"""Every name that checkpoints and command lines use -> ours."""

ON_THE_FLY: Final = ("fp8", "int8")
"""What weights of a full-precision checkpoint can be rounded to while they are loaded."""


def quantization_method(asked: str | None, hf_config: Mapping[str, Any], name: str) -> str | None:
    """The method that a model's weights are read with; None: they are not quantised.

    Args:
        asked: the user's `--quantization`.
        name: the model, for messages.

    Raises:
        ConfigError: the user asked for another method than the checkpoint has, or for one that does not exist.
        UnsupportedModel: the checkpoint has one that Octavo does not read.
        CheckpointError: its quantization_config is not an object.
    """
    if asked is not None and asked not in METHODS:
        near = difflib.get_close_matches(asked, METHODS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--quantization {asked!r} is not one of {', '.join(sorted(set(METHODS.values())))}.{hint}")
    stored = hf_config.get("quantization_config")
    if stored is None:
        if asked is not None and METHODS[asked] not in ON_THE_FLY:
            raise ConfigError(
                f"--quantization {asked}: the weights of {name} are not quantised, and only {' and '.join(ON_THE_FLY)} are made while "
                f"loading. Take a checkpoint that was quantised with {asked}, or make one: octavo quantize."
            )
        return None if asked is None else METHODS[asked]
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"{name}: its quantization_config must be an object, found {stored!r}.")
    method = stored.get("quant_method") or ("modelopt" if "quant_algo" in stored or "quantization" in stored else None)
    ours = METHODS.get(str(method).lower())
    known = ", ".join(sorted(set(METHODS.values())))
    if method is None:
        raise CheckpointError(f"{name}: its quantization_config has no quant_method, which says how the weights are stored ({known}).")
    if ours is None:
        raise UnsupportedModel(
            f"{name}: its weights are quantised with {method!r}, which Octavo does not read. It reads {known}, and GGUF."
        )
    if asked is not None and METHODS[asked] != ours and {METHODS[asked], ours} != {"gptq", "auto-round"}:
        raise ConfigError(f"--quantization {asked}: the weights of {name} are quantised with {ours}. Leave the option out.")
    return ours
