"""Configs to specs: what each family reads, its defaults, and how bad values are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.layers.alibi import ALIBI_WIDTH, alibi_slopes, with_positions
from octavo.models.registry import model_spec, supported_architectures
from octavo.models.spec import ModelSpec, parameters

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


def spec(architecture: str, **changes: Any) -> ModelSpec:
    config = SIZES | {"architectures": [architecture]} | changes
    return model_spec({k: v for k, v in config.items() if v != "absent"})[0]


def test_llama_defaults() -> None:
    llama = spec("LlamaForCausalLM")
    assert (llama.num_heads, llama.num_kv_heads, llama.head_dim, llama.num_layers) == (8, 8, 8, 3)
    assert llama.norm_eps == 1e-6
    assert llama.rope.theta == 10000.0
    assert not any((llama.tied_embeddings, llama.qkv_bias, llama.attention_out_bias, llama.mlp.bias, llama.qk_norm))
    assert {s.sliding_window for s in llama.layer_specs} == {None}
    assert llama.layer_specs[0].scale == pytest.approx(8**-0.5)


def test_llama_options() -> None:
    llama = spec("LlamaForCausalLM", attention_bias=True, mlp_bias=True, head_dim=32, num_key_value_heads=2, tie_word_embeddings=True)
    assert llama.qkv_bias
    assert llama.attention_out_bias
    assert llama.mlp.bias
    assert (llama.head_dim, llama.num_kv_heads, llama.tied_embeddings) == (32, 2, True)


@pytest.mark.parametrize(("value", "window"), [("absent", 4096), (None, None), (128, 128)])
def test_mistral_window(value: Any, window: int | None) -> None:
    assert spec("MistralForCausalLM", sliding_window=value).sliding_windows == (window,) * 3


def test_mistral_has_eight_kv_heads_unless_told() -> None:
    assert spec("MistralForCausalLM", num_attention_heads=16).num_kv_heads == 8
    assert spec("MistralForCausalLM", num_attention_heads=16, num_key_value_heads=4).num_kv_heads == 4


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(architecture: str) -> None:
    window = {"sliding_window": 32, "max_window_layers": 1}
    assert spec(architecture, **window).sliding_windows == (None, None, None)
    assert spec(architecture, use_sliding_window=True, **window).sliding_windows == (None, 32, 32)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert spec(architecture, use_sliding_window=True, layer_types=kinds, **window).sliding_windows == (32, None, 32)
    with pytest.raises(CheckpointError, match="layer_types"):
        spec(architecture, use_sliding_window=True, layer_types=["full_attention"], **window)


_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DOTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_COHERE2 = {"layer_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("GptOssForCausalLM", _MOE),
        ("Gemma2ForCausalLM", {}),
        ("Gemma3ForCausalLM", {}),
        ("Olmo3ForCausalLM", {}),
        ("Cohere2ForCausalLM", _COHERE2),
        ("Exaone4ForCausalLM", {}),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}),
        ("MinistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}),
        ("Dots1ForCausalLM", _DOTS),
    ],
)
def test_layers_with_a_window_that_there_is_not(architecture: str, more: dict[str, Any]) -> None:
    """They would see everything, or as much as some default, which is another model."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert spec(architecture, layer_types=kinds, sliding_window=32, **more).sliding_windows == (32, None, None)
    assert set(spec(architecture, layer_types=["full_attention"] * 3, sliding_window=None, **more).sliding_windows) == {None}
    with pytest.raises(CheckpointError, match=r"sliding_window must be .* layer_types .* got None"):
        spec(architecture, layer_types=kinds, sliding_window=None, **more)


@pytest.mark.parametrize("architecture", ["GptOssForCausalLM", "Gemma2ForCausalLM", "Olmo3ForCausalLM"])
def test_an_architecture_of_windows_is_not_without(architecture: str) -> None:
    more = _MOE if architecture.startswith("GptOss") else {}
    assert any(spec(architecture, **more).sliding_windows)
    with pytest.raises(CheckpointError, match=r"sliding_window must be .*, got None"):
        spec(architecture, sliding_window=None, **more)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"])
def test_windows_that_are_switched_off_but_listed(architecture: str) -> None:
    with pytest.raises(CheckpointError, match="use_sliding_window"):
        spec(architecture, layer_types=["sliding_attention"] * 3, sliding_window=32, use_sliding_window=False)


def test_qwen2_has_qkv_biases_only() -> None:
    qwen = spec("Qwen2ForCausalLM")
    assert (qwen.qkv_bias, qwen.attention_out_bias, qwen.mlp.bias) == (True, False, False)


def test_qwen3_has_qk_norm_and_its_own_head_size() -> None:
    assert spec("Qwen3ForCausalLM").qk_norm
    assert spec("Qwen3ForCausalLM").head_dim == 128
    assert spec("Qwen3ForCausalLM", head_dim=16).head_dim == 16
    assert not spec("Qwen3ForCausalLM").qkv_bias


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0, 2**40, 1.5, "12", True, [4], "absent"])
def test_impossible_sizes_are_named(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        spec("LlamaForCausalLM", **{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 7}, "rotated dimensions"),
        ({"partial_rotary_factor": 2.0}, "rotated dimensions"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.nan}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}}, "high_freq"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}}, "short_factor"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec("LlamaForCausalLM", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["XGLMForCausalLM"]}, "XGLMForCausalLM.*LlamaForCausalLM, .*Qwen3ForCausalLM"),
        ({"architectures": []}, "none given"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"architectures": 7}, "7"),
        ({"hidden_act": "relu"}, "relu.*silu"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral.*yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "different layers"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec("LlamaForCausalLM", **changes)


def test_layers_of_gemma3_have_rotations_of_their_own() -> None:
    kinds = {"sliding_window": 8, "sliding_window_pattern": 3}
    older = spec(
        "Gemma3ForCausalLM", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0}, **kinds
    )
    newer = spec(
        "Gemma3ForCausalLM",
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
        **kinds,
    )
    assert older.ropes == newer.ropes
    assert [r.theta for r in newer.ropes if r is not None] == [1e4, 1e4, 1e6]
    assert [r.scaling is None for r in newer.ropes if r is not None] == [True, True, False]
    assert newer.sliding_windows == (8, 8, None)


def test_gpt_neox_reads_its_older_keys() -> None:
    rope = spec("GPTNeoXForCausalLM", rotary_pct=0.5, rotary_emb_base=500).rope
    assert (rope.rotary_dim, rope.theta) == (4, 500)


def test_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(6) == pytest.approx((2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3))


def test_positions_ride_along_exactly_in_narrow_types() -> None:
    """Scores of two keys differ by the slope times their distance, however far from the beginning they are."""
    slopes, scale = torch.tensor([0.5, 0.0625]), 0.125
    positions = torch.tensor([0, 1, 255, 256, 257, 65_534, 65_535])
    zeros = torch.zeros(len(positions), 2, 8, dtype=torch.bfloat16)
    q, k, v = with_positions(zeros, zeros[:, :1], zeros[:, :1], positions, slopes, scale)
    assert v.shape == (7, 1, 8 + ALIBI_WIDTH) and not v.any()
    scores = torch.einsum("hd,kd->hk", q[0].double(), k[:, 0].double()) * scale
    assert torch.equal(scores, slopes.double()[:, None] * positions)


def test_an_activation_that_needs_no_gate_is_refused_in_a_gated_block() -> None:
    assert spec("Starcoder2ForCausalLM", hidden_act="relu").mlp.activation == "relu"
    with pytest.raises(UnsupportedModel, match="relu"):
        spec("LlamaForCausalLM", hidden_act="relu")


def test_all_four_families_are_there() -> None:
    names = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
    assert names <= set(supported_architectures())


def test_parameters_follow_from_the_spec() -> None:
    shapes = {p.name: p.shape for p in parameters(spec("LlamaForCausalLM", num_key_value_heads=2, attention_bias=True, mlp_bias=True))}
    assert shapes["embed"] == shapes["head"] == (100, 64)
    assert shapes["layers.2.qkv.weight"] == (64 + 16 + 16, 64)
    assert shapes["layers.2.qkv.bias"] == (96,)
    assert shapes["layers.0.gate_up.weight"] == (192, 64)
    assert shapes["layers.0.down.bias"] == (64,)
    assert "layers.3.qkv.weight" not in shapes
    tied = {p.name for p in parameters(spec("Qwen3ForCausalLM", tie_word_embeddings=True))}
    assert "head" not in tied
    assert {"layers.0.q_norm", "layers.0.k_norm"} <= tied


def test_parts_cover_their_parameter_without_overlap() -> None:
    for parameter in parameters(spec("Qwen2ForCausalLM", num_key_value_heads=2)):
        if parameter.parts:
            edges = sorted(parameter.parts.values())
            assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
            assert edges[-1][1] == parameter.shape[0]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "PhiForCausalLM"])
def test_an_activation_of_null_is_said(architecture: str) -> None:
    spec(architecture, hidden_act="absent")
    with pytest.raises(CheckpointError, match="hidden_act must be the name of an activation, or left out, got None"):
        spec(architecture, hidden_act=None)
