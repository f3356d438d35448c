"""`Decodes`: which kernel attends to the rows of a step that have one query each, and the plans that it takes.

CUDA C++ (`ops.cuda.paged_decode`), where it runs and takes the layers: few rows of a 16-bit cache, nearly all of a float8 one; all
else: Triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from octavo.attention.base import LayerSpec
from octavo.attention.paged_cache import ScaleOfLayer
from octavo.ops.cuda import compiled
from octavo.ops.cuda import paged_decode as cuda
from octavo.ops.cuda.compiler import architecture
from octavo.ops.cuda.even_plan import EvenCapacity, even_capacity, plan_even
from octavo.ops.triton.decode_plan import Bundles, DecodeCapacity, Int32, bundle_limit, decode_capacity, plan_decode
from octavo.ops.triton.launch import compiles_only, overlap_supported, sm_count
from octavo.ops.triton.paged_decode import DecodeTuning, DecodeWorkspace, decode_tuning, paged_decode


@dataclass(frozen=True)
class Geometry:
    """What a plan depends on; layers that share it share the plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    capped: bool
    """Whether scores are."""
    kind: int
    """Of cache."""

    @staticmethod
    def of(layer: LayerSpec, kind: int) -> Geometry:
        return Geometry(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window, layer.soft_cap is not None, kind)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def most_bundled(self) -> int:
        """Rows that may be read together."""
        return bundle_limit(self.group) if self.sliding_window is None else 1


@dataclass(frozen=True)
class LayerCache:
    """What of a layer is attended to."""

    spec: LayerSpec
    keys: torch.Tensor
    values: torch.Tensor
    stored: ScaleOfLayer


@dataclass(frozen=True)
class TritonDecodes:
    """A step's decodes, planned for Triton's kernel."""

    workspace: DecodeWorkspace
    """Holds the plan."""
    tuning: DecodeTuning

    def attend(self, q: torch.Tensor, cache: LayerCache, block_tables: torch.Tensor, out: torch.Tensor) -> None:
        spec = cache.spec
        paged_decode(
            q,
            cache.keys,
            cache.values,
            block_tables,
            self.workspace,
            out,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            k_scale=cache.stored.k,
            v_scale=cache.stored.v,
            tuning=self.tuning,
        )


@dataclass(frozen=True)
class CudaDecodes:
    """A step's decodes, planned for the kernel in CUDA C++."""

    workspace: cuda.EvenWorkspace
    """Holds the plan."""
    form: cuda.Form

    def attend(self, q: torch.Tensor, cache: LayerCache, block_tables: torch.Tensor, out: torch.Tensor) -> None:
        if compiles_only():
            return  # What the plan is copied by has not run.
        spec = cache.spec
        cuda.paged_decode(
            q,
            cache.keys,
            cache.values,
            block_tables,
            self.workspace,
            out,
            self.form,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            k_scale=cache.stored.k,
            v_scale=cache.stored.v,
        )


class Decodes:
    """Plans and workspaces for the layers of one geometry.

    Args:
        dtype: of the cache.
        model_dtype: of queries.
        block_size: tokens of a cache block.
    """

    def __init__(self, g: Geometry, dtype: torch.dtype, model_dtype: torch.dtype, block_size: int, device: torch.device) -> None:
        self._g, self._dtype, self._device = g, dtype, device
        self._sms = sm_count(device)
        self._overlap = overlap_supported(device)
        self._few = cuda.most_rows(g.head_dim, dtype.itemsize, g.num_kv_heads, self._sms)
        self._forms = self._make_forms(model_dtype, block_size)
        # Their number of parts depends on the number of rows, but not beyond these.
        most = max((self._triton_capacity(rows) for rows in (1, 2 * self._sms, 8 * self._sms)), key=lambda c: c.parts)
        self._triton_buffers = DecodeWorkspace.allocate(most, g.num_heads, g.num_kv_heads, g.head_dim, device)
        self._cuda_buffers = None
        if self._forms:
            largest = max((self._cuda_capacity(rows) for rows in (1, self._few)), key=lambda c: c.parts)
            self._cuda_buffers = cuda.EvenWorkspace.allocate(largest, g.group, g.head_dim, device)

    def _make_forms(self, model_dtype: torch.dtype, block_size: int) -> dict[bool, cuda.Form]:
        """By whether plans may hold bundles; empty where the kernel does not run or does not take the layers."""
        g = self._g
        if architecture(self._device) is None or g.capped or not self._few:
            return {}
        sizes = (g.head_dim, block_size, g.num_kv_heads, g.group)
        forms = {b: form for b in (False, True) if (form := cuda.form_of(model_dtype, self._dtype, *sizes, bundles=b)) is not None}
        for form in forms.values():
            compiled.prepare(form, self._device)
        return forms

    @functools.cached_property
    def _compiles(self) -> bool:
        return bool(self._forms) and compiled.Kind("attention").finish_preparing(self._forms.values(), self._device)

    def _triton_capacity(self, rows: int) -> DecodeCapacity:
        return decode_capacity(rows, self._g.num_kv_heads, self._sms, bundle=self._g.most_bundled)

    def _cuda_capacity(self, rows: int) -> EvenCapacity:
        return even_capacity(rows, self._g.num_kv_heads, self._sms, bundle=self._g.most_bundled)

    def capacity(self, rows: int) -> DecodeCapacity | EvenCapacity:
        """That plans for up to so many rows have."""
        return self._cuda_capacity(rows) if rows <= self._few and self._compiles else self._triton_capacity(rows)

    def plan(self, context_lens: Int32, rows: int, bundles: Bundles | None) -> Int32:
        """[capacity.size] the numbers of a plan. rows: what its capacity is to be for."""
        window, capacity = self._g.sliding_window, self.capacity(rows)
        if isinstance(capacity, EvenCapacity):
            return plan_even(context_lens, capacity, sliding_window=window, bundles=bundles).numbers
        return plan_decode(context_lens, self._g.num_kv_heads, self._sms, capacity, sliding_window=window, bundles=bundles).numbers

    def work(self, rows: int, plan: torch.Tensor) -> TritonDecodes | CudaDecodes:
        """The decodes of a plan for so many rows, whose numbers are in `plan` when they run."""
        g, capacity = self._g, self.capacity(rows)
        if isinstance(capacity, EvenCapacity):
            own = self._cuda_buffers
            assert own is not None
            return CudaDecodes(cuda.EvenWorkspace(plan, own.sums, own.stats, own.counters, capacity), self._forms[capacity.members > 0])
        parts = self._triton_buffers
        tuning = decode_tuning(g.head_dim, self._dtype.itemsize, rows, g.num_kv_heads, self._sms, overlap=self._overlap)
        return TritonDecodes(DecodeWorkspace(plan, parts.sums, parts.stats, parts.counters, capacity), tuning)
