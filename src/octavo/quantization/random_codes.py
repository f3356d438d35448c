"""Low-bit weights out of nothing: what a checkpoint of a format would hold, for models that are made from their config alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from octavo.errors import CheckpointError
from octavo.ops.coded import ActivationKind, Activations, CodedRows

_FLOAT8_SPREAD: Final = 64.0
"""Standard deviation of float8 codes: seven of them reach the largest."""
_INPUT_RANGE: Final = 20.0
"""What calibrated inputs reach: a norm's outputs rarely go beyond."""
_FEWEST_ROWS: Final = 16
"""Gates of a single output and the like are left in full precision by every tool."""


@dataclass(frozen=True)
class Storage:
    """What a module's weight is stored as."""

    code: Literal["unsigned", "signed", "float8", "table"]
    """unsigned: whole numbers from 0 up to `levels`; signed: int8."""
    levels: int = 16
    group: int = 0
    """Consecutive columns that share a scale; 0: all of a row."""
    row_block: int = 1
    """Consecutive rows that share scales; 0: all."""
    zero_points: bool = False
    """Each group has a zero point of its own; else it is half of `levels`."""
    scale_dtype: torch.dtype = torch.float16
    table: tuple[float, ...] = ()
    """The same 16 numbers for all rows, in front of scales; with code "table" and none, each row has numbers of its own and no scales."""
    activation_order: bool = False
    activations: ActivationKind = "float"
    calibrated: bool = False
    """Inputs are rounded with a scale of the checkpoint's."""

    @property
    def code_bits(self) -> Literal[4, 8]:
        return 4 if self.code == "table" or (self.code == "unsigned" and self.levels <= 16) else 8

    @property
    def bits(self) -> float:
        """Of a weight in memory, about. Groups smaller than kernels take are dequantised to 16 bits."""
        if 0 < self.group < 32:
            return 16
        per_scale = self.scale_dtype.itemsize * 8 + (8 if self.zero_points else 0)
        return self.code_bits + (per_scale / self.group / max(self.row_block, 1) if self.group else 0.1)


def random_rows(
    storage: Storage, rows: int, columns: int, generator: torch.Generator, order_generator: torch.Generator | None = None
) -> CodedRows:
    """A weight of variance 1 / columns, as `weights.dummy` makes them in full precision.

    Args:
        generator: where it lives, the weight lives too.
        order_generator: of the activation order, which layers with the same input have in common; default: `generator`.
    """
    device = generator.device

    def uniform(*shape: int, low: float, high: float) -> torch.Tensor:
        return torch.empty(shape, device=device).uniform_(low, high, generator=generator)

    std = columns**-0.5
    group = storage.group if 0 < storage.group < columns else 0
    groups = -(-columns // group) if group else 1
    row_block = min(storage.row_block or rows, rows)
    shape = (-(-rows // row_block), groups)
    if storage.code == "float8":
        spread = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0.0, _FLOAT8_SPREAD, generator=generator)
        codes, per_code = spread.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn), _FLOAT8_SPREAD
    elif storage.code == "signed":
        codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device, generator=generator)
        per_code = 256 / math.sqrt(12)
    else:
        codes = torch.randint(0, storage.levels, (rows, columns), dtype=torch.uint8, device=device, generator=generator)
        per_code = storage.levels / math.sqrt(12)
    activations = Activations(storage.activations, _input_scale(storage, device))
    if storage.code == "table" and not storage.table:
        table = torch.empty(rows, 16, device=device).normal_(0.0, std, generator=generator).to(storage.scale_dtype)
        return CodedRows(codes, 4, table=table, activations=activations)
    if storage.table:
        per_code = math.sqrt(sum(v * v for v in storage.table) / len(storage.table))
    scales = (uniform(*shape, low=0.5, high=1.5) * (std / per_code)).to(storage.scale_dtype)
    zeros = None
    if storage.code == "unsigned":
        middle = storage.levels // 2
        low, high = (middle - 1, middle + 2) if storage.zero_points else (middle, middle + 1)
        zeros = torch.randint(low, high, shape, dtype=torch.int16, device=device, generator=generator)
    order = None
    if storage.activation_order and group:
        order = (torch.arange(columns, device=device) // group)[
            torch.randperm(columns, device=device, generator=order_generator or generator)
        ]
    return CodedRows(
        codes,
        storage.code_bits,
        scales,
        zeros,
        torch.tensor([storage.table], device=device) if storage.table else None,
        row_block=row_block,
        group=group,
        group_of=order,
        activations=activations,
    )


def _input_scale(storage: Storage, device: torch.device) -> torch.Tensor | None:
    if not storage.calibrated or storage.activations == "float":
        return None
    return torch.tensor(_INPUT_RANGE / (127.5 if storage.activations == "int8" else 448.0), device=device)


def everywhere(storage: Storage, left_out: Sequence[str] = ()) -> Callable[[str, tuple[int, int]], Storage | None]:
    """All modules alike, but for those that a list leaves in full precision.

    Args:
        left_out: as tools write it: names, whole or from a dot to a dot, or patterns behind "re:".

    Raises:
        CheckpointError: a pattern is none.
    """
    patterns = []
    for name in left_out:
        try:
            patterns.append(re.compile(name[3:] if name.startswith("re:") else rf"(.*\.)?{re.escape(name.strip('.'))}(\..*)?$"))
        except re.error as e:
            raise CheckpointError(f"quantization_config: {name!r} is not a pattern: {e}.") from None

    def storage_of(module: str, shape: tuple[int, int]) -> Storage | None:
        return None if shape[0] < _FEWEST_ROWS or any(p.match(module) for p in patterns) else storage

    return storage_of
