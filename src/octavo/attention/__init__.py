"""Attention over the paged KV cache: one protocol, one file a backend."""
