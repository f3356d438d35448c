"""AWQ as AutoAWQ stores it (version GEMM): int32 words of 8 output features, which lie in the order 0 2 4 6 1 3 5 7."""

from __future__ import annotations

import torch

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.ops.coded import CodedRows
from octavo.quantization.pieces import Format, Pieces, groups_of, in_groups, unpacked
from octavo.quantization.random_codes import Storage, everywhere
from octavo.quantization.settings import Settings


def awq(settings: Settings) -> Format:
    """
    Raises:
        UnsupportedModel: another packing, or another number of bits.
    """
    settings.bits("bits", "w_bit", allowed=(4,))
    group = settings.group_size("group_size", "q_group_size")
    if (version := settings.text("version", "gemm")) not in ("gemm", "marlin"):
        raise UnsupportedModel(
            f"{settings.where}: AWQ weights packed as version {version!r} are not read. Supported: gemm, which AutoAWQ and most "
            "published checkpoints use."
        )
    if not settings.flag("zero_point", True):
        raise UnsupportedModel(f"{settings.where}: AWQ without zero points (zero_point false) is not supported.")
    names = ("qweight", "qzeros", "scales")
    storage = Storage("unsigned", group=max(group, 0), zero_points=True)
    usual = everywhere(storage, settings.strings("modules_to_not_convert"))

    def made_up(module: str, shape: tuple[int, int]) -> Storage | None:
        found = usual(module, shape)
        if found is not None and _uneven(shape[1], group):
            raise CheckpointError(f"{settings.where}: group_size {group} does not divide the {shape[1]} inputs of {module}.")
        return found

    return Format("awq", frozenset(names), frozenset(names), lambda pieces: _read(pieces, group), made_up)


def _uneven(columns: int, group: int) -> bool:
    """Whether groups do not fill the columns: AutoAWQ makes no short ones, but for a row that is shorter than a group."""
    return columns > group > 0 and columns % group != 0


def _read(pieces: Pieces, group: int) -> CodedRows:
    words = pieces.of("qweight", torch.int32, dims=2)
    columns, rows = words.shape[0], words.shape[1] * 8
    if _uneven(columns, group):
        raise pieces.fail("qweight", f"of inputs in whole groups, and the config's group_size {group} does not divide {columns}")
    groups = groups_of(columns, group)
    why = in_groups(columns, group)
    scales = pieces.scales("scales", shape=(groups, rows), why=why)
    zeros = pieces.shaped("qzeros", torch.int32, shape=(groups, rows // 8), why=why)
    return CodedRows(
        _in_order(words).T.contiguous(), 4, scales.T.contiguous(), _in_order(zeros).T.to(torch.int16), group=0 if group == -1 else group
    )


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Of 8 consecutive features the even ones come first in a word, then the odd ones.

    Args:
        words: [n, words] int32

    Returns:
        [n, 8 * words] uint8
    """
    return unpacked(words, 4, words.shape[1] * 8).view(len(words), -1, 2, 4).transpose(-1, -2).flatten(1)
