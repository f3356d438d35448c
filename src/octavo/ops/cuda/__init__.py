"""Kernels in CUDA C++ for what Triton's tiles do not express: operands of the tensor cores made lane by lane, in registers, and warps
with different work, some of which copy far ahead of those that compute.

Compiled at run time by NVRTC, which comes with torch; without it (or a GPU) Triton's kernels do the same, slower.
"""
