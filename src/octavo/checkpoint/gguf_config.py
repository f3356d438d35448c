"""From the metadata of a GGUF file to the config.json that its model would have as a Hugging Face checkpoint.

`gguf_architectures` lists what can be read: for each of llama.cpp's architectures the class in transformers, and a function for what its
config has besides the sizes that all share. What only tensors tell (a head of its own, biases) is looked up in their directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.checkpoint.gguf_architectures import ARCHITECTURES, STATEFUL, WHOLE_HEADS, GgufSource
from octavo.checkpoint.gguf_file import GgufTensor
from octavo.errors import CheckpointError, UnsupportedModel

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
    if arch in STATEFUL:
        raise UnsupportedModel(
            f"GGUF architecture {arch!r} is not supported: its layers keep a state from token to token (Mamba, linear attention, convolutions), "
            "for which Octavo has no cache. Take another model, or run this one with llama.cpp."
        )
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {arch!r} is not supported. Supported: {', '.join(sorted(ARCHITECTURES))}. Where the model is published in "
            "safetensors too, that may run."
        )
    source = GgufSource(arch, metadata, tensors or {})
    number = source.number
    tokens = metadata.get("tokenizer.ggml.tokens")
    heads = number("attention.head_count", int)
    hidden = number("embedding_length", int)
    if heads < 1:
        raise CheckpointError(f"GGUF metadata: {arch}.attention.head_count must be at least 1, got {heads}.")
    width = number("rope.dimension_count", int, hidden // heads) if arch in WHOLE_HEADS else hidden // heads
    by_layer_norm = source.has("attention.layer_norm_epsilon")
    epsilon = number("attention.layer_norm_epsilon" if by_layer_norm else "attention.layer_norm_rms_epsilon", float)
    biased = any(f"blk.0.{name}.bias" in source.tensors for name in ("attn_q", "attn_qkv"))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch].name],
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
        "attention_bias": arch in ("qwen2", "qwen2vl") or biased,
        "tie_word_embeddings": tensors is not None and "output.weight" not in tensors,
    }
    if not config["intermediate_size"]:
        if not source.has("expert_feed_forward_length"):
            raise CheckpointError(f"GGUF metadata: {arch}.feed_forward_length must be at least 1, got 0.")
        config["intermediate_size"] = number("expert_feed_forward_length", int)
    _check_heads(source, config)
    config |= ARCHITECTURES[arch].further(GgufSource(arch, metadata, source.tensors, config))
    return config | _special_ids(metadata)


def _check_heads(source: GgufSource, config: Mapping[str, Any]) -> None:
    """Raises:
    CheckpointError: the first layer's matrices are not those of so many heads of this size.
    """
    if source.arch == "deepseek2":  # whose keys are compressed: it checks its own
        return
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    if source.has("attention.key_length"):
        key = f"{source.arch}.attention.key_length"
    elif source.arch in WHOLE_HEADS and source.has("rope.dimension_count"):
        key = f"{source.arch}.rope.dimension_count"
    else:
        key = f"{source.arch}.embedding_length / attention.head_count"
    source.check_heads("blk.0.attn_q.weight", heads, size, key)
    source.check_heads("blk.0.attn_k.weight", kv_heads, size, key)
    source.check_heads("blk.0.attn_qkv.weight", heads, size, key, fused=True)


def _layers(source: GgufSource) -> int:
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


def _rope_parameters(source: GgufSource) -> dict[str, Any]:
    metadata, arch, number = source.metadata, source.arch, source.number
    rope: dict[str, Any] = {"rope_theta": number("rope.freq_base", float, 10000.0), "rope_type": "default"}
    kind = metadata.get(f"{arch}.rope.scaling.type", "linear" if f"{arch}.rope.scale_linear" in metadata else "none")
    if kind not in ("linear", "yarn"):  # llama3 factors come as the tensor rope_freqs.weight, LongRoPE's as two
        return rope
    rope |= {"rope_type": kind, "factor": number("rope.scaling.factor", float, number("rope.scale_linear", float, 1.0))}
    if original := metadata.get(f"{arch}.rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = original
    return rope


_TURN_ENDS: Final = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "<|call|>", "<|return|>"}
)
"""Special tokens that end a turn, by whatever model; files often name one of them alone."""
_SPECIAL_TYPES: Final = (3, 4)
"""llama.cpp's kinds of tokens that have a meaning of their own: control, and those that were added."""


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids. What ends a turn or waits for a tool ends a reply as EOS does."""
    ids: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if isinstance(value := metadata.get(f"tokenizer.ggml.{key}_token_id"), int):
            ids[name] = value
    turns = _turn_ends(metadata)
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = [i for i in (*named, *turns.values()) if isinstance(i, int)]
    if "<|return|>" in turns:  # gpt-oss ends every message with <|end|>, also those before the answer
        ends = [i for i in ends if i != turns.get("<|end|>")]
    if ends:
        ids["eos_token_id"] = ends[0] if len(set(ends)) == 1 else list(dict.fromkeys(ends))
    return ids


def _turn_ends(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id of those that the vocabulary has, as special ones."""
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(types, list) or len(types) != len(tokens):
        return {}
    special = ((i, token) for i, token in enumerate(tokens) if types[i] in _SPECIAL_TYPES and isinstance(token, str))
    return {token: i for i, token in special if token in _TURN_ENDS}
