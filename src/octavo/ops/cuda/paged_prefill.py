"""Causal attention of prompt chunks over the paged cache, by the CUDA C++ kernel in `kernels/`: see `form_of`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.ops.cuda.chunk_plan import ITEM_FIELDS, KEYS, most_parts
from octavo.ops.cuda.compiled import kernel
from octavo.ops.cuda.launch import Boxes, tensor_map
from octavo.ops.triton.launch import sm_count

_SOURCES = Path(__file__).parent / "kernels"
_LOG2_E = 1.4426950408889634
_SHARED_BYTES = 227 << 10
_COPYING_THREADS = 128
_MOST_SLOTS = 6
_WARPGROUPS = 2
"""That attend, each to 64 rows, which are tokens x query heads of a KV head."""
_MEASURED = (128,)
"""Head sizes at which it is known to be the faster one."""
GATHER_FROM = 50.0
"""Queries a key from which it wins over Triton's kernel although a float8 cache must be gathered first."""


@dataclass(frozen=True)
class Form:
    """What the compiler must know."""

    half: bool
    """float16, else bfloat16."""
    head_dim: int
    block: int
    """Tokens of a cache block."""
    kv_heads: int
    group: int

    name = "paged_prefill"
    cluster = 1

    @property
    def tokens(self) -> int:
        """Of an item, at most: what `plan_chunks` must be given."""
        return 64 * _WARPGROUPS // self.group

    @property
    def threads(self) -> int:
        return 128 * _WARPGROUPS + _COPYING_THREADS

    @property
    def slots(self) -> int:
        """Of the ring: tiles of keys or of values."""
        return min(_MOST_SLOTS, (_SHARED_BYTES - self._query_bytes - 16) // (self._tile_bytes + 16))

    @property
    def _query_bytes(self) -> int:
        return 64 * _WARPGROUPS * 2 * self.head_dim

    @property
    def _tile_bytes(self) -> int:
        return KEYS * 2 * self.head_dim

    @property
    def shared_bytes(self) -> int:
        return self._query_bytes + self.slots * (self._tile_bytes + 16) + 16

    def definitions(self) -> dict[str, int]:
        names = {"HALF": self.half, "DIM": self.head_dim, "BLOCK": self.block, "KV_HEADS": self.kv_heads, "GROUP": self.group}
        more = {"WARPGROUPS": _WARPGROUPS, "KEYS": KEYS, "SLOTS": self.slots, "WARPGROUP": 1}
        return {name: int(value) for name, value in (names | more).items()}

    def device_source(self) -> str:
        return source(self, (_SOURCES / "simt.h").read_text() + _products(self))


class Arguments(ctypes.Structure):
    """`Args` of `kernels/paged_prefill.cu`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("items", "table", "out", "sums", "stats", "counters")),
        ("out_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("table_stride", "num_items")),
        ("scale", ctypes.c_float),
    ]


def form_of(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, block: int, kv_heads: int, group: int) -> Form | None:
    """None where the kernel does not take it: a float8 cache, heads that are not whole lines, blocks that are not whole pages."""
    if dtype not in (torch.float16, torch.bfloat16) or cache_dtype != dtype:
        return None
    if head_dim not in (64, 128) or block % 16 or group > 32:
        return None
    return Form(dtype == torch.float16, head_dim, block, kv_heads, group)


def wins(form: Form) -> bool:
    """Whether it is known to be the faster one."""
    return form.head_dim in _MEASURED


@dataclass(frozen=True)
class Parts:
    """Device buffers for the parts of items whose keys are cut, one in use a stream at a time."""

    sums: torch.Tensor
    stats: torch.Tensor
    counters: torch.Tensor
    """`Args` of `kernels/paged_prefill.cu` says what is in them."""

    @classmethod
    def allocate(cls, form: Form, sms: int, device: torch.device) -> Parts:
        warps = most_parts(form.kv_heads, sms) * form.kv_heads * 4 * _WARPGROUPS
        return cls(
            sums=torch.empty(warps, 16 * form.head_dim, device=device),
            stats=torch.empty(warps, 128, device=device),
            counters=torch.zeros(warps, dtype=torch.int32, device=device),
        )


def source(form: Form, machine: str) -> str:
    """The program; `machine` is the text of `simt.h`, and where that is the device's, of `products`."""
    lines = [f"#define {name} {value}" for name, value in form.definitions().items()]
    return "\n".join([*lines, machine, (_SOURCES / "paged_prefill.cu").read_text()])


def _products(form: Form) -> str:
    """d [64, keys] = or += q [64, 16] @ k [keys, 16].T, both from shared memory, and d [64, head_dim] += a [64, 16] @ v [16, head_dim], a
    from registers, spread over a warpgroup's lanes.
    """
    dtype = "f16" if form.half else "bf16"

    def sums(count: int) -> tuple[str, str]:
        return ", ".join(f"%{i}" for i in range(count)), ", ".join(f'"+f"(d[{i}])' for i in range(count))

    keys, dim = KEYS // 2, form.head_dim // 2
    scores, score_operands = sums(keys)
    values, value_operands = sums(dim)
    a = ", ".join(f"%{dim + i}" for i in range(4))
    return f"""
INLINE void score_mma(float (&d)[{keys}], u32 q, u32 k, int byte, bool add) {{
  asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{keys + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.{dtype}.{dtype} {{{scores}}}, %{keys}, %{keys + 1}, add, 1, 1, 0, 0;\\n}}"
               : {score_operands}
               : "l"(swizzled_operand(q, byte)), "l"(swizzled_operand(k, byte)), "r"((int)add));
}}
INLINE void value_mma(float (&d)[{dim}], const u32 (&a)[4], u32 v, int byte) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{form.head_dim}k16.f32.{dtype}.{dtype} {{{values}}}, {{{a}}}, %{dim + 4}, 1, 1, 1, 1;"
               : {value_operands}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(transposed_operand(v, byte, 2048)));
}}
"""


def query_boxes(q: torch.Tensor, form: Form) -> Boxes:
    """An item's queries, half a line of each head: q [tokens, heads, head_dim]."""
    tokens, heads, head_dim = q.shape
    row, head = 2 * q.stride(0), 2 * q.stride(1)
    shape = (32, heads, head_dim // 64, tokens, 1)
    return Boxes(q.data_ptr(), shape, (head, 128, row, row), (32, form.group, 1, form.tokens, 1), exchanged=True)


def cache_boxes(cache: torch.Tensor, lines: int) -> Boxes:
    """16 tokens of a head, so many lines of 128 bytes each."""
    blocks, heads, block, head_dim = cache.shape
    shape = (32, block, head_dim // 64, heads, blocks)
    strides = (2 * head_dim, 128, 2 * cache.stride(1), 2 * cache.stride(0))
    return Boxes(cache.data_ptr(), shape, strides, (32, 16, lines, 1, 1), exchanged=True, promoted=False)


def boxes(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, form: Form) -> tuple[Boxes, Boxes, Boxes]:
    return query_boxes(q, form), cache_boxes(key_cache, 1), cache_boxes(value_cache, form.head_dim // 64)


def arguments(block_tables: torch.Tensor, items: torch.Tensor, parts: Parts, out: torch.Tensor, *, scale: float) -> Arguments:
    return Arguments(
        items=items.data_ptr(),
        table=block_tables.data_ptr(),
        out=out.data_ptr(),
        sums=parts.sums.data_ptr(),
        stats=parts.stats.data_ptr(),
        counters=parts.counters.data_ptr(),
        out_stride=2 * out.stride(0),
        table_stride=block_tables.stride(0),
        num_items=len(items),
        scale=scale * _LOG2_E,
    )


def paged_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    items: torch.Tensor,
    parts: Parts,
    out: torch.Tensor,
    form: Form,
    *,
    scale: float,
) -> torch.Tensor:
    """As `ops.triton.paged_prefill.paged_prefill`, up to rounding.

    Args:
        items: [items, ITEM_FIELDS] int32 of `plan_chunks`, for `form.tokens`, on the device; empty ones may follow.
    """
    assert items.shape[1] == ITEM_FIELDS
    if len(items) == 0:
        return out
    blocks = min(sm_count(q.device), len(items) * form.kv_heads)
    packed = arguments(block_tables, items, parts, out, scale=scale)
    kernel(form, q.device).launch((blocks, 1, 1), packed, *map(tensor_map, boxes(q, key_cache, value_cache, form)))
    return out
