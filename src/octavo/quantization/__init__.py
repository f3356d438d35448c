"""Low-bit weights: how checkpoints store them, read into `ops.coded.CodedRows`. Kernels know nothing of formats."""
