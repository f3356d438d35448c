"""Writes GGUF files of a few kilobytes for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    kind = 8 if isinstance(value[0], str) else 6 if isinstance(value[0], float) else 4
    items = b"".join(_value(item)[4:] for item in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + items


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.eos_token_id": 2,
}


def write_gguf(path: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A GGUF file with metadata of a small llama and no tensors."""
    metadata = {**LLAMA, **(changes or {})}
    body = b"".join(_string(key) + _value(value) for key, value in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + body)
    return path
