"""From checkpoint tensors to a model's parameters: every parameter filled exactly once, packed as soon as it is whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from octavo.attention.base import KvScales
from octavo.errors import CheckpointError
from octavo.models.decoder import Weights
from octavo.models.encoder_spec import EncoderSpec, encoder_parameters
from octavo.models.families.base import Target
from octavo.models.sharding import WHOLE_MODEL, Division, Piece, Shard
from octavo.models.spec import ModelSpec, Parameter, parameters
from octavo.models.tensor_names import pattern_of, unfilled
from octavo.ops.coded import CodedRows, dequantize, joined
from octavo.ops.packed import (
    DenseWeight,
    EncodedRows,
    ExpertsWeight,
    LinearWeight,
    Panels,
    PanelWeight,
    SegmentedWeight,
    added_up,
    stored_as,
)
from octavo.ops.registry import Ops
from octavo.parallel.group import ALONE, TensorGroup
from octavo.quantization.on_the_fly import OnTheFly, largest_of_rows, round_weight
from octavo.quantization.pieces import Format, tools_of
from octavo.quantization.random_codes import Storage, random_rows
from octavo.weights.arrange import flattened, reordered, stacked, transposed, with_shape
from octavo.weights.block_rows import block_rows, unpacked_rows
from octavo.weights.divide import WHOLE, divided
from octavo.weights.dummy import dummy_generator, fill_dummy
from octavo.weights.stored import StoredTensor

_COMPARED_ROWS = 8
_IGNORED = re.compile(
    r"rotary_emb\.(\w+_)?(inv_freq|cos_cached|sin_cached)$|\.masked_bias$|\.(attn|attention)\.bias$|embeddings\.position_ids$"
)
"""Buffers that older exporters saved; they follow from the config."""
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
"""What stands in front of every name where a wrapped model was saved: by data parallelism, or by a compiler."""
_KV_SCALE = re.compile(r"\.layers\.(\d{1,6})\.self_attn\.(?:(?:attn\.|[kv]_proj\.)?([kv])_scale|([kv])_proj\.output_scale)$")
"""What a float8 KV cache was calibrated with; exporters differ in where they put it."""


class Assembly:
    """The parameters of one model while they are being filled. `add` each tensor, then `finish`."""

    def __init__(
        self,
        spec: ModelSpec | EncoderSpec,
        targets: Mapping[str, Target],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shard: Shard = WHOLE_MODEL,
        group: TensorGroup = ALONE,
        prefix: str = "",
        strip: tuple[str, ...] = (),
        ignored: str | None = None,
        on_the_fly: OnTheFly | None = None,
        described_by: str = "config.json",
    ) -> None:
        """
        Args:
            shard: which share of a decoder is kept.
            group: the ranks that keep the other shares of these layers, and fill them from the same tensors in the same order.
            prefix: what checkpoints of the model without its head leave out in front of every name.
            strip: what some checkpoints put in front of every name.
            ignored: regular expression of tensors that are left out where the model has no place for them.
            on_the_fly: what full-precision weights of the layers' linear parts are rounded to.
            described_by: what says how large everything is, for messages.
        """
        self._spec = spec
        self._targets = targets
        self._prefix = prefix
        self._strip = strip
        self._rank = shard.rank
        self._group = group
        self._left_out = None if ignored is None else re.compile(ignored)
        self._ops = ops
        self._dtype = dtype
        self.device = device
        listed = parameters(spec) if isinstance(spec, ModelSpec) else encoder_parameters(spec)
        self._whole = {p.name: p for p in listed}
        """The parameters of the whole model, which is what a checkpoint has."""
        self._division = Division(spec, shard) if isinstance(spec, ModelSpec) else None
        self._parameters = self._whole if self._division is None else self._division.parameters
        """Those that are kept."""
        self._missing: dict[str, set[str | None]] = {name: unfilled(p) for name, p in self._whole.items()}
        """Parameter -> parts not yet filled; the part None is the whole of a parameter without parts."""
        self._partial: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._linears: dict[str, LinearWeight] = {}
        self._experts: dict[str, ExpertsWeight] = {}
        self._segments: dict[str, dict[int, Panels]] = {}
        """Parameter -> first row -> rows packed for a compiled decoder."""
        self._panels: dict[str, PanelWeight] = {}
        self._coded: dict[str, dict[int, CodedRows]] = {}
        """Parameter -> first row -> low-bit rows."""
        self._on_the_fly = on_the_fly
        self._described_by = described_by
        self._kv_scales: dict[int, dict[str, torch.Tensor]] = {}
        self._kv_heads = max(layer.num_kv_heads for layer in spec.layer_specs)
        self._twins: dict[str, torch.Tensor] = {}
        """First rows of the embedding and the head, where they have to be one."""
        self._kinds: dict[str, int] = {}
        """Bytes filled so far, by what they are stored as."""

    def add(self, stored: StoredTensor) -> None:
        """Copy a tensor to its place.

        Raises:
            CheckpointError: the model has no place for it, it has another shape, or its place is filled already.
        """
        name = _WRAPPERS.sub("", stored.name)
        if _IGNORED.search(name):
            return
        if (scale := _KV_SCALE.search(name)) is not None:
            self._kv_scales.setdefault(int(scale[1]), {})[scale[2] or scale[3]] = self._read_scale(stored)
            return
        pattern, numbers = pattern_of(name)
        target = self._target(pattern)
        if target is not None and target.parameter in ("embed", "head") and self._spec.tied_embeddings:
            self._compare_twins(target.parameter, stored)
        if target is not None and target.parameter == "head" and (self._spec.tied_embeddings or not self._spec.has_head):
            return  # some exporters write the shared matrix twice
        parameter = self._whole.get(target.parameter.format(**numbers)) if target is not None else None
        part = target.part.format(**numbers) if target is not None and target.part else None
        if parameter is None and self._left_out is not None and self._left_out.search(name):
            return
        if parameter is None and stored.spare and _all_zero(stored):
            return
        if target is None or parameter is None or (part is not None and part not in parameter.parts):
            if (tools := tools_of(name)) is not None:
                raise CheckpointError(
                    f"{stored.file}: tensor {stored.name} is a piece of a low-bit weight, as {tools} stores it, but {self._described_by} has "
                    "no quantization_config that says so. Take the one that was published with these weights."
                )
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name} has no place in a {self._spec.architecture} with this config "
                f"({self._spec.num_layers} layers). The weights and {self._described_by} do not belong together."
            )
        if target.transposed and stored.coded is None:  # quantisers store [outputs, inputs], whatever the model's own files have
            stored = transposed(stored)
        if parameter.kind == "experts" and len(stored.shape) == 3:
            stored = stacked(stored)
        if len(parameter.shape) == 1 and len(stored.shape) == 2 and parameter.parts:
            stored = flattened(stored)
        if target.order is not None:
            stored = reordered(stored, target.order(self._spec))
        self._fill(parameter, part, stored)

    def parameter_of(self, name: str) -> str | None:
        """The parameter that a checkpoint's tensor belongs to, with {i} for a layer; None: there is none."""
        target = self._target(pattern_of(_WRAPPERS.sub("", name))[0])
        return None if target is None else target.parameter

    def has_place_for(self, name: str) -> bool:
        """Whether a checkpoint's tensor is one of the model's parameters."""
        return self.parameter_of(name) is not None

    def _target(self, pattern: str) -> Target | None:
        bare = [pattern, *(pattern.removeprefix(prefix) for prefix in self._strip if pattern.startswith(prefix))]
        names = (name for one in bare for name in (one, self._prefix + one))
        return next((t for name in names if (t := self._targets.get(name)) is not None), None)

    def _read_scale(self, stored: StoredTensor) -> torch.Tensor:
        scale = torch.empty(stored.shape, dtype=torch.float32)
        stored.copy_into(scale)
        if scale.numel() not in (1, self._kv_heads) or not bool((scale.isfinite() & (scale > 0)).all()):
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name} is not a positive scale for each layer or for each of "
                f"{self._kv_heads} KV heads (shape {list(stored.shape)})."
            )
        return scale.reshape(-1)

    def _compare_twins(self, name: str, stored: StoredTensor) -> None:
        """Where the embedding is the head too, a head of its own in the checkpoint has to be the same. The first rows tell."""
        if len(stored.shape) != 2 or (stored.copy_region is None and stored.raw is None):
            return
        rows = torch.empty(min(_COMPARED_ROWS, stored.shape[0]), stored.shape[1], dtype=torch.float32)
        if stored.copy_region is not None:
            stored.copy_region((slice(0, len(rows)), slice(0, stored.shape[1])), rows)
        elif stored.raw is not None:
            rows.copy_(stored.raw(torch.device("cpu"))[: len(rows)])
        self._twins[name] = rows
        if len(self._twins) == 2 and not torch.equal(self._twins["embed"], self._twins["head"]):
            raise CheckpointError(
                f"{stored.file}: the output head and the embedding differ, but config.json says that they are one matrix "
                "(tie_word_embeddings true). Set it to false to use the head, or remove the head from the checkpoint."
            )

    def _fill(self, parameter: Parameter, part: str | None, stored: StoredTensor) -> None:
        start, stop = parameter.parts[part] if part else (0, parameter.shape[0])
        shape = (stop - start, *parameter.shape[1:])
        if _without_ones(stored.shape) != _without_ones(shape):
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name} has the shape {list(stored.shape)}, {self._described_by} asks for {list(shape)}."
            )
        filled: set[str | None] = {part} if part else unfilled(parameter)
        if not filled <= self._missing[parameter.name]:
            raise CheckpointError(f"{stored.file}: tensor {stored.name} fills what another tensor has filled already.")
        piece = Piece(WHOLE, part) if self._division is None else self._division.piece(parameter, part)
        if piece is not None:
            self._keep(self._parameters[parameter.name], piece, with_shape(stored, shape))
        self._missing[parameter.name] -= filled
        if not self._missing[parameter.name] and (kept := self._parameters.get(parameter.name)) is not None:
            self._complete(kept)

    def _keep(self, parameter: Parameter, piece: Piece, stored: StoredTensor) -> None:
        """Fill what a piece of a tensor fills of our own parameter."""
        start, stop = parameter.parts[piece.place] if piece.place else (0, parameter.shape[0])
        if self._packs(parameter):
            self._segments.setdefault(parameter.name, {})[start] = self._pack(parameter, stored)
            return
        kept = divided(stored, piece.part)
        if parameter.kind in ("linear", "experts") and kept.coded is not None and not piece.pad:
            self._coded.setdefault(parameter.name, {})[start] = kept.coded()
            return
        rows = self._buffer(parameter)[start:stop]
        if piece.pad < stop - start:
            kept.copy_into(rows[: stop - start - piece.pad])
            if rows.ndim == 1:
                _check_vector(rows[: stop - start - piece.pad], stored)
        if piece.pad:
            rows[-piece.pad :].zero_()

    def _buffer(self, parameter: Parameter) -> torch.Tensor:
        if parameter.name not in self._partial:
            self._partial[parameter.name] = torch.empty(
                parameter.shape, dtype=torch.float32 if parameter.kind == "exact" else self._dtype, device=self.device
            )
        return self._partial[parameter.name]

    def _packs(self, parameter: Parameter) -> bool:
        """Whether the parameter is packed for a compiled decoder, part by part and as the checkpoint has it."""
        return self._ops.decoder is not None and parameter.kind in ("linear", "embedding")

    def _pack(self, parameter: Parameter, stored: StoredTensor) -> Panels:
        kernels = self._ops.decoder
        assert kernels is not None
        rows = None if stored.encoded is None else stored.encoded()
        rounds = self._on_the_fly is not None and _can_be_rounded(parameter)
        if rows is not None and rows.encoding in kernels.encodings and not (rounds and rows.encoding in ("F32", "F16", "BF16")):
            panels = kernels.pack_rows(rows)
            if panels.finite or rows.encoding in ("F32", "F16", "BF16"):
                return panels
            if stored.coded is None:
                raise CheckpointError(f"{stored.file}: tensor {stored.name} holds scales that are NaN or infinite: it is damaged.")
        if stored.coded is not None:
            return kernels.pack_rows(block_rows(stored.coded()))
        tensor = torch.empty(stored.shape, dtype=torch.float32)
        stored.copy_into(tensor)
        if rows is not None and rows.encoding not in ("F64", "F32", "F16", "BF16"):
            return kernels.pack_rows(unpacked_rows(tensor))
        return self._pack_floats(parameter, tensor, stored.name)

    def _pack_floats(self, parameter: Parameter, tensor: torch.Tensor, source: str = "") -> Panels:
        """A float32 matrix, rounded where that was asked for."""
        assert self._ops.decoder is not None
        rounds = self._on_the_fly is not None and _can_be_rounded(parameter)
        return self._ops.decoder.pack_rows(block_rows(self._rounded(parameter, tensor, source)) if rounds else _float_rows(tensor))

    def _rounded(self, parameter: Parameter, weight: torch.Tensor, source: str = "") -> CodedRows:
        """
        Args:
            source: the tensor of the checkpoint that it is, where it is no more than one.

        Raises:
            CheckpointError: it holds NaN or infinity; names the tensor.
        """
        assert self._on_the_fly is not None
        if not bool(torch.isfinite(weight).all()):
            parts = (
                [] if source else [name for name, rows in parameter.parts.items() if not bool(torch.isfinite(weight[slice(*rows)]).all())]
            )
            name = source or self._source_name(parameter.name, parts[0] if parts else None)
            raise CheckpointError(f"The weight {name} holds NaN or infinity: it is damaged.")
        amax = largest_of_rows(weight)
        if parameter.shape[1] < self._whole[parameter.name].shape[1]:  # a row's scale is that of all its columns, as on one rank
            amax = self._group.side_by_side(amax).amax(1, keepdim=True)
        return round_weight(weight, self._on_the_fly, amax)

    def _low_bit(self, parameter: Parameter) -> LinearWeight:
        """A linear layer of which at least a part is stored in few bits."""
        coded, dense = self._coded.pop(parameter.name), self._partial.pop(parameter.name, None)
        if dense is None and (whole := joined([coded[start] for start in sorted(coded)])) is not None:
            return self._ops.pack_coded(whole, self._dtype)
        parts = []
        for start, stop in sorted(parameter.parts.values()) or [(0, parameter.shape[0])]:
            if start in coded:
                parts.append(self._ops.pack_coded(coded[start], self._dtype))
            else:
                assert dense is not None
                parts.append(self._ops.pack_linear(dense[start:stop].clone()))
        return SegmentedWeight.of(parts)

    def _complete_panels(self, parameter: Parameter) -> None:
        parts = self._segments.pop(parameter.name)
        weight = PanelWeight(tuple(parts[start] for start in sorted(parts)), *parameter.shape)
        self._panels[parameter.name] = weight
        self._count(weight)

    def _count(self, weight: torch.Tensor | LinearWeight | ExpertsWeight | PanelWeight) -> None:
        self._kinds = added_up((self._kinds, stored_as(weight)))

    def _complete_experts(self, parameter: Parameter) -> None:
        """Of which at least some are stored in few bits: packed together where they are alike, else dequantised."""
        assert self._division is not None and self._division.spec.moe is not None
        coded, count = self._coded.pop(parameter.name), self._division.spec.moe.num_experts
        dense = self._partial.pop(parameter.name, None)
        whole = joined([coded[start] for start in sorted(coded)]) if dense is None else None
        if whole is not None:
            packed = self._ops.pack_coded_experts(whole, count, self._dtype)
        else:
            dense = torch.empty(parameter.shape, dtype=self._dtype, device=self.device) if dense is None else dense
            for start, rows in coded.items():
                dense[start : start + rows.shape[0]] = dequantize(rows, self._dtype)
            packed = self._ops.pack_experts(dense.view(count, -1, parameter.shape[1]))
        self._experts[parameter.name] = packed
        self._count(packed)

    def _complete(self, parameter: Parameter) -> None:
        if self._packs(parameter):
            self._complete_panels(parameter)
            return
        if parameter.kind == "experts" and parameter.name in self._coded:
            self._complete_experts(parameter)
            return
        if parameter.name in self._coded:
            self._linears[parameter.name] = low_bit = self._low_bit(parameter)
            self._count(low_bit)
            return
        tensor = self._partial.pop(parameter.name)
        if parameter.kind == "norm" and self._spec.norm_unit_offset:
            tensor += 1.0
        if parameter.kind == "experts":
            assert self._division is not None and self._division.spec.moe is not None
            packed_experts = self._ops.pack_experts(tensor.view(self._division.spec.moe.num_experts, -1, parameter.shape[1]))
            self._experts[parameter.name] = packed_experts
            self._count(packed_experts)
            return
        if parameter.kind != "linear":
            self._tensors[parameter.name] = tensor
            self._count(tensor)
        if parameter.kind == "linear" or (parameter.name == "embed" and self._spec.tied_embeddings and self._spec.has_head):
            name = "head" if parameter.name == "embed" else parameter.name
            if self._on_the_fly is not None and _can_be_rounded(parameter):
                packed = self._ops.pack_coded(self._rounded(parameter, tensor), self._dtype)
            else:
                packed = self._ops.pack_linear(tensor)
            self._linears[name] = packed
            shared = isinstance(packed, DenseWeight) and packed.data is tensor and parameter.kind != "linear"
            if not shared:
                self._count(packed)

    def fill_dummy(self, seed: int, form: Format | None = None) -> Iterator[int]:
        """Fill every parameter with random values; yields the bytes of the weights made so far.

        Args:
            form: what the layers' weights are stored as; None: in full precision.
        """
        for parameter in self._parameters.values():
            divided_up = parameter.shape != self._whole[parameter.name].shape
            own_seed = seed + self._rank if divided_up else seed
            for start, stop, storage in self._made_up(parameter, form):
                if storage is None:
                    self._fill_dummy_rows(parameter, start, stop, own_seed)
                else:
                    own, shared = (dummy_generator(f"{parameter.name}:{name}", own_seed, self.device) for name in (start, "order"))
                    self._keep_coded(parameter, start, random_rows(storage, stop - start, parameter.shape[1], own, shared))
            if self._packs(parameter):
                self._partial.pop(parameter.name, None)
            self._complete(parameter)
            yield sum(self._kinds.values())
        for missing in self._missing.values():
            missing.clear()

    def _made_up(self, parameter: Parameter, form: Format | None) -> list[tuple[int, int, Storage | None]]:
        """Rows [start, stop) of a parameter, and what they are stored as. Experts are alike; parts of other layers need not be."""
        whole = (0, parameter.shape[0])
        if form is None or not (parameter.kind == "experts" or _can_be_rounded(parameter)):
            return [(*whole, None)]

        def storage_of(part: str | None, start: int, stop: int) -> Storage | None:
            columns = self._whole[parameter.name].shape[1]  # checkpoints know nothing of ranks
            return form.storage(self._source_name(parameter.name, part).removesuffix(".weight"), (stop - start, columns))

        if parameter.kind == "experts" or not parameter.parts:
            return [(*whole, storage_of(next(iter(parameter.parts), None), *whole))]
        parts = [(start, stop, storage_of(name, start, stop)) for name, (start, stop) in parameter.parts.items()]
        return [(*whole, None)] if all(storage is None for *_, storage in parts) else sorted(parts, key=lambda part: part[0])

    def _fill_dummy_rows(self, parameter: Parameter, start: int, stop: int, seed: int) -> None:
        rows = self._buffer(parameter)[start:stop]
        fill_dummy(parameter.name if not start else f"{parameter.name}:{start}", parameter.kind, rows, seed)
        if parameter.kind == "norm" and self._spec.norm_unit_offset:
            rows -= 1.0
        if self._packs(parameter):
            self._segments.setdefault(parameter.name, {})[start] = self._pack_floats(parameter, rows)

    def _keep_coded(self, parameter: Parameter, start: int, rows: CodedRows) -> None:
        if self._packs(parameter):
            assert self._ops.decoder is not None
            self._segments.setdefault(parameter.name, {})[start] = self._ops.decoder.pack_rows(block_rows(rows))
        else:
            self._coded.setdefault(parameter.name, {})[start] = rows

    def finish(self) -> Weights:
        """The filled parameters.

        Raises:
            CheckpointError: some are missing; names them as the checkpoint should have called them.
        """
        missing = [(name, part) for name, parts in self._missing.items() for part in parts]
        if missing:
            names = [self._source_name(name, part) for name, part in missing[:4]]
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise CheckpointError(
                f"The checkpoint lacks {', '.join(names)}{more}. Is the download complete, and does {self._described_by} belong to it?"
            )
        return Weights(self._tensors, self._linears, self._panels, self._kinds, self._complete_scales(), self._experts)

    def _complete_scales(self) -> dict[int, KvScales]:
        """Of the layers that have both; k and v have as many numbers, of the heads that are kept."""
        heads = self._kv_heads
        kept = None if self._division is None else torch.from_numpy(self._division.kv_heads)
        scales = {}
        layers = range(self._spec.num_layers) if self._division is None else self._division.shard.layers(self._spec.num_layers)
        for layer, found in self._kv_scales.items():
            if layer in layers and found.keys() == {"k", "v"}:
                k, v = found["k"], found["v"]
                if k.numel() != v.numel():
                    k, v = k.expand(heads).contiguous(), v.expand(heads).contiguous()
                if kept is not None and k.numel() == heads:
                    k, v = k[kept], v[kept]
                scales[layer - layers.start] = KvScales(k, v)
        return scales

    def _source_name(self, name: str, part: str | None) -> str:
        """What the checkpoint should have called it."""
        for source, target in self._targets.items():
            wanted = re.escape(f"{target.parameter}|{target.part}")
            pattern = wanted.replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
            if (match := re.fullmatch(pattern, f"{name}|{part}")) is not None:
                return source.format(**match.groupdict())
        return name


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _check_vector(vector: torch.Tensor, stored: StoredTensor) -> None:
    """A norm or a bias that is no number makes every request fail: it costs next to nothing to look, unlike at matrices.

    Raises:
        CheckpointError: it holds NaN or infinity.
    """
    if vector.is_meta or bool(torch.isfinite(vector).all()):
        return
    if vector.dtype is torch.float16 and not bool(torch.isnan(vector).any()):
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name} holds numbers that are infinite in float16: it is damaged, or needs another --dtype."
        )
    raise CheckpointError(f"{stored.file}: tensor {stored.name} holds NaN or infinity: it is damaged.")


def _float_rows(tensor: torch.Tensor) -> EncodedRows:
    """A float32 matrix as rows to be packed."""
    rows, columns = tensor.shape
    return EncodedRows("F32", (rows, columns), np.asarray(tensor.view(torch.uint8)), unpacked=True)


def _can_be_rounded(parameter: Parameter) -> bool:
    """Whether a parameter is one that loses little in 8 bits: the head and what routes between experts choose, and stay."""
    return parameter.kind == "linear" and not parameter.name.startswith(("head", "classifier")) and "router" not in parameter.name


def _all_zero(stored: StoredTensor) -> bool:
    tensor = torch.empty(stored.shape, dtype=torch.float32)
    stored.copy_into(tensor)
    return not bool(tensor.any())
