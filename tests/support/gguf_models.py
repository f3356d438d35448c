"""Writes tiny models as GGUF files, as converters do.

Names come from the table of the gguf package, an authority of its own; what converters rearrange (rows of q and k, fused matrices,
experts) is done here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
PAIRED = ("llama", "granite", "granitemoe", "smollm3", "arcee", "mistral3")
"""Architectures of which converters interleave the halves of each head of q and k."""


def halves_in_turns(value: Array, heads: int) -> Array:
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def split_groups(value: Array, heads: int, kv_heads: int) -> Array:
    """A fused qkv of groups (queries, k, v) as all queries, all k, all v."""
    group = heads // kv_heads
    parts = value.reshape(kv_heads, group + 2, -1, *value.shape[1:])
    flat = (value.shape[1:],)
    return np.concatenate([part.reshape(-1, *flat[0]) for part in (parts[:, :-2], parts[:, -2], parts[:, -1])])


def tensors_of(model: Any, arch: str, *, old_experts: bool = False, split_kv_b: bool = True) -> dict[str, Array]:
    """Name -> tensor of the file."""
    config = model.config
    layers = config.num_hidden_layers
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    table = gguf.get_tensor_name_map(kind, layers)
    out: dict[str, Array] = {}
    for name, tensor in model.state_dict().items():
        value: Array = tensor.detach().float().numpy()
        if name.endswith((".attn.bias", ".masked_bias", "position_ids")) or ".attention.bias" in name:
            continue
        if name.startswith("pooler."):
            continue  # converters leave it out
        if name in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        for stem, part in _parts(name, value, config, arch):
            target = _name(table, stem, arch)
            out[target] = np.ascontiguousarray(_arranged(target, part, config, arch))
    if arch == "deepseek2" and split_kv_b:
        _split_kv_b(out, config)
    return out if old_experts and arch == "llama" else _merged_experts(out)


def _name(table: Any, name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem, kind = name, "weight"
        if stem.endswith("_bias") and ".experts." in stem:
            stem, kind = stem.removesuffix("_bias"), "bias"
    if "experts." in stem and (match := re.fullmatch(r"(.*layers\.(\d+)\..*experts)\.(\d+)\.(\w+)", stem)):
        role = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}[match[4]]
        return f"blk.{match[2]}.ffn_{role}.{match[3]}.{kind}"
    if "e_score_correction_bias" in name:
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    if arch == "bloom":
        stem = stem.removeprefix("transformer.")
    found = table.get_name(stem.replace("block_sparse_moe.router", "block_sparse_moe.router.layer") if arch == "granitemoe" else stem)
    assert found is not None, f"{arch}: {name} has no name"
    return f"{found}.{kind}"


def _parts(name: str, value: Array, config: Any, arch: str) -> list[tuple[str, Array]]:
    """A tensor of the model as those that the file has."""
    if name.endswith("experts.gate_up_proj") and arch != "gpt-oss":  # newer transformers: [experts, 2 * inner, hidden]
        gate, up = np.split(value, 2, axis=1)
        return [
            (f"{name.removesuffix('gate_up_proj')}{e}.{part}.weight", m[e])
            for part, m in (("gate_proj", gate), ("up_proj", up))
            for e in range(len(m))
        ]
    if name.endswith("experts.down_proj") and arch != "gpt-oss":
        return [(f"{name.removesuffix('down_proj')}{e}.down_proj.weight", value[e]) for e in range(len(value))]
    if arch == "gpt-oss" and ".experts." in name:
        stem, bias = name.removesuffix("_bias"), "_bias" if name.endswith("_bias") else ""
        if not bias:
            value = value.swapaxes(1, 2)
        if stem.endswith("gate_up_proj"):
            base = stem.removesuffix("gate_up_proj")
            return [(f"{base}gate_proj{bias}", value[:, ::2]), (f"{base}up_proj{bias}", value[:, 1::2])]
        return [(f"{stem}{bias}", value)]
    return [(name, value)]


def _arranged(target: str, value: Array, config: Any, arch: str) -> Array:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if arch in PAIRED and (match := re.search(r"attn_([qk])\.", target)):
        return halves_in_turns(value, heads if match[1] == "q" else kv_heads)
    if arch == "gpt2" and re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", target):
        return value.T
    if arch in ("gptneox", "bloom") and "attn_qkv" in target:
        return split_groups(value, heads, heads)
    if arch == "falcon" and "attn_qkv" in target:
        return split_groups(value, heads, config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads)
    if arch in ("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron") and "norm.weight" in target:
        return value + 1
    if "ffn_gate_inp_shexp" in target:
        return value.reshape(-1)
    return value


def _split_kv_b(out: dict[str, Array], config: Any) -> None:
    for name in [n for n in out if n.endswith("attn_kv_b.weight")]:
        value = out.pop(name).reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        key, values = np.split(value, [config.qk_nope_head_dim], axis=1)
        out[name.replace("kv_b", "k_b")] = np.ascontiguousarray(key.swapaxes(1, 2))
        out[name.replace("kv_b", "v_b")] = np.ascontiguousarray(values)


def _merged_experts(out: dict[str, Array]) -> dict[str, Array]:
    merged: dict[str, Array] = {}
    groups: dict[str, dict[int, Array]] = {}
    for name, value in out.items():
        if match := re.fullmatch(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.(\w+)", name):
            groups.setdefault(f"{match[1]}_exps.{match[3]}", {})[int(match[2])] = value
        else:
            merged[name] = value
    return {**merged, **{name: np.stack([parts[e] for e in sorted(parts)]) for name, parts in groups.items()}}


def write_model(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Array], packed: str = "F32") -> None:
    """A file of `tensors`, matrices in the ggml type `packed` where they can be.

    Args:
        metadata: keys without the architecture in front, but for those with a dot in front.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        name = key[1:] if key.startswith(".") else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    kind = gguf.GGMLQuantizationType[packed]
    for name, value in tensors.items():
        if packed == "F32" or value.ndim == 1 or name.endswith("bias") or value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(name, value.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sizes(config: Any) -> dict[str, Any]:
    """The metadata that all architectures have."""
    heads = config.num_attention_heads
    out: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "ffn_hidden_size", None)
        or getattr(config, "intermediate_size", None)
        or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "vocab_size": config.vocab_size,
    }
    layer_norm = next(
        (v for k in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps") if (v := getattr(config, k, None)) is not None),
        None,
    )
    if (rms := getattr(config, "rms_norm_eps", None)) is not None:
        out["attention.layer_norm_rms_epsilon"] = rms
    else:
        out["attention.layer_norm_epsilon"] = layer_norm
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        out["rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        out |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        out["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    head_dim = getattr(config, "head_dim", None)
    if isinstance(head_dim, int):
        out["attention.key_length"] = out["attention.value_length"] = head_dim
    return out
