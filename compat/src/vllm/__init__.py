"""vLLM's public names, answered by Octavo. Each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.version import __version__

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vllm' has no attribute {name!r} (this is Octavo's stand-in for vLLM)")
    value = getattr(importlib.import_module("octavo"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
