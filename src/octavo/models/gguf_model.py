"""What model a GGUF file holds: its spec and the names of its tensors, from the header alone. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.checkpoint.gguf_file import GgufFile, read_gguf, rope_divisors
from octavo.config.types import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.rope import FrequencyDivisors, LongRopeScaling, RopeScaling
from octavo.models.families.base import Family
from octavo.models.gguf_names import gguf_targets
from octavo.models.hf_config import HfConfig
from octavo.models.registry import model_spec, supported_architectures
from octavo.models.spec import ModelSpec


def runs_through_transformers(config: EngineConfig) -> bool:
    """Whether the model is one that only `transformers` can build, or was asked to run so."""
    model = config.model
    return model.implementation == "transformers" or (
        model.implementation == "auto" and model.architecture not in supported_architectures()
    )


def open_header(config: EngineConfig) -> GgufFile | None:
    """The GGUF file that the model of `config` comes from; None: it does not come from one."""
    return _gguf(config.model.path, config.model.load_format)


def _gguf(path: str, load_format: str) -> GgufFile | None:
    """The GGUF file that `path` means, if it means one."""
    if os.path.isfile(path):
        if load_format == "safetensors":
            raise ConfigError(f"--load-format safetensors needs a model folder, got the file {path}.")
        return read_gguf(path, tokenizer=False)
    if load_format != "gguf":
        return None
    found = sorted(n for n in os.listdir(path) if n.endswith(".gguf")) if os.path.isdir(path) else []
    if len(found) != 1:
        raise CheckpointError(f"{path}: holds {len(found)} .gguf files. Give the path of the one to load.")
    return read_gguf(os.path.join(path, found[0]), tokenizer=False)


def gguf_spec(hf_config: Mapping[str, Any], gguf: GgufFile) -> tuple[ModelSpec, Family]:
    """The spec, corrected by what only the tensors of a GGUF file tell (a head of its own, biases, rotary divisors), and the family
    with the names of such files."""
    tensors = gguf.tensors
    spec, family = model_spec({**hf_config, "tie_word_embeddings": "output.weight" not in tensors}, gguf.path)
    first = "blk.0."
    spec = replace(
        spec,
        mlp=replace(spec.mlp, bias=any(name.endswith(".ffn_up.bias") for name in tensors)),
        qkv_bias=any(f"{first}{name}.bias" in tensors for name in ("attn_q", "attn_qkv")),
        attention_out_bias=f"{first}attn_output.bias" in tensors,
        norm_bias="output_norm.bias" in tensors,
        head_bias="output.bias" in tensors,
        norm_unit_offset=False,  # converters have added it
    )
    arch = str(gguf.metadata.get("general.architecture"))
    return _with_divisors(spec, gguf, arch), replace(family, weights=gguf_targets(arch, tensors), prefix="")


def _with_divisors(spec: ModelSpec, gguf: GgufFile, arch: str) -> ModelSpec:
    """Rotary scalings that a GGUF file has as tensors: Llama 3.1's and LongRoPE's."""

    def checked(name: str) -> tuple[float, ...] | None:
        if (divisors := rope_divisors(gguf, name)) is None:
            return None
        if len(divisors) != spec.rope.rotary_dim // 2 or not all(math.isfinite(d) and d > 0 for d in divisors):
            raise CheckpointError(f"{gguf.path}: tensor {name} does not hold {spec.rope.rotary_dim // 2} positive numbers.")
        return tuple(divisors)

    def scaled(scaling: RopeScaling) -> ModelSpec:
        rope = replace(spec.rope, scaling=scaling)
        return replace(spec, rope=rope, layer_ropes=tuple(rope if one == spec.rope else one for one in spec.layer_ropes))

    if (divisors := checked("rope_freqs.weight")) is not None:
        return scaled(FrequencyDivisors(divisors))
    short, long = checked("rope_factors_short.weight"), checked("rope_factors_long.weight")
    if short is None or long is None:
        return spec
    config = HfConfig(gguf.metadata, gguf.path)
    trained = config.integer(f"{arch}.context_length")
    original = config.integer(f"{arch}.rope.scaling.original_context_length", trained, minimum=2)
    stretch = 1.0 if trained <= original else math.sqrt(1 + math.log(trained / original) / math.log(original))
    return scaled(LongRopeScaling(short, long, original, config.number(f"{arch}.rope.scaling.attn_factor", stretch)))
