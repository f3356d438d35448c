"""Architecture name -> family. The one list of what runs natively."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import UnsupportedModel
from octavo.models.families import (
    bloom,
    cohere,
    deepseek,
    falcon,
    further,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    moe,
    olmo,
    phi,
    qwen2,
    qwen3,
    sigmoid_moe,
    stablelm,
    starcoder2,
)
from octavo.models.families.base import Family
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    llama.EXAONE,
    mistral.FAMILY,
    mistral.MINISTRAL3,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.GEMMA,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi.PHI,
    phi.PHI3,
    olmo.OLMO2,
    olmo.OLMO3,
    granite.FAMILY,
    starcoder2.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    falcon.FAMILY,
    bloom.BLOOM,
    bloom.MPT,
    stablelm.FAMILY,
    cohere.COHERE,
    cohere.COHERE2,
    *further.FAMILIES,
    *moe.FAMILIES,
    *deepseek.FAMILIES,
    *sigmoid_moe.FAMILIES,
    gpt_oss.FAMILY,
)


def supported_architectures() -> tuple[str, ...]:
    """Every architecture name that `family_for` knows, sorted."""
    return tuple(sorted(name for family in FAMILIES for name in family.architectures))


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint.

    Raises:
        UnsupportedModel: none of the config's architectures is known; the message lists those that are.
    """
    names = hf_config.get("architectures") or []
    if not isinstance(names, list):
        names = [names]
    for family in FAMILIES:
        if any(name in family.architectures for name in names):
            return family
    given = ", ".join(map(str, names)) or f"none given, model_type {hf_config.get('model_type')!r}"
    raise UnsupportedModel(
        f"Architecture {given} is not supported. Supported: {', '.join(supported_architectures())}. Others may run through the installed "
        "transformers: --model-impl transformers (or auto)."
    )


def generating_architecture(name: str) -> str | None:
    """The architecture with a language-model head that a bare model or a classifier is made of; None: none is known."""
    base = name.removesuffix("ForSequenceClassification").removesuffix("Model").removesuffix("Text")
    known = supported_architectures()
    return next((full for full in (name, f"{base}ForCausalLM", f"{base}LMHeadModel") if full in known), None)


def model_spec(hf_config: Mapping[str, Any], where: str = "config.json") -> tuple[ModelSpec, Family]:
    """What a checkpoint is, from its config alone.

    Args:
        where: the file that the config comes from, for messages.

    Raises:
        UnsupportedModel: an unknown architecture.
        CheckpointError: a config value that is missing or impossible.
    """
    family = family_for(hf_config)
    quantization = hf_config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method == "mxfp4" and method not in family.quantizations:
        raise UnsupportedModel(f"{where}: weights in MXFP4 are read of gpt-oss alone. Use the unquantised checkpoint, or a GGUF file.")
    return family.spec(HfConfig(hf_config, where)), family
