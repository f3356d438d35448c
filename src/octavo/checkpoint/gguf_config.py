"""From the metadata of a GGUF file to the config.json that its model would have as a Hugging Face checkpoint.

`_ARCHITECTURES` lists what can be read: for each of llama.cpp's architectures the class in transformers, and a function for what its
config has besides the sizes that all share. What only tensors tell (a head of its own, biases) is looked up in their directory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from octavo.checkpoint.gguf_file import GgufTensor
from octavo.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True)
class _Source:
    """What there is to read from."""

    arch: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    """What all architectures share."""

    def number(self, key: str, kind: type[int] | type[float], default: Any = None) -> Any:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if value is default and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise CheckpointError(f"GGUF metadata: {self.arch}.{key} must be a non-negative number, got {value!r}.")
        return kind(value)

    def has(self, key: str) -> bool:
        return self.metadata.get(f"{self.arch}.{key}") is not None

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(value, bool):
            raise CheckpointError(f"GGUF metadata: {self.arch}.{key} must be true or false, got {value!r}.")
        return value

    def window(self) -> int | None:
        """0 is no window."""
        return self.number("attention.sliding_window", int, 0) or None


_Further = Callable[[_Source], dict[str, Any]]
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the model that scales attention by the width of a head's share of the hidden state; files do not say so."""


def _nothing(source: _Source) -> dict[str, Any]:
    return {}


def _llama(source: _Source) -> dict[str, Any]:
    """Mixtral files are llama files with experts."""
    if not source.number("expert_count", int, 0):
        return {}
    return {"architectures": ["MixtralForCausalLM"], **_experts(source, "num_local_experts"), "sliding_window": None}


def _experts(source: _Source, count: str) -> dict[str, Any]:
    return {count: source.number("expert_count", int), "num_experts_per_tok": source.number("expert_used_count", int)}


def _qwen2_moe(source: _Source) -> dict[str, Any]:
    return {
        **_experts(source, "num_experts"),
        "moe_intermediate_size": source.number("expert_feed_forward_length", int, _rows(source, "ffn_gate_exps", 1)),
        "shared_expert_intermediate_size": source.number("expert_shared_feed_forward_length", int, _rows(source, "ffn_gate_shexp", 0)),
        "norm_topk_prob": False,
    }


def _qwen3_moe(source: _Source) -> dict[str, Any]:
    size = source.number("expert_feed_forward_length", int, _rows(source, "ffn_gate_exps", 1))
    return {**_experts(source, "num_experts"), "moe_intermediate_size": size, "norm_topk_prob": True}


def _rows(source: _Source, name: str, dimension: int) -> int | None:
    """A size that older files leave to the tensors: of the first layer that has this one."""
    shapes = [t.shape for n, t in source.tensors.items() if n.endswith(f".{name}.weight")]
    return shapes[0][dimension] if shapes and len(shapes[0]) > dimension else None


def _olmoe(source: _Source) -> dict[str, Any]:
    return {**_experts(source, "num_experts"), "norm_topk_prob": False}


def _gemma(source: _Source) -> dict[str, Any]:
    config = source.config
    largest = config["num_hidden_layers"] == _LARGEST_GEMMA.get(source.arch)
    more: dict[str, Any] = {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"],
    }
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if source.has(key):
            more[key] = source.number(key, float)
    if (window := source.window()) is not None:
        more["sliding_window"] = window
    if source.arch in ("gemma3", "gemma-embedding"):  # the scaling, if any, is for the layers without a window
        local = {"rope_type": "default", "rope_theta": source.number("rope.freq_base_swa", float, 10000.0)}
        more["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return more


def _gemma_embedding(source: _Source) -> dict[str, Any]:
    """EmbeddingGemma: Gemma 3 that sees to both sides; its window counts both."""
    if any(name.startswith("dense_") for name in source.tensors):
        raise UnsupportedModel(
            "This GGUF file has dense layers behind its pooling (dense_2, dense_3), which are read from safetensors only. Take those."
        )
    return {**_gemma(source), "use_bidirectional_attention": True}


def _partial(source: _Source) -> dict[str, Any]:
    """The share of a head that rotates."""
    return {"partial_rotary_factor": source.number("rope.dimension_count", int, source.config["head_dim"]) / source.config["head_dim"]}


def _phi3(source: _Source) -> dict[str, Any]:
    window = source.window()
    more: dict[str, Any] = {**_partial(source), "sliding_window": window}
    if source.has("rope.scaling.original_context_length"):
        more["original_max_position_embeddings"] = source.number("rope.scaling.original_context_length", int)
    return more


def _phi2(source: _Source) -> dict[str, Any]:
    return {**_partial(source), "hidden_act": "gelu_new"}


def _starcoder2(source: _Source) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "sliding_window": source.window()}


def _gpt2(source: _Source) -> dict[str, Any]:
    return {"n_inner": source.config["intermediate_size"], "activation_function": "gelu_new"}


def _gptneox(source: _Source) -> dict[str, Any]:
    return {**_partial(source), "hidden_act": "gelu", "use_parallel_residual": source.flag("use_parallel_residual", True)}


def _falcon(source: _Source) -> dict[str, Any]:
    kv_heads, heads = source.config["num_key_value_heads"], source.config["num_attention_heads"]
    two_norms = "blk.0.attn_norm_2.weight" in source.tensors
    return {
        "new_decoder_architecture": two_norms or kv_heads not in (1, heads),
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "parallel_attn": "blk.0.ffn_norm.weight" not in source.tensors,
        "ffn_hidden_size": source.config["intermediate_size"],
    }


def _stablelm(source: _Source) -> dict[str, Any]:
    return {
        **_partial(source),
        "use_parallel_residual": source.flag("use_parallel_residual", "blk.0.ffn_norm.weight" not in source.tensors),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in source.tensors,
    }


def _command_r(source: _Source) -> dict[str, Any]:
    return {"logit_scale": source.number("logit_scale", float, 0.0625), "use_qk_norm": "blk.0.attn_q_norm.weight" in source.tensors}


def _cohere2(source: _Source) -> dict[str, Any]:
    return {"logit_scale": source.number("logit_scale", float, 0.25), "sliding_window": source.window() or 4096}


def _olmo2(source: _Source) -> dict[str, Any]:
    """Files with a window are of OLMo 3, whose layers with one do not scale their rotation."""
    if (window := source.window()) is None:
        return {}
    rope = source.config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    ropes = {"full_attention": rope, "sliding_attention": local}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window, "rope_parameters": ropes}


def _granite(source: _Source) -> dict[str, Any]:
    return {
        "attention_multiplier": source.number("attention.scale", float, source.config["head_dim"] ** -0.5),
        "embedding_multiplier": source.number("embedding_scale", float, 1.0),
        "residual_multiplier": source.number("residual_scale", float, 1.0),
        "logits_scaling": source.number("logit_scale", float, 1.0),
    }


def _granite_moe(source: _Source) -> dict[str, Any]:
    return {**_granite(source), **_experts(source, "num_local_experts")}


def _nemotron(source: _Source) -> dict[str, Any]:
    return {**_partial(source), "hidden_act": "relu2"}


def _arcee(source: _Source) -> dict[str, Any]:
    return {"hidden_act": "relu2"}


def _gpt_oss(source: _Source) -> dict[str, Any]:
    more = {**_experts(source, "num_local_experts"), "sliding_window": source.window() or 128}
    more["intermediate_size"] = source.number("expert_feed_forward_length", int, _rows(source, "ffn_gate_exps", 1))
    if source.config["rope_parameters"]["rope_type"] == "yarn":
        more["rope_parameters"] = {**source.config["rope_parameters"], "truncate": False}  # as the published config has it
    return more


_SIGMOID = 2
"""Of llama.cpp's kinds of gating; 1 is softmax."""


def _deepseek2(source: _Source) -> dict[str, Any]:
    """V2 chooses experts by a softmax, V3 by sigmoids."""
    newer = source.number("expert_gating_func", int, 1) == _SIGMOID
    latent = source.has("attention.key_length_mla")
    key = source.number("attention.key_length_mla" if latent else "attention.key_length", int)
    value = source.number("attention.value_length_mla" if latent else "attention.value_length", int)
    rotated = source.number("rope.dimension_count", int)
    if not rotated < key:
        raise CheckpointError(
            f"GGUF metadata: {source.arch}.rope.dimension_count ({rotated}) must be less than the length of a key ({key})."
        )
    groups, top_groups = source.number("expert_group_count", int, 1) or 1, source.number("expert_group_used_count", int, 1) or 1
    more: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM" if newer else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": source.config["num_attention_heads"],
        "q_lora_rank": source.number("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": source.number("attention.kv_lora_rank", int),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "n_routed_experts": source.number("expert_count", int),
        "num_experts_per_tok": source.number("expert_used_count", int),
        "moe_intermediate_size": source.number("expert_feed_forward_length", int),
        "n_shared_experts": source.number("expert_shared_count", int, 0) or None,
        "first_k_dense_replace": source.number("leading_dense_block_count", int, 0),
        "routed_scaling_factor": source.number("expert_weights_scale", float, 1.0) or 1.0,
        "norm_topk_prob": source.flag("expert_weights_norm", newer),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": top_groups,
    }
    if source.has("rope.scaling.yarn_log_multiplier"):
        # 0.1 * mscale_all_dim; all published models have mscale equal to it.
        mscale = 10 * source.number("rope.scaling.yarn_log_multiplier", float)
        more["rope_parameters"] = {**source.config["rope_parameters"], "mscale": mscale, "mscale_all_dim": mscale}
    return more


_RANKING: Final = 4
"""Of llama.cpp's kinds of pooling: a head that scores pairs."""


def _bert(source: _Source) -> dict[str, Any]:
    types = source.tensors.get("token_types.weight")
    more: dict[str, Any] = {"hidden_act": "gelu", "type_vocab_size": types.shape[0] if types is not None and len(types.shape) == 2 else 2}
    if source.number("pooling_type", int, 0) != _RANKING:
        return more
    out = source.tensors.get("cls.output.weight")
    if source.tensors and (out is None or "cls.weight" not in source.tensors):
        raise UnsupportedModel(
            "This GGUF file scores pairs (pooling type rank), but has no head of two layers (cls.weight, cls.output.weight), as those of "
            "RoBERTa have it. Take the safetensors."
        )
    names = source.metadata.get(f"{source.arch}.classifier.output_labels")
    labels = names if isinstance(names, list) else [f"LABEL_{i}" for i in range(out.shape[0] if out is not None else 1)]
    return {**more, "architectures": ["BertForSequenceClassification"], "id2label": {str(i): str(name) for i, name in enumerate(labels)}}


def _nomic_bert(source: _Source) -> dict[str, Any]:
    biased = {name.split(".")[2] for name in source.tensors if name.startswith("blk.0.") and name.endswith(".bias")}
    types = source.tensors.get("token_types.weight")
    return {
        "activation_function": "swiglu" if not source.tensors or "blk.0.ffn_gate.weight" in source.tensors else "gelu",
        "hidden_act": None,
        "type_vocab_size": types.shape[0] if types is not None and len(types.shape) == 2 else 0,
        "qkv_proj_bias": "attn_qkv" in biased,
        "mlp_fc1_bias": "ffn_up" in biased,
        "mlp_fc2_bias": "ffn_down" in biased,
        "rope_parameters": {**source.config["rope_parameters"], "rope_theta": source.number("rope.freq_base", float, 1000.0)},
    }


@dataclass(frozen=True)
class _Architecture:
    name: str
    """In transformers."""
    further: _Further = _nothing


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture("LlamaForCausalLM", _llama),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen2moe": _Architecture("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma": _Architecture("GemmaForCausalLM", _gemma),
    "gemma2": _Architecture("Gemma2ForCausalLM", _gemma),
    "gemma3": _Architecture("Gemma3ForCausalLM", _gemma),
    "gemma-embedding": _Architecture("Gemma3TextModel", _gemma_embedding),
    "phi2": _Architecture("PhiForCausalLM", _phi2),
    "phi3": _Architecture("Phi3ForCausalLM", _phi3),
    "starcoder2": _Architecture("Starcoder2ForCausalLM", _starcoder2),
    "gpt2": _Architecture("GPT2LMHeadModel", _gpt2),
    "gptneox": _Architecture("GPTNeoXForCausalLM", _gptneox),
    "falcon": _Architecture("FalconForCausalLM", _falcon),
    "stablelm": _Architecture("StableLmForCausalLM", _stablelm),
    "command-r": _Architecture("CohereForCausalLM", _command_r),
    "cohere2": _Architecture("Cohere2ForCausalLM", _cohere2),
    "olmo2": _Architecture("Olmo2ForCausalLM", _olmo2),
    "olmoe": _Architecture("OlmoeForCausalLM", _olmoe),
    "granite": _Architecture("GraniteForCausalLM", _granite),
    "granitemoe": _Architecture("GraniteMoeForCausalLM", _granite_moe),
    "deepseek2": _Architecture("DeepseekV2ForCausalLM", _deepseek2),
    "gpt-oss": _Architecture("GptOssForCausalLM", _gpt_oss),
    "smollm3": _Architecture("SmolLM3ForCausalLM"),
    "arcee": _Architecture("ArceeForCausalLM", _arcee),
    "nemotron": _Architecture("NemotronForCausalLM", _nemotron),
    "glm4": _Architecture("Glm4ForCausalLM", _partial),
    "bert": _Architecture("BertModel", _bert),
    "nomic-bert": _Architecture("NomicBertModel", _nomic_bert),
}
"""GGUF architecture -> what transformers calls it. Mistral models are published as llama, without their window."""
_WHOLE_HEADS: Final = frozenset(
    {"llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma-embedding", "smollm3", "arcee", "granite", "granitemoe"}
)
"""Where all of a head rotates, so that files without the length of a head tell it by what rotates."""
POOLING_TYPES: Final[Mapping[int, str]] = {1: "mean", 2: "cls", 3: "last"}
"""llama.cpp's numbers of what becomes of the vectors of a prompt; 0 is none, 4 (`_RANKING`) a head."""


def gguf_hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor] | None = None) -> dict[str, Any]:
    """The config.json that this model would have as a Hugging Face checkpoint, as far as the metadata tells.

    Args:
        tensors: the directory, when at hand: a model without `output.weight` shares its embedding with the head, one with
            attention biases has `attention_bias`. Without it the usual case of the architecture is assumed (the loader looks
            at the tensors in any case).

    Raises:
        UnsupportedModel: an architecture without a translation.
        CheckpointError: a required key is missing or has the wrong type.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {arch!r} is not supported. Supported: {', '.join(sorted(_ARCHITECTURES))}. Where the model is published in "
            "safetensors too, that may run."
        )
    source = _Source(arch, metadata, tensors or {})
    number = source.number
    tokens = metadata.get("tokenizer.ggml.tokens")
    heads = number("attention.head_count", int)
    hidden = number("embedding_length", int)
    if heads < 1:
        raise CheckpointError(f"GGUF metadata: {arch}.attention.head_count must be at least 1, got {heads}.")
    width = number("rope.dimension_count", int, hidden // heads) if arch in _WHOLE_HEADS else hidden // heads
    by_layer_norm = source.has("attention.layer_norm_epsilon")
    epsilon = number("attention.layer_norm_epsilon" if by_layer_norm else "attention.layer_norm_rms_epsilon", float)
    biased = any(f"blk.0.{name}.bias" in source.tensors for name in ("attn_q", "attn_qkv"))
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch].name],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length", int, 0 if source.has("expert_feed_forward_length") else None),
        "num_hidden_layers": _layers(source),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", int, heads),
        "head_dim": number("attention.key_length", int, width),
        "max_position_embeddings": number("context_length", int),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), epsilon),
        "vocab_size": number("vocab_size", int, len(tokens) if isinstance(tokens, list) else None),
        "rope_parameters": _rope_parameters(source),
        "attention_bias": arch == "qwen2" or biased,
        "tie_word_embeddings": tensors is not None and "output.weight" not in tensors,
    }
    if not config["intermediate_size"]:
        config["intermediate_size"] = number("expert_feed_forward_length", int)
    config |= _ARCHITECTURES[arch].further(_Source(arch, metadata, source.tensors, config))
    return config | _special_ids(metadata)


def _layers(source: _Source) -> int:
    """No more than there are tensors for: a damaged count would have millions of layers described before one is found missing."""
    layers: int = source.number("block_count", int)
    numbers = [name.split(".", 2)[1] for name in source.tensors if name.startswith("blk.")]
    there = 1 + max((int(n) for n in numbers if n.isdecimal()), default=-1) + int(source.number("nextn_predict_layers", int, 0))
    if numbers and layers > there:
        raise CheckpointError(
            f"GGUF metadata: {source.arch}.block_count is {layers}, but the file has the tensors of {there} layers. Download or convert "
            "it again."
        )
    return layers


def _rope_parameters(source: _Source) -> dict[str, Any]:
    metadata, arch, number = source.metadata, source.arch, source.number
    rope: dict[str, Any] = {"rope_theta": number("rope.freq_base", float, 10000.0), "rope_type": "default"}
    kind = metadata.get(f"{arch}.rope.scaling.type", "linear" if f"{arch}.rope.scale_linear" in metadata else "none")
    if kind not in ("linear", "yarn"):  # llama3 factors come as the tensor rope_freqs.weight, LongRoPE's as two
        return rope
    rope |= {"rope_type": kind, "factor": number("rope.scaling.factor", float, number("rope.scale_linear", float, 1.0))}
    if original := metadata.get(f"{arch}.rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = original
    return rope


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids. An end-of-turn token of its own ends a reply as EOS does."""
    ids: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if isinstance(value := metadata.get(f"tokenizer.ggml.{key}_token_id"), int):
            ids[name] = value
    eot = metadata.get("tokenizer.ggml.eot_token_id")
    if isinstance(eot, int) and "eos_token_id" in ids and eot != ids["eos_token_id"]:
        ids["eos_token_id"] = [ids["eos_token_id"], eot]
    return ids
