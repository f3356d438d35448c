"""The language model inside a checkpoint that also reads images: its config as if it were published alone.

Such checkpoints keep it in `text_config`, beside a vision tower and a projector, and name its tensors with a prefix of their own. What is
needed to serve text is all there. Configs may leave out what transformers has a default for; those differ by model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.errors import UnsupportedModel

PREFIXES: Final = ("language_model.", "model.language_model.")
"""What older and newer checkpoints put in front of the names of its tensors."""
IGNORED: Final = r"^(model\.)?(vision_tower|vision_model|vision_encoder|multi_modal_projector|embed_vision)\."
"""Regular expression of the others."""
ORIGIN: Final = "text_part_of"
"""Entry of the config that says which class it was taken out of."""
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
    "llama": ("LlamaForCausalLM", {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
                                   "num_attention_heads": 32}),
    "qwen2": ("Qwen2ForCausalLM", {"vocab_size": 151_936}),
    "qwen3": ("Qwen3ForCausalLM", {"vocab_size": 151_936}),
}  # fmt: skip
"""By `model_type` of the text config: the class that it is alone, and transformers' defaults."""


def text_part(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any] | None:
    """The config of the language model in `config`; None: `config` is not of a model that reads images.

    Raises:
        UnsupportedModel: it is, and its language model is of a kind that is not known.
    """
    text, name = config.get("text_config"), str(config["architectures"][0])
    if "vision_config" not in config or not name.endswith("ForConditionalGeneration"):
        return None
    kind = str(text.get("model_type")) if isinstance(text, Mapping) else ""
    if not isinstance(text, Mapping) or kind not in _LANGUAGE_MODELS:
        raise UnsupportedModel(
            f"{where}: {name} reads images, and its language model ({kind!r}) has no code in Octavo. Of models that read images, the language "
            f"model is served where its text_config is of {', '.join(_LANGUAGE_MODELS)}."
        )
    architecture, defaults = _LANGUAGE_MODELS[kind]
    outer = {key: value for key, value in config.items() if not key.endswith("_config") or key == "quantization_config"}
    # Whether the head is the embedding is for the whole to say, where it does.
    inner = {key: value for key, value in text.items() if value is not None and (key != "tie_word_embeddings" or key not in outer)}
    return {**defaults, **outer, **inner, "architectures": [architecture], ORIGIN: name}
