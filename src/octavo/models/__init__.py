"""Architectures: what a model is (`spec`), the one decoder, and the families that turn a checkpoint's config into a spec."""
