"""Where the tensors of a GGUF file go.

llama.cpp calls the same tensor the same in all architectures, so one table serves nearly all of them; what converters arrange otherwise
than Hugging Face checkpoints have it is in `_DIFFERENCES`: rows of q and k of models that rotate neighbouring pairs there, matrices that
are fused, norms that have another role.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from octavo.models.families.base import RowOrder, Target, paired_halves
from octavo.models.families.deepseek import kv_order, q_order
from octavo.models.spec import ModelSpec

_TABLES: Final = {
    "token_embd.weight": "embed",
    "token_embd_norm.weight": "embed_norm",
    "token_embd_norm.bias": "embed_norm.bias",
    "position_embd.weight": "positions",
    "output_norm.weight": "norm",
    "output_norm.bias": "norm.bias",
    "output.weight": "head",
    "output.bias": "head.bias",
}
_NORMS: Final = {
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "post_attention_norm": "attention_post_norm",
    "post_ffw_norm": "mlp_post_norm",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_q_a_norm": "q_down_norm",
    "attn_kv_a_norm": "kv_norm",
}
_MATRICES: Final = (
    ("attn_q", "qkv", "q"),
    ("attn_k", "qkv", "k"),
    ("attn_v", "qkv", "v"),
    ("attn_qkv", "qkv", None),
    ("attn_output", "attention_out", None),
    ("ffn_gate", "gate_up", "gate"),
    ("ffn_up", "gate_up", "up"),
    ("ffn_down", "down", None),
    ("ffn_gate_inp", "router", None),
    ("ffn_gate_inp_shexp", "shared_gate", None),
    ("ffn_gate_shexp", "shared.gate_up", "gate"),
    ("ffn_up_shexp", "shared.gate_up", "up"),
    ("ffn_down_shexp", "shared.down", None),
    # One matrix an expert: in older files by name, in newer ones as slices of a larger tensor.
    *((f"{source}{kind}.{{e}}", f"experts.{ours}", part) for source, ours, part in (
        ("ffn_gate", "gate_up", "{e}.gate"),
        ("ffn_up", "gate_up", "{e}.up"),
        ("ffn_down", "down", "{e}"),
    ) for kind in ("", "_exps")),
)  # fmt: skip
_LATENT: Final = {
    "attn_q_a.weight": Target("layers.{i}.q_down.weight"),
    "attn_q_b.weight": Target("layers.{i}.q.weight", order=q_order),
    "attn_q.weight": Target("layers.{i}.q.weight", order=q_order),
    "attn_kv_a_mqa.weight": Target("layers.{i}.kv_down.weight", order=kv_order),
    "attn_kv_b.weight": Target("layers.{i}.kv_up"),
    # Newer files have the two halves apart, head by head, and that for the keys the other way round.
    "attn_k_b.{e}.weight": Target("layers.{i}.kv_up", "{e}.k", transposed=True),
    "attn_v_b.{e}.weight": Target("layers.{i}.kv_up", "{e}.v"),
}
_FUSED: Final = {"ffn_up.weight": Target("layers.{i}.gate_up.weight")}
"""Gate and up in one matrix, under the name of the second."""


def _q_pairs(spec: ModelSpec) -> npt.NDArray[np.int64]:
    return paired_halves(spec.num_heads, spec.head_dim, spec.rope.rotary_dim)


def _k_pairs(spec: ModelSpec) -> npt.NDArray[np.int64]:
    return paired_halves(spec.num_kv_heads, spec.head_dim, spec.rope.rotary_dim)


def _common() -> dict[str, Target]:
    out = {name: Target(parameter) for name, parameter in _TABLES.items()}
    for name, parameter in _NORMS.items():
        out[f"blk.{{i}}.{name}.weight"] = Target(f"layers.{{i}}.{parameter}")
        out[f"blk.{{i}}.{name}.bias"] = Target(f"layers.{{i}}.{parameter}.bias")
    for name, parameter, part in _MATRICES:
        for kind in ("weight", "bias"):
            out[f"blk.{{i}}.{name}.{kind}"] = Target(f"layers.{{i}}.{parameter}.{kind}", part)
    out["blk.{i}.attn_sinks.weight"] = Target("layers.{i}.sinks")
    out["blk.{i}.exp_probs_b.bias"] = Target("layers.{i}.router.correction")
    return out


def _paired(names: Mapping[str, Target], *, norms: bool = False) -> dict[str, Target]:
    """With q and k as a model has them that rotates neighbours."""
    orders: list[tuple[str, RowOrder]] = [("q", _q_pairs), ("k", _k_pairs)]
    changed = {f"blk.{{i}}.attn_{one}.{kind}": order for one, order in orders for kind in ("weight", "bias")}
    if norms:
        changed |= {f"blk.{{i}}.attn_{one}_norm.weight": order for one, order in orders}
    return {**names, **{name: replace(names[name], order=order) for name, order in changed.items()}}


_COMMON: Final = _common()
_PAIRED: Final = frozenset({"llama", "granite", "granitemoe", "smollm3", "arcee", "mistral3", "ernie4_5"})
"""q and k of these are in the order of neighbouring pairs, which llama.cpp rotates: converters put them so, or the model has them so."""


def gguf_targets(arch: str, tensors: Collection[str]) -> dict[str, Target]:
    """Tensor name -> target for a decoder of one of llama.cpp's architectures; `{i}` is the layer, `{e}` an expert or a head.

    Args:
        tensors: names of those in the file.
    """
    match arch:
        case _ if arch in _PAIRED:
            return _paired(_COMMON)
        case "command-r" | "cohere2":
            return _paired(_COMMON, norms=True)
        case "glm4":
            return _paired({**_COMMON, **_layered(_FUSED)})
        case "phi3":
            return {**_COMMON, **_layered(_FUSED)}
        case "deepseek2":
            return {**_COMMON, **_layered(_LATENT)}
        case "gpt-oss" | "glm4moe" | "seed_oss":  # what stands between the two blocks norms what the second reads
            return {**_COMMON, "blk.{i}.post_attention_norm.weight": Target("layers.{i}.mlp_norm")}
        case "falcon" if "blk.0.attn_norm_2.weight" in tensors:
            return {
                **_COMMON,
                **{
                    f"blk.{{i}}.{name}.{kind}": Target(f"layers.{{i}}.{norm}{suffix}")
                    for name, norm in (("attn_norm", "mlp_norm"), ("attn_norm_2", "attention_norm"))
                    for kind, suffix in (("weight", ""), ("bias", ".bias"))
                },
            }
    return _COMMON


def _layered(names: Mapping[str, Target]) -> dict[str, Target]:
    return {f"blk.{{i}}.{name}": target for name, target in names.items()}


_ENCODER: Final[Mapping[str, Target]] = {
    "token_embd.weight": Target("embed"),
    "position_embd.weight": Target("positions"),
    "token_types.weight": Target("token_types"),
    "token_embd_norm.weight": Target("embed_norm"),
    "token_embd_norm.bias": Target("embed_norm.bias"),
    **{
        f"blk.{{i}}.{name}.{kind}": Target(f"layers.{{i}}.{norm}{suffix}")
        for name, norm in (("attn_output_norm", "attention_norm"), ("layer_output_norm", "mlp_norm"))
        for kind, suffix in (("weight", ""), ("bias", ".bias"))
    },
    **{
        f"blk.{{i}}.{name}.{kind}": Target(f"layers.{{i}}.{parameter}.{kind}", part)
        for name, parameter, part in (
            ("attn_q", "qkv", "q"),
            ("attn_k", "qkv", "k"),
            ("attn_v", "qkv", "v"),
            ("attn_qkv", "qkv", None),
            ("attn_output", "attention_out", None),
            ("ffn_up", "up", None),
            ("ffn_down", "down", None),
        )
        for kind in ("weight", "bias")
    },
    **{
        f"{name}.{kind}": Target(f"{parameter}.{kind}")
        for name, parameter in (("cls", "classifier.dense"), ("cls.output", "classifier.out"))
        for kind in ("weight", "bias")
    },
}


def gguf_encoder_targets(*, gated: bool) -> dict[str, Target]:
    """Tensor name -> target for an encoder; `{i}` is the layer."""
    if not gated:
        return dict(_ENCODER)
    parts = {
        f"blk.{{i}}.{name}.{kind}": Target(f"layers.{{i}}.gate_up.{kind}", part)
        for name, part in (("ffn_up", "up"), ("ffn_gate", "gate"))
        for kind in ("weight", "bias")
    }
    return {**_ENCODER, **parts}
