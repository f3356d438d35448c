"""What a CPU does better than plain torch.

Everywhere: linear layers with weights laid out once, at load, for oneDNN. Where the compiled kernels were built: whole forward
passes over weights that stay as small as the checkpoint has them, and paged attention to go with them.
"""

from __future__ import annotations

import functools
from typing import Any

from octavo.config.device import native_kernels_problem, native_kernels_remedy
from octavo.config.types import CpuActivations
from octavo.errors import ConfigError
from octavo.ops.program import CompiledDecoder, DecoderKernels, DecoderProgram


def overrides() -> dict[str, Any]:
    """Operation name -> implementation. Empty where this torch has no oneDNN."""
    from octavo.ops.cpu import experts, linear

    if not linear.available():
        return {}
    return {
        "pack_linear": linear.pack_linear,
        "pack_coded": linear.pack_coded,
        "linear": linear.linear,
        "pack_experts": experts.pack_experts,
        "pack_coded_experts": experts.pack_coded_experts,
        "experts": experts.experts,
        "keeps_low_bit": False,
    }


def decoder_kernels() -> DecoderKernels:
    """The compiled kernels.

    Raises:
        ConfigError: they were not built.
    """
    from octavo.ops.cpu import abi, panels
    from octavo.ops.cpu.panel_file import panel_file

    if abi.library() is None:
        raise ConfigError(
            f"There are no compiled CPU kernels: {native_kernels_problem()}. {native_kernels_remedy()}, or use --cpu-kernels torch."
        )
    shared = functools.partial(panel_file, pack=panels.pack_rows, packed_bytes=panels.packed_bytes)
    return DecoderKernels(panels.pack_rows, {name: abi.PANEL_BITS[kind] for name, (_, kind) in abi.SOURCES.items()}, _compile, shared)


def _compile(program: DecoderProgram, *, threads: int, activations: CpuActivations) -> CompiledDecoder:
    from octavo.ops.cpu.cpu_program import CpuProgram
    from octavo.ops.cpu.decoder import CpuDecoder

    return CpuDecoder(CpuProgram(program, threads=threads, activations=activations))
