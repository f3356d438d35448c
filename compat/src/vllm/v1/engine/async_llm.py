"""vLLM's newer home of AsyncLLM."""

from octavo import AsyncLLM

__all__ = ["AsyncLLM"]
