"""What a CPU does better than plain torch.

Everywhere: linear layers with weights laid out once, at load, for oneDNN. Where the compiled kernels were built: whole forward
passes over weights that stay as small as the checkpoint has them, and paged attention to go with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config.types import CpuActivations
from octavo.errors import ConfigError
from octavo.ops.program import DecoderKernels, DecoderProgram

if TYPE_CHECKING:
    from octavo.ops.packed import EncodedRows, Panels


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
    from octavo.ops.cpu import abi
    from octavo.ops.cpu.cpu_program import CpuProgram
    from octavo.ops.cpu.decoder import CpuDecoder

    if abi.library() is None:
        raise ConfigError("The compiled CPU kernels are not there. Reinstall Octavo with a C++ compiler, or use --cpu-kernels torch.")

    def compile_decoder(program: DecoderProgram, *, threads: int, activations: CpuActivations) -> CpuDecoder:
        return CpuDecoder(CpuProgram(program, threads=threads, activations=activations))

    return DecoderKernels(packer(), frozenset(abi.SOURCES), compile_decoder, shared_packer())


def packer() -> Callable[[EncodedRows], Panels]:
    """See `DecoderKernels.pack_rows`."""
    from octavo.ops.cpu import panels

    return panels.pack_rows


def shared_packer() -> Callable[[Path, str, int], AbstractContextManager[Callable[[EncodedRows], Panels]]]:
    """See `DecoderKernels.shared_rows`."""
    from octavo.ops.cpu import panels
    from octavo.ops.cpu.panel_file import panel_file

    return functools.partial(panel_file, pack=panels.pack_rows, packed_bytes=panels.packed_bytes)
