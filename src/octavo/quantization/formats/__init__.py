"""One module a way that checkpoints store low-bit weights."""
