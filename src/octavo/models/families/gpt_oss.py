"""gpt-oss: attention sinks, windows in every other layer, experts with biases and a clamped activation.

Its checkpoints hold the experts in MXFP4, as rows of the matrices; those that were saved in 16 bits hold them the other way round.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.errors import UnsupportedModel
from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, decoder_spec, layer_windows
from octavo.models.families.moe import moe_spec
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec

_LAYER = "model.layers.{i}."


def _spec(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias", True)
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.number(key, value) != value:
            raise UnsupportedModel(f"{config.where}: {key} other than {value} is not supported.")
    return decoder_spec(
        config,
        "GptOssForCausalLM",
        head_dim=config.integer("head_dim", 64),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        attention_out_bias=bias,
        attention_sinks=True,
        sliding_windows=layer_windows(config, config.integer("sliding_window", 128), lambda layer: layer % 2 == 0),
        moe=moe_spec(
            config,
            "num_local_experts",
            "intermediate_size",
            routing={"normalize": True},
            activation="swiglu_clamped",
            bias=True,
            router_bias=True,
        ),
    )


def _halves(spec: ModelSpec) -> npt.NDArray[np.int64]:
    """The rows of each expert's gate and up are stored in turns."""
    assert spec.moe is not None
    rows = 2 * spec.moe.intermediate_size
    expert = np.concatenate((np.arange(0, rows, 2), np.arange(1, rows, 2)))
    return (np.arange(spec.moe.num_experts)[:, None] * rows + expert).reshape(-1)


FAMILY = Family(
    name="gpt_oss",
    title="gpt-oss (MXFP4 or 16-bit weights)",
    architectures=("GptOssForCausalLM",),
    spec=_spec,
    quantizations=("mxfp4",),
    weights={
        **DECODER_WEIGHTS,
        f"{_LAYER}self_attn.sinks": Target("layers.{i}.sinks"),
        f"{_LAYER}mlp.router.weight": Target("layers.{i}.router.weight"),
        f"{_LAYER}mlp.router.bias": Target("layers.{i}.router.bias"),
        f"{_LAYER}mlp.experts.gate_up_proj": Target("layers.{i}.experts.gate_up.weight", order=_halves, transposed=True),
        f"{_LAYER}mlp.experts.gate_up_proj_bias": Target("layers.{i}.experts.gate_up.bias", order=_halves),
        f"{_LAYER}mlp.experts.down_proj": Target("layers.{i}.experts.down.weight", transposed=True),
        f"{_LAYER}mlp.experts.down_proj_bias": Target("layers.{i}.experts.down.bias"),
    },
)
