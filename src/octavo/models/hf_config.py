"""Typed reading of a Hugging Face config: each value is checked where it is read, so that a bad one is named by its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.config.typed_json import MAX_SIZE, TypedJson
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.layers.rope import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)


class HfConfig(TypedJson):
    """A config.json, or one level of it. A key without a default is required."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        super().__init__(values, where)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():  # some exporters write 32.0
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_SIZE:
            raise self.fail(key, f"a whole number from {minimum} to {MAX_SIZE}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number greater than zero."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, "a number greater than 0")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.values.get(key)
        good = isinstance(value, (list, tuple)) and len(value) == count
        if not good or not all(isinstance(v, (int, float)) and math.isfinite(v) and v > 0 for v in value or ()):
            raise self.fail(key, f"a list of {count} numbers greater than 0")
        return tuple(float(v) for v in value or ())

    def renamed(self, names: Mapping[str, str]) -> HfConfig:
        """The same config with entries under further names: {theirs: usual}. Messages name the usual."""
        return HfConfig(
            {usual: self.values[theirs] for theirs, usual in names.items() if theirs in self.values} | dict(self.values), self.where
        )


def rope_spec(
    config: HfConfig, head_dim: int, *, default_theta: float = 10000.0, default_partial: float = 1.0, layer_type: str | None = None
) -> RopeSpec:
    """Rotary embedding, from `rope_parameters` (newer configs) or `rope_theta` and `rope_scaling` (older ones, and overrides).

    Args:
        default_partial: the rotated part of a head where the config does not say.
        layer_type: whose, where the config has one for each kind of layer.

    Raises:
        CheckpointError: a value missing or out of range.
        UnsupportedModel: a kind of scaling that is not known.
    """
    newer = config.section("rope_parameters")
    rope = config.section("rope_scaling") if config.values.get("rope_scaling") else newer
    if layer_type is not None and isinstance(rope.values.get(layer_type), Mapping):
        rope = newer = rope.section(layer_type)
    if any(isinstance(value, Mapping) for value in rope.values.values()):
        raise UnsupportedModel(f"{rope.where}: different rotary embeddings for different layers are not supported.")
    theta = rope.number("rope_theta", config.number("rope_theta", newer.number("rope_theta", default_theta)))
    if theta <= 1.0:
        raise CheckpointError(f"{config.where}: rope_theta must be greater than 1, got {theta}.")
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", default_partial))
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise CheckpointError(f"{config.where}: {rotary_dim} rotated dimensions of a head with {head_dim} are not possible.")
    return RopeSpec(theta, rotary_dim, _scaling(config, rope, rotary_dim))


def _scaling(config: HfConfig, rope: HfConfig, rotary_dim: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    trained = config.integer("max_position_embeddings", 2048)
    # The outer key is where Phi-3 style configs keep it, and it wins.
    inner = rope.integer("original_max_position_embeddings", trained, minimum=2)
    original = config.integer("original_max_position_embeddings", inner, minimum=2)
    match kind:
        case "default" | "mrope":  # for text all of mrope's positions are the same
            return None
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "dynamic":
            if rotary_dim < 4:
                raise UnsupportedModel(f"{rope.where}: dynamic scaling needs at least 4 rotated dimensions, got {rotary_dim}.")
            return DynamicNtkScaling(rope.number("factor"), trained)
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low >= high:
                raise rope.fail("low_freq_factor", f"less than high_freq_factor ({high})")
            return Llama3Scaling(rope.number("factor"), low, high, original)
        case "yarn":
            stated = rope.has("original_max_position_embeddings") or config.has("original_max_position_embeddings")
            factor = rope.number("factor", trained / original if stated else None)
            return YarnScaling(
                factor,
                original,
                rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
                rope.number("beta_fast", 32.0),
                rope.number("beta_slow", 1.0),
                rope.flag("truncate", True),
            )
        case "longrope" | "su":
            factor = rope.number("factor", trained / original)
            default = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
            divisors = [rope.numbers(key, rotary_dim // 2) for key in ("short_factor", "long_factor")]
            return LongRopeScaling(divisors[0], divisors[1], original, rope.number("attention_factor", default))
    raise UnsupportedModel(
        f"{rope.where}: rope_type {kind!r} is not supported. Supported: default, linear, dynamic, llama3, yarn, longrope."
    )


def _yarn_attention_factor(rope: HfConfig, factor: float) -> float:
    """The factor that the paper suggests, or DeepSeek's two-sided form of it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return mscale(rope.number("mscale")) / mscale(rope.number("mscale_all_dim"))
    return mscale(1.0)


def yarn_magnitude(config: HfConfig) -> float:
    """What DeepSeek multiplies queries and keys with when YaRN stretches the context: 1.0 without."""
    rope = config.section("rope_scaling") if config.values.get("rope_scaling") else config.section("rope_parameters")
    if rope.text("rope_type", rope.text("type", "default")) == "default" or not rope.values.get("mscale_all_dim"):
        return 1.0
    factor = rope.number("factor")
    return 1.0 if factor <= 1.0 else 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0
