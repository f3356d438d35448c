"""compressed-tensors (what llmcompressor writes): groups of modules, each with a scheme for weights and one for inputs.

Layouts: pack-quantized (4- and 8-bit integers in int32 words), int-quantized, float-quantized, naive-quantized, and the 4-bit
floating-point nvfp4- and mxfp4-pack-quantized.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.ops.coded import AS_THEY_ARE, ActivationKind, Activations, CodedRows
from octavo.quantization.formats.fp8 import activation_format, float8_codes
from octavo.quantization.formats.gptq import group_index
from octavo.quantization.pieces import Format, Pieces, groups_of, in_groups, unpacked
from octavo.quantization.random_codes import Storage, everywhere
from octavo.quantization.settings import Settings

_PACKED, _NVFP4, _MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_LAYOUTS = (_PACKED, "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", _NVFP4, _MXFP4)
_NAMES = frozenset(
    (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
    )
)
_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
"""Whether groups follow the order of activations; `weight` and `static` change the calibration alone."""
_MARKS = frozenset(("weight_packed", "weight_scale"))
_IGNORED = frozenset(("input_global_scale", "output_zero_point"))
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes of 4-bit floating point (e2m1) stand for; those from 8 on are negative."""
MXFP4_RUN = 32
FP4_TABLE = (*FP4, *(-value for value in FP4))


@dataclass(frozen=True)
class Scheme:
    """How the modules of one group are stored."""

    targets: tuple[str, ...]
    bits: int
    kind: str
    strategy: str
    group: int
    symmetric: bool
    blocks: tuple[int, int] | None
    inputs: str
    """none, dynamic or static."""
    layout: str
    order: bool
    """Groups follow the order of activations."""


def compressed_tensors(settings: Settings) -> Format:
    """
    Raises:
        UnsupportedModel: sparsity, rotations, or a scheme that is not known.
    """
    sparsity = settings.section("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModel(f"{settings.where}: sparsity format {sparsity!r} is not supported. Take a checkpoint without sparsity.")
    if settings.section("transform_config").values.get("config_groups"):
        raise UnsupportedModel(f"{settings.where}: transform_config asks for rotations of activations, which are not supported.")
    layout = settings.text("format", "naive-quantized")
    groups = settings.section("config_groups")
    schemes = [_scheme(groups.section(name), layout) for name in groups.values]
    if not schemes:
        raise settings.fail("config_groups", "at least one group of modules")
    left_out = settings.strings("ignore")

    stored_as = {scheme: everywhere(_storage(scheme), left_out) for scheme in schemes}

    def made_up(module: str, shape: tuple[int, int]) -> Storage | None:
        return stored_as[_scheme_of(module, schemes)](module, shape)

    def read(pieces: Pieces) -> CodedRows:
        return _read(pieces, _scheme_of(pieces.module, schemes))

    return Format("compressed-tensors", _NAMES, _MARKS, read, made_up, _IGNORED, "weight_scale")


def _scheme(group: Settings, usual_layout: str) -> Scheme:
    weights, inputs = group.section("weights"), group.section("input_activations")
    kind, strategy, bits = weights.text("type", "int"), weights.text("strategy", "tensor"), weights.integer("num_bits", default=8)
    layout = group.text("format", usual_layout)
    if layout not in _LAYOUTS:
        raise UnsupportedModel(f"{group.where}: format {layout!r} is not supported. Supported: {', '.join(_LAYOUTS)}.")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8), ("float", 4)):
        raise UnsupportedModel(f"{weights.where}: {bits}-bit {kind} weights are not supported. Supported: 4- and 8-bit int and float.")
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        raise UnsupportedModel(f"{weights.where}: strategy {strategy!r} is not supported.")
    blocks = weights.block_size("block_structure") if strategy == "block" else None
    if strategy == "block" and blocks is None:
        raise weights.fail("block_structure", "two numbers greater than 0: rows and columns of a block")
    if inputs.values.get("dynamic") not in (None, True, False, "local"):
        raise inputs.fail("dynamic", 'true, false or "local"')
    rounded = "none"
    if inputs.values and inputs.flag("symmetric", True) and inputs.integer("num_bits", default=8) == 8:
        rounded = "none" if inputs.text("type", "int") != kind else "dynamic" if inputs.values.get("dynamic") else "static"
    return Scheme(
        targets=group.strings("targets"),
        bits=bits,
        kind=kind,
        strategy=strategy,
        group=weights.group_size("group_size") if strategy in ("group", "tensor_group") else -1,
        symmetric=weights.flag("symmetric", True),
        blocks=blocks,
        inputs=rounded,
        layout=layout,
        order=_follows_activations(weights),
    )


def _follows_activations(weights: Settings) -> bool:
    """
    Raises:
        CheckpointError: an order that is none of the tool's.
    """
    order = weights.values.get("actorder")
    if order is None or isinstance(order, bool):
        return bool(order)
    if (name := weights.text("actorder", "")) not in _ORDERS:
        raise weights.fail("actorder", "true, false, " + ", ".join(_ORDERS))
    return _ORDERS[name]


def _scheme_of(module: str, schemes: list[Scheme]) -> Scheme:
    """A module named by itself or by a pattern goes before one named by its class.

    Raises:
        CheckpointError: no group is for it, and they differ.
    """
    for scheme in schemes:
        for target in scheme.targets:
            try:
                if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                    return scheme
            except re.error as e:
                raise CheckpointError(f"quantization_config: target {target!r} is not a pattern: {e}.") from None
    by_class = [scheme for scheme in schemes if not all(t.startswith("re:") for t in scheme.targets)]
    if by_class:
        return next((scheme for scheme in by_class if "Linear" in scheme.targets), by_class[0])
    if any(replace(scheme, targets=()) != replace(schemes[0], targets=()) for scheme in schemes):
        raise CheckpointError(f"quantization_config: no target of its config_groups is for {module}, which is quantised.")
    return schemes[0]


def _storage(scheme: Scheme) -> Storage:
    group = max(scheme.group, 0)
    if scheme.kind == "float" and scheme.bits == 4:
        fine = torch.bfloat16 if scheme.layout == _MXFP4 else torch.float32
        return Storage("table", group=group, scale_dtype=fine, table=FP4_TABLE)
    rounded: ActivationKind = "float" if scheme.inputs == "none" else "int8" if scheme.kind == "int" else "float8"
    high, wide = scheme.blocks or (0 if scheme.strategy == "tensor" else 1, group)
    static = scheme.inputs == "static"
    if scheme.kind == "float":
        return Storage("float8", group=wide, row_block=high, scale_dtype=torch.float32, activations=rounded, calibrated=static)
    return Storage(
        "unsigned",
        1 << scheme.bits,
        group=wide,
        row_block=high,
        zero_points=not scheme.symmetric,
        scale_dtype=torch.bfloat16,
        activation_order=scheme.order,
        activations=rounded,
        calibrated=static,
    )


def _read(pieces: Pieces, scheme: Scheme) -> CodedRows:
    if scheme.symmetric and scheme.kind == "float":
        _check_no_shift(pieces, "weight_zero_point", "weights")
    if scheme.inputs == "static":
        _check_no_shift(pieces, "input_zero_point", "input_activations")
    if scheme.kind == "float":
        return _read_float4(pieces, scheme) if scheme.bits == 4 else _read_float8(pieces, scheme)
    return _read_integers(pieces, scheme)


def _check_no_shift(pieces: Pieces, piece: str, section: str) -> None:
    """Older versions of the tool write zero points of symmetric numbers as well, all of them 0. Others contradict the config, and either of
    the two is wrong.

    Raises:
        CheckpointError: a zero point other than 0.
    """
    if _has_shift(pieces, piece):
        raise _shifted(pieces, piece, section)


def _has_shift(pieces: Pieces, piece: str) -> bool:
    """Whether there are zero points, and not all of them 0."""
    return piece in pieces and bool((pieces.any(piece).float() != 0).any())


def _shifted(pieces: Pieces, piece: str, section: str) -> CheckpointError:
    return pieces.fail(piece, f"0 everywhere or left out, for the config says symmetric: true of {section}; one of the two is wrong")


def _read_float8(pieces: Pieces, scheme: Scheme) -> CodedRows:
    codes = float8_codes(pieces, "weight")
    scales, row_block, group = _scales(pieces, scheme, codes.shape[0], codes.shape[1])
    pieces.magnitudes("weight_scale")
    activations = AS_THEY_ARE if scheme.inputs == "none" else activation_format(pieces, "float8", static=scheme.inputs == "static")
    return CodedRows(codes, 8, scales.float(), row_block=row_block, group=group, activations=activations)


def _scales(pieces: Pieces, scheme: Scheme, rows: int, columns: int) -> tuple[torch.Tensor, int, int]:
    """Scales [row blocks, groups], rows that share them, and columns that do (0: all)."""
    match scheme.strategy:
        case "tensor":
            return pieces.one("weight_scale").reshape(1, 1), rows, 0
        case "channel":
            scales = pieces.scales("weight_scale")
            if scales.numel() != rows:
                raise pieces.fail("weight_scale", f"one number for each of {rows} outputs")
            return scales.reshape(rows, 1), 1, 0
        case "block":
            assert scheme.blocks is not None
            high, wide = scheme.blocks
            return pieces.scales("weight_scale", shape=(-(-rows // high), -(-columns // wide))), high, wide
    shape = (rows, groups_of(columns, scheme.group))
    scales = pieces.scales("weight_scale", shape=shape, why=in_groups(columns, scheme.group))
    return scales, 1, 0 if scheme.group == -1 else scheme.group


def _read_integers(pieces: Pieces, scheme: Scheme) -> CodedRows:
    if "weight_packed" in pieces:
        words = pieces.of("weight_packed", torch.int32, dims=2)
        shape = pieces.shaped("weight_shape", torch.int64, torch.int32, shape=(2,)).tolist()
        rows, columns = int(shape[0]), int(shape[1])
        if words.shape != (rows, -(-columns * scheme.bits // 32)):
            raise pieces.fail("weight_packed", f"of shape {[rows, -(-columns * scheme.bits // 32)]} for {rows} x {columns} weights")
        codes = unpacked(words, scheme.bits, columns)
    else:
        signed = pieces.of("weight", torch.int8, dims=2)
        codes = (signed.view(torch.uint8) ^ 128) if scheme.bits == 8 else (signed + 8).view(torch.uint8)
        rows, columns = codes.shape
    scales, row_block, group = _scales(pieces, scheme, rows, columns)
    middle = 1 << (scheme.bits - 1)
    zeros = torch.full(scales.shape, middle, dtype=torch.int16, device=scales.device)
    if not scheme.symmetric or _has_shift(pieces, "weight_zero_point"):
        zeros = _zero_points(pieces, scheme, tuple(scales.shape), middle)
        if scheme.symmetric and bool((zeros != middle).any()):
            raise _shifted(pieces, "weight_zero_point", "weights")
    groups = scales.shape[1]
    return CodedRows(
        codes,
        4 if scheme.bits == 4 else 8,
        scales,
        zeros,
        row_block=row_block,
        group=group,
        group_of=group_index(pieces, "weight_g_idx", columns, groups, group or -1, needed=scheme.order),
        activations=AS_THEY_ARE if scheme.inputs == "none" else _integer_inputs(pieces, scheme),
    )


def _zero_points(pieces: Pieces, scheme: Scheme, shape: tuple[int, ...], middle: int) -> torch.Tensor:
    stored = pieces.of("weight_zero_point", torch.int8, torch.int32)
    if stored.dtype == torch.int32 and "weight_packed" in pieces:  # packed along the outputs
        if stored.shape != (-(-shape[0] * scheme.bits // 32), shape[1]):
            raise pieces.fail("weight_zero_point", f"{scheme.bits}-bit codes for scales of shape {list(shape)}")
        return unpacked(stored.T, scheme.bits, shape[0]).T.to(torch.int16).contiguous()
    if stored.numel() != shape[0] * shape[1]:
        raise pieces.fail("weight_zero_point", f"of shape {list(shape)}")
    return stored.reshape(shape).to(torch.int16) + middle


def _integer_inputs(pieces: Pieces, scheme: Scheme) -> Activations:
    return activation_format(pieces, "int8", static=scheme.inputs == "static")


def _read_float4(pieces: Pieces, scheme: Scheme) -> CodedRows:
    packed = pieces.of("weight_packed", torch.uint8, dims=2)
    shape = (packed.shape[0], groups_of(packed.shape[1] * 2, scheme.group))
    if scheme.layout == _MXFP4 or "weight_global_scale" not in pieces:
        octets = pieces.shaped("weight_scale", torch.uint8, torch.float8_e8m0fnu, shape=shape).view(torch.uint8)
        pieces.finite("weight_scale", torch.where(octets == 255, torch.inf, 1.0))
        scales = powers_of_two(octets)
    else:
        stored = pieces.shaped("weight_scale", torch.float8_e4m3fn, shape=shape)
        scales = pieces.finite("weight_scale", stored).float() / pieces.one("weight_global_scale")
        pieces.finite("weight_global_scale", scales)
        if bool((scales < 0).any()):
            negative = "weight_global_scale" if float(pieces.one("weight_global_scale")) < 0 else "weight_scale"
            raise pieces.fail(negative, "nowhere negative, for it is made of absolute values")
    return float4_rows(packed, scales, 0 if scheme.group == -1 else scheme.group)


def powers_of_two(octets: torch.Tensor) -> torch.Tensor:
    """What exponents (e8m0, none of them 255) stand for, in a dtype that holds it exactly and is no larger than it must be."""
    return torch.exp2(octets.float() - 127.0).bfloat16()


def float4_rows(packed: torch.Tensor, scales: torch.Tensor, group: int) -> CodedRows:
    """Codes of 4-bit floating point, two a byte, the first one low.

    Args:
        packed: [rows, columns / 2] uint8. scales: [rows, groups].
    """
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    table = torch.tensor([FP4_TABLE], device=packed.device)
    return CodedRows(codes, 4, scales, table=table, group=group)
