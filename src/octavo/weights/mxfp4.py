"""gpt-oss's experts: 4-bit floating point in runs of 32 with a power of two each (OCP Microscaling)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from octavo.errors import CheckpointError
from octavo.ops.coded import CodedRows, dequantize
from octavo.quantization.formats.compressed_tensors import MXFP4_RUN, float4_rows, powers_of_two
from octavo.weights.stored import StoredTensor

_BLOCKS, _SCALES = "_blocks", "_scales"


def has_packed_experts(names: Iterable[str]) -> bool:
    """Whether any experts are stored so."""
    return any(".experts." in name and name.endswith(_BLOCKS) for name in names)


def whole_experts(tensors: Iterable[StoredTensor], device: torch.device) -> Iterator[StoredTensor]:
    """Each tensor as it is, or instead of blocks and scales the experts' matrices under an unquantised checkpoint's name.

    Raises:
        CheckpointError: blocks without scales, or of another shape.
    """
    held: dict[str, StoredTensor] = {}
    for stored in tensors:
        base = stored.name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if base == stored.name or ".experts." not in base:
            yield stored
        elif base not in held:
            held[base] = _in_memory(stored, device)
        else:
            pair = {held[base].name: held.pop(base), stored.name: stored}
            if pair.keys() != {base + _BLOCKS, base + _SCALES}:
                raise CheckpointError(f"{stored.file}: tensor {stored.name} is there twice.")
            yield _joined(base, pair[base + _BLOCKS], pair[base + _SCALES], device)
    if held:
        lone = next(iter(held.values()))
        other = _SCALES if lone.name.endswith(_BLOCKS) else _BLOCKS
        raise CheckpointError(f"{lone.file}: tensor {lone.name} is there without {next(iter(held))}{other}. Is the download complete?")


def _in_memory(stored: StoredTensor, device: torch.device) -> StoredTensor:
    """The same, read now: its file may be closed when the other half comes."""
    tensor = _read(stored, device)
    return StoredTensor(stored.name, stored.shape, stored.nbytes, stored.file, stored.copy_into, raw=lambda _: tensor, dtype=tensor.dtype)


def _read(stored: StoredTensor, device: torch.device) -> torch.Tensor:
    if stored.raw is None or stored.dtype != torch.uint8:
        raise CheckpointError(f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}; it must be uint8.")
    return stored.raw(device)


def _joined(name: str, blocks: StoredTensor, scales: StoredTensor, device: torch.device) -> StoredTensor:
    """[experts * outputs, inputs], from [experts, outputs, runs, 16] bytes and [experts, outputs, runs] exponents."""
    if len(blocks.shape) != 4 or blocks.shape[3] != MXFP4_RUN // 2 or blocks.shape[:3] != scales.shape:
        raise CheckpointError(
            f"{blocks.file}: tensor {blocks.name} has the shape {list(blocks.shape)} and {scales.name} {list(scales.shape)}; they must be "
            "[experts, outputs, runs, 16] and [experts, outputs, runs]."
        )
    octets, exponents = _read(blocks, device).flatten(0, 1).flatten(1), _read(scales, device).flatten(0, 1)
    if bool((exponents == 255).any()):
        raise CheckpointError(f"{scales.file}: tensor {scales.name} holds scales that are not a number.")
    experts = scales.shape[0]

    def coded() -> CodedRows:
        return float4_rows(octets, powers_of_two(exponents), MXFP4_RUN)

    def copy_into(destination: torch.Tensor) -> None:
        target, rows = destination.view(octets.shape[0], -1), coded()
        step = octets.shape[0] // experts
        for start in range(0, len(target), step):  # an expert at a time: its float32 is eight times its codes
            target[start : start + step].copy_(dequantize(rows.narrow_rows(start, start + step)))

    shape = (octets.shape[0], octets.shape[1] * 2)
    return StoredTensor(name, shape, blocks.nbytes + scales.nbytes, blocks.file, copy_into, coded=coded)
