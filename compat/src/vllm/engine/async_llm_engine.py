"""vLLM's home of AsyncLLMEngine."""

from octavo import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
