"""vLLM's home of EngineArgs."""

from octavo import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
