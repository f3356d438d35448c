"""vLLM's home of PoolingParams."""

from octavo import PoolingParams

__all__ = ["PoolingParams"]
