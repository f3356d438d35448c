"""vLLM's home of Logprob."""

from octavo import Logprob

__all__ = ["Logprob"]
