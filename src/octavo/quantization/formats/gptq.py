"""GPTQ as AutoGPTQ and GPTQModel store it: codes packed along the inputs, zeros along the outputs.

Checkpoints of the first version hold each zero point minus one (and a zero point of 0 as all ones); those of the second hold it as it
is. With activation order, `g_idx` says which group each input belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.ops.coded import CodedRows
from octavo.quantization.pieces import Format, Pieces, groups_of, in_groups, unpacked
from octavo.quantization.random_codes import Storage, everywhere
from octavo.quantization.settings import Settings

_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class _Packing:
    bits: int
    group: int
    zero_offset: int
    symmetric: bool
    order: bool
    """Inputs were rounded in another order than they come in: `g_idx` says which group each belongs to."""


def gptq(settings: Settings) -> Format:
    """
    Raises:
        UnsupportedModel: another packing, or another number of bits.
    """
    version = settings.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2", "auto_gptq", "auto_round:auto_gptq"):
        raise UnsupportedModel(f"{settings.where}: checkpoint_format {version!r} is not supported. Supported: gptq, gptq_v2.")
    offset = 0 if version == "gptq_v2" else 1
    bits, group = settings.bits("bits", allowed=_BITS), settings.group_size("group_size")
    usual = _Packing(bits, group, offset, settings.flag("sym", True), settings.flag("desc_act"))
    special = _by_module(settings.section("dynamic"), usual)

    def packing_of(module: str) -> _Packing:
        return next((p for pattern, p in special if pattern.match(module)), usual)

    left_out = (
        *settings.strings("modules_to_not_convert"),
        *(f"re:{key[2:]}" for key in settings.section("dynamic").values if key.startswith("-:")),
    )

    spared = everywhere(Storage("unsigned"), left_out)

    def made_up(module: str, shape: tuple[int, int]) -> Storage | None:
        packing = packing_of(module)
        group = max(packing.group, 0)
        storage = Storage("unsigned", 1 << packing.bits, group=group, zero_points=not packing.symmetric, activation_order=packing.order)
        return None if spared(module, shape) is None else storage

    names = frozenset(("qweight", "qzeros", "scales", "g_idx"))
    return Format("gptq", names, names, lambda pieces: _read(pieces, packing_of(pieces.module)), made_up)


def _by_module(dynamic: Settings, usual: _Packing) -> list[tuple[re.Pattern[str], _Packing]]:
    """Modules with settings of their own: a name pattern behind "+:"; behind "-:" are those left as they were."""
    found = []
    for key, values in dynamic.values.items():
        if key.startswith("-:"):
            continue
        if not isinstance(values, Mapping):
            raise dynamic.fail(key, "an object")
        inherited = {"bits": usual.bits, "group_size": usual.group, "sym": usual.symmetric, "desc_act": usual.order}
        own = Settings(inherited | {**values}, f"{dynamic.where}: {key}")
        try:
            pattern = re.compile(key.removeprefix("+:"))
        except re.error as e:
            raise CheckpointError(f"{dynamic.where}: {key!r} is not a pattern: {e}.") from None
        bits, group = own.bits("bits", allowed=_BITS), own.group_size("group_size")
        found.append((pattern, _Packing(bits, group, usual.zero_offset, own.flag("sym", True), own.flag("desc_act"))))
    return found


def _read(pieces: Pieces, packing: _Packing) -> CodedRows:
    words = pieces.of("qweight", torch.int32, dims=2)
    bits, rows = packing.bits, words.shape[1]
    if words.shape[0] * 32 % bits:
        raise pieces.fail("qweight", f"int32 words of whole codes of {bits} bits")
    columns = words.shape[0] * 32 // bits
    groups = groups_of(columns, packing.group)
    why = f"{in_groups(columns, packing.group)} ({bits} bits)"
    scales = pieces.scales("scales", shape=(groups, rows), why=why)
    zero_words = pieces.shaped("qzeros", torch.int32, shape=(groups, -(-rows * bits // 32)), why=why)
    zeros = (unpacked(zero_words, bits, rows).to(torch.int16) + packing.zero_offset) & ((1 << bits) - 1)
    _check_version(pieces, packing, zeros)
    return CodedRows(
        unpacked(words.T, bits, columns),
        8 if bits == 8 else 4,
        scales.T.contiguous(),
        zeros.T.contiguous(),
        group=0 if packing.group == -1 else packing.group,
        group_of=group_index(pieces, "g_idx", columns, groups, packing.group, needed=packing.order),
    )


def _check_version(pieces: Pieces, packing: _Packing, zeros: torch.Tensor) -> None:
    """Symmetric weights have one zero point. Where all of them are off by what the versions differ in, the file is of the other version.

    Raises:
        CheckpointError: it is.
    """
    shift = 1 if packing.zero_offset else -1
    if packing.symmetric and bool((zeros == (1 << (packing.bits - 1)) + shift).all()):
        said, meant = ("gptq", "gptq_v2")[:: packing.zero_offset * 2 - 1]
        raise pieces.fail(
            "qzeros",
            f"of the version that the config says (checkpoint_format {said}; left out, it is gptq): its zero points are those of {meant}. "
            "Correct checkpoint_format in the quantization_config",
        )


def group_index(pieces: Pieces, name: str, columns: int, groups: int, group: int, *, needed: bool) -> torch.Tensor | None:
    """The group of each input; None where they follow one another anyway.

    Args:
        needed: the config says that they do not, or may not.
    """
    if name not in pieces and (groups == 1 or not needed):
        return None
    index = pieces.shaped(name, torch.int32, torch.int64, shape=(columns,)).long()
    if bool((index < 0).any()) or bool((index >= groups).any()):
        raise pieces.fail(name, f"numbers from 0 to {groups - 1}")
    usual = torch.arange(columns, device=index.device) // (columns if group == -1 else group)
    return None if torch.equal(index, usual) else index
