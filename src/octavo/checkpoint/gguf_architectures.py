"""What each of llama.cpp's architectures is: the class in transformers, and what its config has besides the sizes that all share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from octavo.checkpoint.gguf_file import GgufTensor
from octavo.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True)
class GgufSource:
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
        if value is None:
            raise CheckpointError(f"GGUF metadata: {self.arch}.{key} is missing. Download or convert the file again.")
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

    def check_heads(self, name: str, heads: int, size: int, key: str, *, fused: bool = False) -> None:
        """Before anything is made as large as `heads` times `size` say, which a damaged number may put at gigabytes.

        Args:
            name: of the matrix whose rows they are, if the file has it.
            key: what says the size of one.
            fused: the matrix has further rows, for keys and values.

        Raises:
            CheckpointError: the matrix has another number of rows.
        """
        matrix, needed = self.tensors.get(name), heads * size
        if matrix is None or len(matrix.shape) != 2:
            return
        if matrix.shape[0] < needed or (matrix.shape[0] > needed and not fused):
            raise CheckpointError(
                f"GGUF metadata: {heads} heads of {size} values ({key}) need {needed} rows, but the tensor {name} has {matrix.shape[0]}. "
                "Download or convert the file again."
            )

    def window(self) -> int | None:
        """0 is no window."""
        return self.number("attention.sliding_window", int, 0) or None


_Further = Callable[[GgufSource], dict[str, Any]]
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the model that scales attention by the width of a head's share of the hidden state; files do not say so."""


def _nothing(source: GgufSource) -> dict[str, Any]:
    return {}


def _llama(source: GgufSource) -> dict[str, Any]:
    """Mixtral files are llama files with experts."""
    if not source.number("expert_count", int, 0):
        return {}
    return {"architectures": ["MixtralForCausalLM"], **_experts(source, "num_local_experts"), "sliding_window": None}


def _experts(source: GgufSource, count: str) -> dict[str, Any]:
    return {count: source.number("expert_count", int), "num_experts_per_tok": source.number("expert_used_count", int)}


_RANKING: Final = 4
"""Of llama.cpp's kinds of pooling: a head that scores pairs."""


def _qwen3(source: GgufSource) -> dict[str, Any]:
    """A reranker's file has the head's rows for the answers yes and no beside the model."""
    if source.number("pooling_type", int, 0) != _RANKING:
        return {}
    rows, labels = source.tensors.get("cls.output.weight"), source.metadata.get(f"{source.arch}.classifier.output_labels")
    if source.tensors and (rows is None or len(rows.shape) != 2 or rows.shape[0] != 2 or labels != ["yes", "no"]):
        raise UnsupportedModel(
            "This GGUF file scores pairs (pooling type rank), but has no head for the answers yes and no (cls.output.weight), as those of "
            "Qwen3-Reranker have it. Take the safetensors."
        )
    return {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def _qwen2_moe(source: GgufSource) -> dict[str, Any]:
    return {
        **_experts(source, "num_experts"),
        "moe_intermediate_size": source.number("expert_feed_forward_length", int, _rows(source, "ffn_gate_exps", 1)),
        "shared_expert_intermediate_size": source.number("expert_shared_feed_forward_length", int, _rows(source, "ffn_gate_shexp", 0)),
        "norm_topk_prob": False,
    }


def _qwen3_moe(source: GgufSource) -> dict[str, Any]:
    size = source.number("expert_feed_forward_length", int, _rows(source, "ffn_gate_exps", 1))
    return {**_experts(source, "num_experts"), "moe_intermediate_size": size, "norm_topk_prob": True}


def _rows(source: GgufSource, name: str, dimension: int) -> int | None:
    """A size that older files leave to the tensors: of the first layer that has this one."""
    shapes = [t.shape for n, t in source.tensors.items() if n.endswith(f".{name}.weight")]
    return shapes[0][dimension] if shapes and len(shapes[0]) > dimension else None


def _olmoe(source: GgufSource) -> dict[str, Any]:
    """Weights of chosen experts are not made to sum to one: published models say so, and files cannot say otherwise."""
    return {**_experts(source, "num_experts"), "norm_topk_prob": False}


def _gemma(source: GgufSource) -> dict[str, Any]:
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


def _gemma_embedding(source: GgufSource) -> dict[str, Any]:
    """EmbeddingGemma: Gemma 3 that sees to both sides; its window counts both."""
    if any(name.startswith("dense_") for name in source.tensors):
        raise UnsupportedModel(
            "This GGUF file has dense layers behind its pooling (dense_2, dense_3), which are read from safetensors only. Take those."
        )
    return {**_gemma(source), "use_bidirectional_attention": True}


def _partial(source: GgufSource) -> dict[str, Any]:
    """The share of a head that rotates."""
    return {"partial_rotary_factor": _rotated(source) / source.config["head_dim"]}


def _rotated(source: GgufSource) -> int:
    """Values of a head that rotate."""
    head_dim: int = source.config["head_dim"]
    rotated: int = source.number("rope.dimension_count", int, head_dim)
    if rotated > head_dim:
        raise CheckpointError(
            f"GGUF metadata: {source.arch}.rope.dimension_count is {rotated}, but a head has {head_dim} values. Download or convert the file again."
        )
    return rotated


def _phi3(source: GgufSource) -> dict[str, Any]:
    window = source.window()
    more: dict[str, Any] = {**_partial(source), "sliding_window": window}
    if source.has("rope.scaling.original_context_length"):
        more["original_max_position_embeddings"] = source.number("rope.scaling.original_context_length", int)
    return more


def _phi2(source: GgufSource) -> dict[str, Any]:
    return {**_partial(source), "hidden_act": "gelu_new"}


def _starcoder2(source: GgufSource) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "sliding_window": source.window()}


def _gpt2(source: GgufSource) -> dict[str, Any]:
    return {"n_inner": source.config["intermediate_size"], "activation_function": "gelu_new"}


def _gptneox(source: GgufSource) -> dict[str, Any]:
    return {**_partial(source), "hidden_act": "gelu", "use_parallel_residual": source.flag("use_parallel_residual", True)}


def _falcon(source: GgufSource) -> dict[str, Any]:
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


def _stablelm(source: GgufSource) -> dict[str, Any]:
    return {
        **_partial(source),
        "use_parallel_residual": source.flag("use_parallel_residual", "blk.0.ffn_norm.weight" not in source.tensors),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in source.tensors,
    }


def _command_r(source: GgufSource) -> dict[str, Any]:
    return {"logit_scale": source.number("logit_scale", float, 0.0625), "use_qk_norm": "blk.0.attn_q_norm.weight" in source.tensors}


def _cohere2(source: GgufSource) -> dict[str, Any]:
    return {"logit_scale": source.number("logit_scale", float, 0.25), "sliding_window": source.window() or 4096}


def _olmo2(source: GgufSource) -> dict[str, Any]:
    """Files with a window are of OLMo 3, whose layers with one do not scale their rotation."""
    if (window := source.window()) is None:
        return {}
    rope = source.config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    ropes = {"full_attention": rope, "sliding_attention": local}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window, "rope_parameters": ropes}


def _granite(source: GgufSource) -> dict[str, Any]:
    return {
        "attention_multiplier": source.number("attention.scale", float, source.config["head_dim"] ** -0.5),
        "embedding_multiplier": source.number("embedding_scale", float, 1.0),
        "residual_multiplier": source.number("residual_scale", float, 1.0),
        "logits_scaling": source.number("logit_scale", float, 1.0),
    }


def _granite_moe(source: GgufSource) -> dict[str, Any]:
    return {**_granite(source), **_experts(source, "num_local_experts")}


def _nemotron(source: GgufSource) -> dict[str, Any]:
    return {**_partial(source), "hidden_act": "relu2"}


def _mistral3(source: GgufSource) -> dict[str, Any]:
    """Ministral 3: its rotation is stretched without being strengthened, and the scale of queries is said beside it."""
    rope = dict(source.config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        weight = source.number("rope.scaling.yarn_log_multiplier", float, 1.0)
        rope |= {"mscale": weight, "mscale_all_dim": weight} if weight else {}
    if beta := source.number("attention.temperature_scale", float, 0.0):
        rope["llama_4_scaling_beta"] = beta
    if source.number("expert_count", int, 0):
        raise UnsupportedModel("GGUF architecture 'mistral3' with experts is not supported.")
    return {"rope_parameters": rope}


def _arcee(source: GgufSource) -> dict[str, Any]:
    return {"hidden_act": "relu2"}


def _gpt_oss(source: GgufSource) -> dict[str, Any]:
    more = {**_experts(source, "num_local_experts"), "sliding_window": source.window() or 128}
    more["intermediate_size"] = source.number("expert_feed_forward_length", int, _rows(source, "ffn_gate_exps", 1))
    if source.config["rope_parameters"]["rope_type"] == "yarn":
        more["rope_parameters"] = {**source.config["rope_parameters"], "truncate": False}  # as the published config has it
    return more


def _mixture(source: GgufSource) -> dict[str, Any]:
    """Experts of which groups are chosen before, beside shared ones and behind dense layers."""
    return {
        **_experts(source, "n_routed_experts"),
        "moe_intermediate_size": source.number("expert_feed_forward_length", int),
        "n_shared_experts": source.number("expert_shared_count", int, 0) or None,
        "first_k_dense_replace": source.number("leading_dense_block_count", int, 0),
        "routed_scaling_factor": source.number("expert_weights_scale", float, 1.0) or 1.0,
        "norm_topk_prob": source.flag("expert_weights_norm", True),
        "n_group": source.number("expert_group_count", int, 1) or 1,
        "topk_group": source.number("expert_group_used_count", int, 1) or 1,
    }


_SOFTMAX, _SIGMOID = 1, 2
"""Of llama.cpp's kinds of gating; 0 and none at all leave it open."""


def _deepseek2(source: GgufSource) -> dict[str, Any]:
    """V2 chooses experts by a softmax, V3 by sigmoids and a correction. Files that do not say which are told by that."""
    corrected = any(name.endswith((".exp_probs_b", ".exp_probs_b.bias")) for name in source.tensors)
    newer = (source.number("expert_gating_func", int, 0) or (_SIGMOID if corrected else _SOFTMAX)) == _SIGMOID
    latent = source.has("attention.key_length_mla")
    key = source.number("attention.key_length_mla" if latent else "attention.key_length", int)
    value = source.number("attention.value_length_mla" if latent else "attention.value_length", int)
    rotated = source.number("rope.dimension_count", int)
    if not rotated < key:
        raise CheckpointError(
            f"GGUF metadata: {source.arch}.rope.dimension_count ({rotated}) must be less than the length of a key ({key})."
        )
    heads = source.config["num_attention_heads"]
    for name in ("blk.0.attn_q.weight", "blk.0.attn_q_b.weight"):
        source.check_heads(name, heads, key, "the length of a key")
    mixture = _mixture(source)
    more: dict[str, Any] = {
        **mixture,
        "architectures": ["DeepseekV3ForCausalLM" if newer else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": heads,
        "q_lora_rank": source.number("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": source.number("attention.kv_lora_rank", int),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "norm_topk_prob": source.flag("expert_weights_norm", newer),
        "topk_method": "group_limited_greedy" if mixture["n_group"] > 1 else "greedy",
    }
    if source.has("rope.scaling.yarn_log_multiplier"):
        # 0.1 * mscale_all_dim; all published models have mscale equal to it.
        mscale = 10 * source.number("rope.scaling.yarn_log_multiplier", float)
        more["rope_parameters"] = {**source.config["rope_parameters"], "mscale": mscale, "mscale_all_dim": mscale}
    return more


def _glm4_moe(source: GgufSource) -> dict[str, Any]:
    """The last layers of a file may be such as guess further tokens, which its count of layers includes."""
    guessing = source.number("nextn_predict_layers", int, 0)
    layers = source.config["num_hidden_layers"]
    if guessing >= layers:
        raise CheckpointError(f"GGUF metadata: {source.arch}.nextn_predict_layers ({guessing}) must be less than block_count ({layers}).")
    return {
        **_mixture(source),
        **_partial(source),
        "num_hidden_layers": layers - guessing,
        "num_nextn_predict_layers": guessing,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in source.tensors,
    }


def _minimax_m2(source: GgufSource) -> dict[str, Any]:
    return {
        **_experts(source, "num_local_experts"),
        "intermediate_size": source.number("expert_feed_forward_length", int, source.config["intermediate_size"]),
        "rotary_dim": _rotated(source),
    }


_EXAONE4_32B: Final = 64
"""Layers of the model whose files may not tell its windows."""


def _exaone4(source: GgufSource) -> dict[str, Any]:
    """Where three layers of four have a window, only those rotate."""
    layers = source.config["num_hidden_layers"]
    window = source.window() or (4096 if layers == _EXAONE4_32B else None)
    if window is None:
        return {"sliding_window": None}
    pattern = source.metadata.get(f"{source.arch}.attention.sliding_window_pattern")
    slides = pattern if isinstance(pattern, list) else [(i + 1) % 4 != 0 for i in range(layers)]
    if len(slides) < layers:
        raise CheckpointError(f"GGUF metadata: {source.arch}.attention.sliding_window_pattern must have {layers} entries.")
    return {"sliding_window": window, "layer_types": ["sliding_attention" if one else "full_attention" for one in slides[:layers]]}


def _mpt(source: GgufSource) -> dict[str, Any]:
    """Older files lack the bound of the biases where it is the usual one."""
    most = source.number("attention.max_alibi_bias", float, 8.0)
    clip = source.number("attention.clamp_kqv", float, 0.0)
    attention = {
        "alibi": most > 0,
        "alibi_bias_max": most or None,
        "clip_qkv": clip or None,
        "qk_ln": any(name.endswith(".attn_q_norm.weight") for name in source.tensors),
    }
    size, hidden = source.config["intermediate_size"], source.config["hidden_size"]
    if size % hidden:
        raise CheckpointError(
            f"GGUF metadata: {source.arch}.feed_forward_length ({size}) must be a multiple of embedding_length ({hidden})."
        )
    return {"attn_config": attention, "expansion_ratio": size // hidden}


def _bert(source: GgufSource) -> dict[str, Any]:
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


def _nomic_bert(source: GgufSource) -> dict[str, Any]:
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
class Architecture:
    name: str
    """In transformers."""
    further: _Further = _nothing


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", _llama),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2vl": Architecture("Qwen2ForCausalLM"),
    "qwen3vl": Architecture("Qwen3ForCausalLM"),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": Architecture("Qwen3ForCausalLM", _qwen3),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma": Architecture("GemmaForCausalLM", _gemma),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma),
    "gemma-embedding": Architecture("Gemma3TextModel", _gemma_embedding),
    "phi2": Architecture("PhiForCausalLM", _phi2),
    "phi3": Architecture("Phi3ForCausalLM", _phi3),
    "starcoder2": Architecture("Starcoder2ForCausalLM", _starcoder2),
    "gpt2": Architecture("GPT2LMHeadModel", _gpt2),
    "gptneox": Architecture("GPTNeoXForCausalLM", _gptneox),
    "falcon": Architecture("FalconForCausalLM", _falcon),
    "stablelm": Architecture("StableLmForCausalLM", _stablelm),
    "command-r": Architecture("CohereForCausalLM", _command_r),
    "cohere2": Architecture("Cohere2ForCausalLM", _cohere2),
    "olmo2": Architecture("Olmo2ForCausalLM", _olmo2),
    "olmoe": Architecture("OlmoeForCausalLM", _olmoe),
    "granite": Architecture("GraniteForCausalLM", _granite),
    "granitemoe": Architecture("GraniteMoeForCausalLM", _granite_moe),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", _deepseek2),
    "gpt-oss": Architecture("GptOssForCausalLM", _gpt_oss),
    "smollm3": Architecture("SmolLM3ForCausalLM"),
    "mistral3": Architecture("Ministral3ForCausalLM", _mistral3),
    "arcee": Architecture("ArceeForCausalLM", _arcee),
    "nemotron": Architecture("NemotronForCausalLM", _nemotron),
    "glm4": Architecture("Glm4ForCausalLM", _partial),
    "glm4moe": Architecture("Glm4MoeForCausalLM", _glm4_moe),
    "dots1": Architecture("Dots1ForCausalLM", _mixture),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", _minimax_m2),
    "exaone": Architecture("ExaoneForCausalLM"),
    "exaone4": Architecture("Exaone4ForCausalLM", _exaone4),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM"),
    "seed_oss": Architecture("SeedOssForCausalLM"),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "bloom": Architecture("BloomForCausalLM"),
    "mpt": Architecture("MptForCausalLM", _mpt),
    "bert": Architecture("BertModel", _bert),
    "nomic-bert": Architecture("NomicBertModel", _nomic_bert),
}
"""GGUF architecture -> what transformers calls it. Mistral models are published as llama, without their window; of the Qwen-VL models, which
read images by a file of its own, this is the language model."""
WHOLE_HEADS: Final = frozenset(
    {"llama", "mistral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma-embedding", "smollm3", "arcee", "granite", "granitemoe"}
)
"""Where all of a head rotates, so that files without the length of a head tell it by what rotates."""
STATEFUL: Final = frozenset(
    {"mamba", "mamba2", "jamba", "falcon-h1", "lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe", "plamo2", "kimi-linear"}
) | {"rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "qwen3next", "qwen35", "qwen35moe"}
"""What cannot run in any format: there is no cache for what it keeps."""
