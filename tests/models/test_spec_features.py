"""What a `ModelSpec` can say beyond the families that ship: checked by describing other architectures with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from octavo.layers.rope import RopeSpec
from octavo.models.assembly import Assembly
from octavo.models.compiled import build_decoder
from octavo.models.decoder import Model
from octavo.models.families.base import DECODER_WEIGHTS, Target
from octavo.models.spec import MlpSpec, ModelSpec
from octavo.ops.cpu import abi
from octavo.ops.registry import Ops, load_ops
from octavo.weights.stored import StoredTensor
from tests.models.contiguous import run
from tests.support.tiny_models import SIZES

IDS = list(range(5, 30))


@pytest.fixture(params=["cpu", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "native" and abi.library() is None:
        pytest.skip("the compiled kernels were not built")
    return load_ops(request.param)


def build(spec: ModelSpec, targets: Mapping[str, Target], tensors: Mapping[str, torch.Tensor], ops: Ops) -> Model:
    assembly = Assembly(spec, targets, ops, torch.float32, torch.device("cpu"))
    for name, tensor in tensors.items():
        assembly.add(StoredTensor(name, tuple(tensor.shape), tensor.nbytes, "memory", lambda out, t=tensor: out.copy_(t)))
    return build_decoder(spec, assembly.finish(), ops, max_length=64)


def randomised(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.3, 0.2)
    return model.eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


def shared(config: Any, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": SIZES["head_dim"],
        "rope": RopeSpec(config.rope_parameters["rope_theta"], SIZES["head_dim"]),
        "norm_eps": config.rms_norm_eps,
        **more,
    }


def test_gemma2_norms_on_both_sides_soft_caps_and_alternating_windows(ops: Ops) -> None:
    config = transformers.Gemma2Config(
        **SIZES, query_pre_attn_scalar=10, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, sliding_window=6
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = randomised(transformers.Gemma2ForCausalLM(config))
    spec = ModelSpec(
        architecture="Gemma2ForCausalLM",
        mlp=MlpSpec(config.intermediate_size, "gelu_tanh"),
        sliding_windows=(6, None),
        tied_embeddings=True,
        norm_placement="both",
        norm_unit_offset=True,
        attention_scale=10**-0.5,
        attention_soft_cap=2.0,
        logit_soft_cap=3.0,
        embedding_scale=config.hidden_size**0.5,
        **shared(config),
    )
    layer = "model.layers.{i}."
    targets = {
        **DECODER_WEIGHTS,
        layer + "post_attention_layernorm.weight": Target("layers.{i}.attention_post_norm"),
        layer + "pre_feedforward_layernorm.weight": Target("layers.{i}.mlp_norm"),
        layer + "post_feedforward_layernorm.weight": Target("layers.{i}.mlp_post_norm"),
    }
    expected = logits_of(model)
    assert expected.std() > 0.1
    torch.testing.assert_close(run(build(spec, targets, model.state_dict(), ops), IDS), expected, atol=1e-4, rtol=1e-4)


def test_granite_multipliers(ops: Ops) -> None:
    config = transformers.GraniteConfig(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    )
    torch.manual_seed(0)
    model = randomised(transformers.GraniteForCausalLM(config))
    spec = ModelSpec(
        architecture="GraniteForCausalLM",
        mlp=MlpSpec(config.intermediate_size),
        sliding_windows=(None, None),
        attention_scale=0.2,
        embedding_scale=3.0,
        residual_multiplier=0.4,
        logit_scale=0.5,
        **shared(config),
    )
    model_logits = logits_of(model)
    assert model_logits.std() > 0.1
    torch.testing.assert_close(run(build(spec, DECODER_WEIGHTS, model.state_dict(), ops), IDS), model_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_norms_after_the_blocks_and_partial_rotation(rotary_dim: int, ops: Ops) -> None:
    """OLMo 2's placement, against a plain forward pass written out here (its QK-norm, over all heads at once, is left out)."""
    heads, head_dim, hidden, inner = 2, 8, 16, 24
    spec = ModelSpec(
        architecture="PostNorm",
        vocab_size=40,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        mlp=MlpSpec(inner, "gelu"),
        rope=RopeSpec(100.0, rotary_dim),
        norm_eps=1e-6,
        sliding_windows=(None, None),
        norm_placement="post",
    )
    generator = torch.Generator().manual_seed(0)
    layers = ("model.layers.0.", "model.layers.1.")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (40, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (40, hidden),
    }
    for prefix in layers:
        shapes |= {f"{prefix}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes |= {f"{prefix}mlp.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{prefix}{n}.weight": (hidden,) for n in ("post_attention_layernorm", "post_feedforward_layernorm")}
    w = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    targets = {
        **DECODER_WEIGHTS,
        "model.layers.{i}.post_attention_layernorm.weight": Target("layers.{i}.attention_post_norm"),
        "model.layers.{i}.post_feedforward_layernorm.weight": Target("layers.{i}.mlp_post_norm"),
    }

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (hidden,), w[name].double(), 1e-6)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [tokens, heads, head_dim]
        angle = torch.arange(len(ids))[:, None, None] * 100.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        a, b = x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
        turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        return torch.cat((*turned, x[..., rotary_dim:]), dim=-1)

    ids = IDS[:9]
    x = w["model.embed_tokens.weight"].double()[ids]
    for prefix in layers:
        q, k, v = ((x @ w[f"{prefix}self_attn.{p}_proj.weight"].double().T).view(-1, heads, head_dim) for p in "qkv")
        scores = torch.einsum("qhd,khd->hqk", rotate(q), rotate(k)) * head_dim**-0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(-1, hidden)
        x = x + norm(attended @ w[f"{prefix}self_attn.o_proj.weight"].double().T, f"{prefix}post_attention_layernorm.weight")
        gate, up = (x @ w[f"{prefix}mlp.{p}_proj.weight"].double().T for p in ("gate", "up"))
        inner_out = torch.nn.functional.gelu(gate) * up
        x = x + norm(inner_out @ w[f"{prefix}mlp.down_proj.weight"].double().T, f"{prefix}post_feedforward_layernorm.weight")
    expected = norm(x, "model.norm.weight") @ w["lm_head.weight"].double().T
    torch.testing.assert_close(run(build(spec, targets, w, ops), ids), expected.float(), atol=1e-4, rtol=1e-4)
