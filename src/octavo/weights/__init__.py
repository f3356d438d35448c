"""Tensors out of checkpoints, one at a time, straight into the parameter where they stay."""
