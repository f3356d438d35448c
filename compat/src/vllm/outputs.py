"""vLLM's home of the result classes."""

from octavo import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
