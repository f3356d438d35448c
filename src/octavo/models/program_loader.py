"""The plain case without torch: a GGUF file whose matrices are stored as the compiled kernels take them, whole, on one rank.

Anything else, and anything that is wrong with the file, is left to `loader`, which also knows what to say of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from octavo.checkpoint import text_part
from octavo.checkpoint.gguf_file import ROPE_DIVISORS, GgufFile, GgufTensor
from octavo.config.home import packed_dir
from octavo.config.types import EngineConfig
from octavo.models.families.base import Family
from octavo.models.gguf_model import gguf_spec, open_header, runs_through_transformers
from octavo.models.program import compilable, describe
from octavo.models.spec import ModelSpec, Parameter, parameters
from octavo.models.tensor_names import pattern_of, unfilled
from octavo.ops.packed import EncodedRows, Panels, PanelWeight, added_up, stored_as
from octavo.ops.program import DecoderKernels, DecoderProgram, Float32
from octavo.weights.gguf_bytes import GgufBytes, unread_rows

Progress = Callable[[str, int, int], None]
"""(phase, done, total), in bytes of the checkpoint."""

CheckRoom = Callable[[ModelSpec, dict[str, int]], None]
"""(spec, bytes of weights by what they are stored as); raises what is to be raised."""

_FLOATS = {"F32": np.float32, "F16": np.float16}
"""What vectors may be stored as."""


class _NotPlain(Exception):
    """Left to `loader`."""


@dataclass(frozen=True)
class LoadedProgram:
    """A decoder with its weights in memory."""

    spec: ModelSpec
    program: DecoderProgram
    kinds: dict[str, int]
    """Bytes in memory by what they are stored as."""


def load_program(
    config: EngineConfig, kernels: DecoderKernels, progress: Progress, check_room: CheckRoom = lambda spec, kinds: None
) -> LoadedProgram | None:
    """The model of `config`; None where it is not the plain case.

    Args:
        check_room: called when the weights are there, and before the tables of all positions are made: those of a length for which there
            is no cache take minutes and gigabytes.

    Raises:
        CheckpointError, ConfigError, UnsupportedModel: the file cannot be read, or its model does not run here.
    """
    if not _plain_settings(config) or (gguf := open_header(config)) is None:
        return None
    spec, family = gguf_spec(config.model.hf_config, gguf)
    spec = spec.up_to(config.model.max_model_len)
    if not compilable(spec) or _bytes_needed(gguf, kernels) > config.device.total_bytes:
        return None
    weights = _Weights(spec, family, gguf)
    try:
        weights.check_types(kernels.encodings)
        with _packer(config, kernels, gguf) as pack_rows:
            weights.fill(pack_rows, progress)
    except _NotPlain:
        return None
    kinds = added_up([*map(stored_as, weights.arrays.values()), *map(stored_as, weights.panels.values())])
    check_room(spec, kinds)
    program = describe(spec, weights.arrays, weights.panels, config.model.max_model_len)
    return LoadedProgram(spec, program, kinds)


def _plain_settings(config: EngineConfig) -> bool:
    model = config.model
    return (
        bool(config.device.native_kernels)
        and config.device.kind == "cpu"
        and config.parallel.world == 1
        and model.dtype == "float32"
        and config.cache.dtype in ("float16", "float32")
        and model.pooling is None
        and model.quantization is None
        and model.load_format != "dummy"
        and text_part.ORIGIN not in model.hf_config
        and not runs_through_transformers(config)
    )


def _bytes_needed(gguf: GgufFile, kernels: DecoderKernels) -> float:
    return sum(kernels.encodings.get(t.type, 32.0) / 8 * math.prod(t.shape) for t in gguf.tensors.values())


def _packer(config: EngineConfig, kernels: DecoderKernels, gguf: GgufFile) -> AbstractContextManager[Callable[[EncodedRows], Panels]]:
    if config.device.share_weights and kernels.shared_rows is not None:
        return kernels.shared_rows(packed_dir(), gguf.path, gguf.data_offset)
    return nullcontext(kernels.pack_rows)


@dataclass
class _Weights:
    """Parameters while they are being filled; see `Assembly`, which does the same for every model and device."""

    spec: ModelSpec
    family: Family
    gguf: GgufFile
    arrays: dict[str, Float32] = field(default_factory=dict)
    """Norms and biases."""
    panels: dict[str, PanelWeight] = field(default_factory=dict)

    def check_types(self, encodings: Collection[str]) -> None:
        """Raises:
        _NotPlain: a tensor is stored in a way that needs more than these kernels.
        """
        for tensor in self.gguf.tensors.values():
            if tensor.type not in (encodings if len(tensor.shape) == 2 else _FLOATS) or len(tensor.shape) > 2:
                raise _NotPlain

    def fill(self, pack_rows: Callable[[EncodedRows], Panels], progress: Progress) -> None:
        """Raises:
        _NotPlain: the tensors are not those of the spec, or hold what is no number.
        CheckpointError: the file cannot be read, or has been cut short.
        """
        data = GgufBytes(self.gguf)
        listed = {p.name: p for p in parameters(self.spec)}
        missing = {name: unfilled(p) for name, p in listed.items()}
        segments: dict[str, dict[int, Panels]] = {}
        total, done = sum(t.nbytes for t in self.gguf.tensors.values()), 0
        progress("weights", 0, total)
        for tensor in self.gguf.tensors.values():
            if tensor.name not in ROPE_DIVISORS:
                self._place(tensor, data, listed, missing, segments, pack_rows)
            done += tensor.nbytes
            progress("weights", done, total)
        if any(missing.values()):
            raise _NotPlain
        for name, parts in segments.items():
            rows, columns = listed[name].shape
            self.panels[name] = PanelWeight(tuple(parts[start] for start in sorted(parts)), rows, columns)

    def _place(
        self,
        tensor: GgufTensor,
        data: GgufBytes,
        listed: dict[str, Parameter],
        missing: dict[str, set[str | None]],
        segments: dict[str, dict[int, Panels]],
        pack_rows: Callable[[EncodedRows], Panels],
    ) -> None:
        pattern, numbers = pattern_of(tensor.name)
        target = self.family.weights.get(pattern)
        if target is None or target.transposed:
            raise _NotPlain
        if target.parameter == "head" and (self.spec.tied_embeddings or not self.spec.has_head):
            return
        parameter = listed.get(target.parameter.format(**numbers))
        part = target.part.format(**numbers) if target.part else None
        if parameter is None or (part is not None and part not in parameter.parts):
            raise _NotPlain
        start, stop = parameter.parts[part] if part else (0, parameter.shape[0])
        filled = {part} if part else unfilled(parameter)
        if tensor.shape != (stop - start, *parameter.shape[1:]) or not filled <= missing[parameter.name]:
            raise _NotPlain
        missing[parameter.name] -= filled
        order = None if target.order is None else target.order(self.spec)
        if order is not None and len(order) != stop - start:
            raise _NotPlain
        if parameter.kind in ("linear", "embedding"):
            panels = pack_rows(unread_rows(data, tensor, (stop - start, parameter.shape[1]), order))
            if not panels.finite:
                raise _NotPlain
            segments.setdefault(parameter.name, {})[start] = panels
        elif len(tensor.shape) == 1:
            whole = self.arrays.setdefault(parameter.name, np.empty(parameter.shape, np.float32))
            vector = data.read(tensor.name, tensor.offset, tensor.nbytes).view(_FLOATS[tensor.type]).astype(np.float32)
            if not np.isfinite(vector).all():
                raise _NotPlain
            whole[start:stop] = vector if order is None else vector[order]
        else:
            raise _NotPlain
