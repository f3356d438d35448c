"""The language model inside a checkpoint that also reads images: its config as if it were published alone.

Such checkpoints keep it in `text_config`, beside a vision tower and a projector, and name its tensors with a prefix of their own. What is
needed to serve text is all there. Configs may leave out what transformers has a default for; those differ by model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PREFIXES: Final = ("language_model.", "model.language_model.", "model.text_model.")
"""What older and newer checkpoints put in front of the names of its tensors."""
IGNORED: Final = (
    r"^(model\.)?(vision_tower|vision_model|vision_encoder|multi_modal_projector|embed_vision|visual|connector|audio_tower|embed_audio"
    r"|image_newline$)(\.|$)"
)
"""Regular expression of the others."""
ORIGIN: Final = "text_part_of"
"""Entry of the config that says which class it was taken out of."""
WHOLE: Final = "whole_config"
"""Entry of the config with that of the whole, for who builds the whole."""
_GEMMA3: Final[Mapping[str, Any]] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_MISTRAL: Final[Mapping[str, Any]] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_LANGUAGE_MODELS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "gemma3_text": ("Gemma3ForCausalLM", _GEMMA3),
    "mistral": ("MistralForCausalLM", _MISTRAL),
    "ministral3": ("Ministral3ForCausalLM", {**_MISTRAL, "vocab_size": 131_072, "num_hidden_layers": 34, "head_dim": 128,
                                            "max_position_embeddings": 262_144}),
    "llama": ("LlamaForCausalLM", {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
                                   "num_attention_heads": 32}),
    "qwen2": ("Qwen2ForCausalLM", {"vocab_size": 151_936}),
    "qwen3": ("Qwen3ForCausalLM", {"vocab_size": 151_936}),
    "qwen2_vl_text": ("Qwen2ForCausalLM", {"vocab_size": 152_064}),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", {"vocab_size": 152_064}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {"vocab_size": 151_936}),
}  # fmt: skip
"""By `model_type` of the text config: the class that it is alone, and transformers' defaults. Rotations by time, height and width (Qwen's)
are the usual one where all three are the same, as they are for text."""
_FLAT: Final[Mapping[str, str]] = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""`model_type`s whose first checkpoints had the language model's entries at the top."""


def reads_more_than_text(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a language model among other parts."""
    older = config.get("model_type") in _FLAT and config.get("vision_config") is not None
    return isinstance(config.get("text_config"), Mapping) or older


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the language model in `config`; None: `config` is of a language model alone, or of none.

    Where the language model has no code of ours, it keeps the name of the whole: `transformers` may be able to run that for text.
    """
    if not reads_more_than_text(config):
        return None
    text, name = config.get("text_config"), str(config["architectures"][0])
    if not isinstance(text, Mapping):
        text = {"model_type": _FLAT[str(config["model_type"])]}
    architecture, defaults = _LANGUAGE_MODELS.get(str(text.get("model_type")), (name, {}))
    outer = {key: value for key, value in config.items() if not key.endswith("_config") or key == "quantization_config"}
    # Whether the head is the embedding is for the whole to say, where it does.
    inner = {key: value for key, value in text.items() if value is not None and (key != "tie_word_embeddings" or key not in outer)}
    return {**defaults, **outer, **inner, "architectures": [architecture], ORIGIN: name, WHOLE: dict(config)}
