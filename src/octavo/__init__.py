"""Octavo: LLM inference and serving with a paged KV cache.

The public names. Each is imported when it is first used: `import octavo` itself costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo._version import __version__

if TYPE_CHECKING:
    from octavo.config.args import EngineArgs
    from octavo.errors import (
        CheckpointError,
        ConfigError,
        EngineDead,
        InvalidRequest,
        ModelNotFound,
        NotYet,
        OctavoError,
        Overloaded,
        RequestFailed,
        UnsupportedModel,
    )
    from octavo.frontend.async_llm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine
    from octavo.frontend.llm import LLM
    from octavo.frontend.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
    from octavo.frontend.prompts import TextPrompt, TokensPrompt
    from octavo.protocol.params import (
        BeamSearchParams,
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

_HOME = {
    "octavo.config.args": ("EngineArgs",),
    "octavo.errors": (
        "CheckpointError",
        "ConfigError",
        "EngineDead",
        "InvalidRequest",
        "ModelNotFound",
        "NotYet",
        "OctavoError",
        "Overloaded",
        "RequestFailed",
        "UnsupportedModel",
    ),
    "octavo.frontend.async_llm": ("AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine"),
    "octavo.frontend.llm": ("LLM",),
    "octavo.frontend.outputs": ("BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "RequestOutput"),
    "octavo.frontend.prompts": ("TextPrompt", "TokensPrompt"),
    "octavo.protocol.params": (
        "BeamSearchParams",
        "PoolingParams",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineDead",
    "InvalidRequest",
    "Logprob",
    "ModelNotFound",
    "NotYet",
    "OctavoError",
    "Overloaded",
    "PoolingParams",
    "RequestFailed",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedModel",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
