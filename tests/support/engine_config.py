"""Small engine configurations for tests of the frontend."""

from __future__ import annotations

from typing import Any

from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.config.types import DeviceInfo, EngineConfig

VOCAB_SIZE = 1000
EOS = 2


def tiny_config(*, eos: tuple[int, ...] = (EOS,), **settings: Any) -> EngineConfig:
    """Vocabulary 1000, context 512."""
    return resolve(
        EngineArgs(**settings),
        path="/nowhere",
        name="tiny",
        hf_config={"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512},
        eos_token_ids=eos,
        device=DeviceInfo("cpu", "test", 2**33, 2**33, 1),
    )
