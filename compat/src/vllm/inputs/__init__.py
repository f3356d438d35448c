"""vLLM's home of the prompt types."""

from octavo import TextPrompt, TokensPrompt

__all__ = ["TextPrompt", "TokensPrompt"]
