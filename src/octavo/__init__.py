"""Octavo: LLM inference and serving with a paged KV cache."""

from octavo._version import __version__

__all__ = ["__version__"]
