"""Attention of one query token a row over the paged cache, by the CUDA C++ kernel in `kernels/`, for few rows: see `form_of`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from octavo.ops.cuda.compiled import kernel
from octavo.ops.cuda.even_plan import ITEM_FIELDS, EvenCapacity, EvenPlan
from octavo.ops.cuda.launch import Boxes, tensor_map
from octavo.ops.triton.turns import EARLY, overlap

_SOURCES = Path(__file__).parent / "kernels"
_LOG2_E = 1.4426950408889634
_WARPS = 4
"""That attend, copy, and finish."""
_RING_BYTES = 32 << 10
"""Of keys and values a warp: more reach no more of memory, but what is read in the ordinary way waits behind them."""
_MOST_PER_SM = {1: 64, 2: 5}
"""KV heads of rows, by bytes of a cached number."""
_MEASURED = {1: (64, 128), 2: (128,)}
"""Head sizes at which it is known to be the faster one."""
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Form:
    """What of a model the compiler must know."""

    half: bool
    """float16, else bfloat16."""
    head_dim: int
    block: int
    """Tokens of a cache block."""
    kv_heads: int
    group: int
    bundles: bool
    """Whether plans may hold bundles of rows."""
    float8: bool = False
    """The cache is, e4m3."""

    name = "paged_decode"
    cluster = 1
    threads = 3 * 32 * _WARPS

    @property
    def group_pad(self) -> int:
        return 1 << (self.group - 1).bit_length()

    @property
    def columns(self) -> int:
        """Of sums that a warp leaves for an item."""
        return 16 if self.bundles else self.group_pad

    @property
    def buffers(self) -> int:
        """Items whose sums can lie in shared memory: two, if there is room."""
        return 2 if self.columns * self.head_dim <= 2048 else 1

    @property
    def row_bytes(self) -> int:
        """Of a key."""
        return self.head_dim * (1 if self.float8 else 2)

    @property
    def halves(self) -> int:
        """Tiles of 16 keys and values in a stage."""
        return 2 if self.float8 else 1

    @property
    def stage_bytes(self) -> int:
        return 2 * self.halves * 16 * self.row_bytes

    @property
    def stages(self) -> int:
        """In each warp's ring."""
        return _RING_BYTES // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Of a block: rings, sums with their stats, and barriers."""
        sums = self.buffers * _WARPS * self.columns * (4 * (self.head_dim + 4) + 8)
        return _WARPS * self.stages * (self.stage_bytes + 16) + sums + 16 * self.buffers + 16

    def definitions(self) -> dict[str, int]:
        names = {"HALF": self.half, "DIM": self.head_dim, "BLOCK": self.block, "KV_HEADS": self.kv_heads, "GROUP": self.group}
        more = {"GROUP_PAD": self.group_pad, "BUNDLES": self.bundles, "STAGES": self.stages}
        more |= {"FLOAT8": self.float8, "HALVES": self.halves}
        return {name: int(value) for name, value in (names | more | {"BUFFERS": self.buffers, "WARPGROUP": 0}).items()}

    def device_source(self) -> str:
        return source(self, (_SOURCES / "simt.h").read_text())


@dataclass(frozen=True)
class EvenWorkspace:
    """Device buffers of one plan capacity, at fixed addresses so that graphs can hold them. One in use a stream at a time."""

    plan: torch.Tensor
    """[capacity.size] int32: `EvenPlan.numbers`."""
    sums: torch.Tensor
    """[parts, group, head_dim] float32, group padded to a power of two."""
    stats: torch.Tensor
    """[parts, group, 2] float32: maximum and denominator."""
    counters: torch.Tensor
    """[parts] int32: parts of a row's head that have finished. Zero between launches."""
    capacity: EvenCapacity

    @classmethod
    def allocate(cls, capacity: EvenCapacity, group: int, head_dim: int, device: torch.device) -> EvenWorkspace:
        padded = triton.next_power_of_2(group)
        return cls(
            plan=torch.zeros(capacity.size, dtype=torch.int32, device=device),
            sums=torch.empty(capacity.parts, padded, head_dim, dtype=torch.float32, device=device),
            stats=torch.empty(capacity.parts, padded, 2, dtype=torch.float32, device=device),
            counters=torch.zeros(capacity.parts, dtype=torch.int32, device=device),
            capacity=capacity,
        )

    def load(self, plan: EvenPlan) -> None:
        """Copy a plan in. The plan must have been made for this capacity."""
        self.plan.copy_(torch.from_numpy(plan.numbers), non_blocking=True)


class Arguments(ctypes.Structure):
    """`Args` of `kernels/paged_decode.cu`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "table", "items", "members", "out", "sums", "stats", "counters", "k_scale", "v_scale")),
        *((name, ctypes.c_longlong) for name in ("q_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("table_stride", "window")),
        ("scale", ctypes.c_float),
        ("early", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
    ]


def form_of(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, block: int, kv_heads: int, group: int, *, bundles: bool
) -> Form | None:
    """None where the kernel does not take it: other numbers, heads that are not whole lines, blocks that are not whole tiles."""
    if dtype not in (torch.float16, torch.bfloat16) or cache_dtype not in (dtype, FLOAT8):
        return None
    if head_dim not in (64, 128) or block % 16 or group > 16:
        return None
    return Form(dtype == torch.float16, head_dim, block, kv_heads, group, bundles, cache_dtype == FLOAT8)


def most_rows(head_dim: int, cache_itemsize: int, num_kv_heads: int, sms: int) -> int:
    """That this kernel is for, by what was measured. Beyond, Triton's is as fast: whole rows then spread evenly by themselves."""
    return _MOST_PER_SM[cache_itemsize] * sms // num_kv_heads if head_dim in _MEASURED[cache_itemsize] else 0


def source(form: Form, machine: str) -> str:
    """The program; `machine` is the text of `simt.h`."""
    lines = [f"#define {name} {value}" for name, value in form.definitions().items()]
    return "\n".join([*lines, machine, (_SOURCES / "paged_decode.cu").read_text()])


def boxes_of(cache: torch.Tensor) -> Boxes:
    """16 tokens of a head: pages of [block, head_dim], which are copied in lines of 128 bytes, of one token or of two."""
    blocks, heads, block, head_dim = cache.shape
    size = cache.element_size()
    pitch = max(size * head_dim, 128)
    """Bytes from a line to the one below it."""
    in_pitch, lines = pitch // (size * head_dim), pitch // 128
    shape = (32, block // in_pitch, lines, heads, blocks)
    strides = (pitch, 128, size * cache.stride(1), size * cache.stride(0))
    return Boxes(cache.data_ptr(), shape, strides, (32, 16 // in_pitch, lines, 1, 1), exchanged=True, promoted=False)


def arguments(
    q: torch.Tensor,
    block_tables: torch.Tensor,
    workspace: EvenWorkspace,
    out: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Arguments:
    return Arguments(
        q=q.data_ptr(),
        table=block_tables.data_ptr(),
        items=workspace.plan.data_ptr(),
        members=workspace.plan.data_ptr() + 4 * ITEM_FIELDS * workspace.capacity.items,
        out=out.data_ptr(),
        sums=workspace.sums.data_ptr(),
        stats=workspace.stats.data_ptr(),
        counters=workspace.counters.data_ptr(),
        k_scale=None if k_scale is None else k_scale.data_ptr(),
        v_scale=None if v_scale is None else v_scale.data_ptr(),
        q_stride=2 * q.stride(0),
        out_stride=2 * out.stride(0),
        table_stride=block_tables.stride(0),
        window=sliding_window or 0,
        scale=scale * _LOG2_E,
        early=overlap(len(q), q.device) == EARLY,
        scale_stride=int(k_scale is not None and k_scale.numel() > 1),
    )


def paged_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    workspace: EvenWorkspace,
    out: torch.Tensor,
    form: Form,
    *,
    scale: float,
    sliding_window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `ops.triton.paged_decode.paged_decode`, up to rounding. A float8 cache needs both scales; others have none.

    The kernel before may have written what a row has at its last position; all other keys and values, the plan and the block
    tables must be older.
    """
    packed = arguments(q, block_tables, workspace, out, scale=scale, sliding_window=sliding_window, k_scale=k_scale, v_scale=v_scale)
    maps = tensor_map(boxes_of(key_cache)), tensor_map(boxes_of(value_cache))
    kernel(form, q.device).launch((workspace.capacity.blocks, 1, 1), packed, *maps)
    return out
