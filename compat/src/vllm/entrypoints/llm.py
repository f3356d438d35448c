"""vLLM's home of LLM."""

from octavo import LLM

__all__ = ["LLM"]
