"""What has to be set before anything is imported."""

from __future__ import annotations

import ctypes
import os

try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    # Read when Triton itself is imported, which other tests' libraries may do first: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
