"""Tiny random models that pool, made with transformers, with a tokenizer: complete folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = ("a", "man", "is", "eating", "food", "bread", "the", "stock", "market", "fell", "today", "cat", "dog", "runs", "fast", "slow")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def write_tokenizer(folder: Path) -> int:
    """A word-level tokenizer that puts [CLS] and [SEP] around texts; the size of its vocabulary."""
    vocab = {token: i for i, token in enumerate((*_SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}))
    return len(vocab)


def save_pooling(folder: Path, architecture: str, **overrides: Any) -> Any:
    """Write a model of an architecture (a class of transformers) and a tokenizer; the model."""
    vocab_size = write_tokenizer(folder)
    config_class = getattr(transformers, architecture).config_class
    config = config_class(**(SIZES | {"vocab_size": vocab_size, "pad_token_id": 0} | overrides))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name.lower() and not name.endswith("bias") else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def write_modules(folder: Path, kind: str, *, normalize: bool, max_length: int | None = None) -> None:
    """sentence-transformers' files beside a model."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    if normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, f"pooling_mode_{kind}": True}))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
