"""The FlashInfer backend: what it plans, by a stand-in with the documented meaning of the package's arguments; on a GPU the package."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from octavo.attention.base import KvScales, LayerSpec
from octavo.attention.flashinfer import TURNS, FlashInferAttention, list_pages, unsupported
from octavo.attention.reference import ReferenceAttention
from octavo.config.types import DeviceInfo
from octavo.errors import ConfigError
from octavo.layers.rope import Rotation
from octavo.ops.reference.attention import causal_attention
from tests.support.paged_batches import Pool, step_batch
from tests.unit.config.test_gpu_numerics import HOPPER, config

from .paged import relative_error
from .test_attention_backends import on

INSTALLED = importlib.util.find_spec("flashinfer") is not None
BLOCK, BLOCKS = 16, 40
LAYERS = (
    LayerSpec(8, 2, 64, 0.125),
    LayerSpec(8, 2, 64, 0.125, sliding_window=25, soft_cap=5.0),
    LayerSpec(8, 2, 64, 0.125),
)


class StandIn:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, as its documentation defines `plan` and `run`, in plain torch."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, *, backend: str) -> None:
        assert (workspace.numel(), kv_layout, backend) == (128 * 2**20, "HND", "fa2")
        self.plans = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        # The package reads these on the host: from the device that would be a wait.
        assert all(t.device.type == "cpu" and t.dtype == torch.int32 for t in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len))
        assert paged_kv_indices.dtype == torch.int32
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        self.qo, self.kv, self.pages = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices.long()
        self.last, self.heads, self.size = paged_kv_last_page_len.tolist(), (num_qo_heads, num_kv_heads, head_dim_qk), page_size
        self.options = options
        self.plans += 1

    def run(
        self,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        o = self.options
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert out.is_contiguous()
        assert (q.shape[1], caches[0].shape[1], q.shape[2]) == self.heads
        assert o["causal"] and o["q_data_type"] == q.dtype and o["kv_data_type"] == caches[0].dtype
        for row, last in enumerate(self.last):
            pages = self.pages[self.kv[row] : self.kv[row + 1]]
            length = (len(pages) - 1) * self.size + last
            k, v = (c.float()[pages].transpose(1, 2).reshape(-1, *self.heads[1:])[:length] for c in caches)
            part = slice(self.qo[row], self.qo[row + 1])
            window = None if o["window_left"] < 0 else o["window_left"] + 1
            out[part] = causal_attention(
                q[part], k * k_scale, v * v_scale, scale=o["sm_scale"], sliding_window=window, soft_cap=o["logits_soft_cap"]
            )
        return out


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer, or the stand-in where there is no GPU to run it."""
    if not (INSTALLED and torch.cuda.is_available()):
        module: Any = types.ModuleType("flashinfer")
        module.__spec__ = importlib.util.spec_from_loader("flashinfer", None)
        module.BatchPrefillWithPagedKVCacheWrapper = StandIn
        monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=["float16", "float8"])
def test_steps_match_the_oracle(dtype: torch.dtype, device: torch.device) -> None:
    scales = {2: KvScales(torch.tensor([0.5]), torch.tensor([0.25]))}
    backend = FlashInferAttention(LAYERS, BLOCKS, BLOCK, dtype, device, model_dtype=torch.float16, scales=scales)
    oracle = ReferenceAttention(LAYERS, BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
    for layer in range(len(LAYERS)):
        backend.cache.of(layer).view(torch.uint8).fill_(0x7F)  # NaN in either type: nothing behind a row's tokens may count.
    tables = Pool(BLOCKS, BLOCK).tables([100, 60, 33])
    generator = torch.Generator().manual_seed(0)
    for starts, counts in (([0, 0, 0], [80, 32, 15]), ([80, 32, 15], [1, 1, 18]), ([81, 33, 0], [1, 1, 1])):
        batch = step_batch(starts, counts, tables, BLOCK)
        attend, expected = backend.plan(on(batch, device)), oracle.plan(batch)
        for layer in range(len(LAYERS)):
            # Coarse numbers, which float8 holds exactly.
            q, k, v = ((torch.randn(sum(counts), n, 64, generator=generator) * 2).round().clamp(-8, 8).half() / 2 for n in (8, 2, 2))
            wanted = expected(layer, q, k, v).double()
            assert relative_error(attend(layer, q.to(device), k.to(device), v.to(device)).cpu(), wanted) < 5e-3
    if not INSTALLED:
        turns = backend._wrappers[LAYERS[0]]
        assert [w.plans for w in turns] == [2] + [1] * (TURNS - 1), "a plan in flight is not overwritten, and equal layers share theirs"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=["float16", "float8"])
def test_the_fused_path_gives_what_the_other_gives(dtype: torch.dtype, device: torch.device) -> None:
    """Queries there lie between keys and values of their tokens, not one behind the other."""
    generator = torch.Generator().manual_seed(0)
    backends = [FlashInferAttention(LAYERS, BLOCKS, BLOCK, dtype, device, model_dtype=torch.float16) for _ in range(2)]
    tables = Pool(BLOCKS, BLOCK).tables([50, 30])
    for starts, counts in (([0, 0], [40, 20]), ([40, 20], [1, 7])):
        batch = on(step_batch(starts, counts, tables, BLOCK), device)
        plain, fused = (backend.plan(batch) for backend in backends)
        # Cosine 1 and sine 0: what is rotated stays as it is.
        rotation = Rotation(torch.cat([torch.ones(64, 32), torch.zeros(64, 32)], 1).to(device), batch.positions)
        for layer in range(len(LAYERS)):
            qkv = ((torch.randn(batch.num_tokens, 12 * 64, generator=generator) * 2).round().clamp(-8, 8) / 2).half().to(device)
            q, k, v = (part.clone() for part in qkv.view(-1, 12, 64).split((8, 2, 2), 1))
            expected = plain(layer, q, k, v).double()
            got = fused.attend_qkv(layer, qkv, rotation, None)  # type: ignore[attr-defined]
            assert relative_error(got.view(expected.shape).cpu(), expected.cpu()) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not INSTALLED, reason="needs flashinfer-python")
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 128), (torch.float8_e4m3fn, 128), (torch.bfloat16, 256)],
    ids=["bfloat16", "float8", "bfloat16 heads of 256"],
)
def test_long_contexts_that_the_package_reads_in_parts(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    layers = (LayerSpec(32, 8, head_dim, head_dim**-0.5),) * 2
    starts, counts = [5000, 700, 0, 1500], [1, 1, 1, 300]
    scales = {0: KvScales(torch.tensor([0.5]), torch.tensor([0.25]))}
    backend = FlashInferAttention(layers, 600, BLOCK, dtype, device, model_dtype=torch.bfloat16, scales=scales)
    tables = Pool(600, BLOCK).tables([start + count for start, count in zip(starts, counts, strict=True)]).to(device)
    attend = backend.plan(on(step_batch(starts, counts, tables.cpu(), BLOCK), device))
    for layer in range(len(layers)):
        numbers = torch.randn(backend.cache.of(layer).shape, device=device).clamp(-3, 3)
        backend.cache.of(layer).copy_(numbers.to(dtype))
        q, k, v = (torch.randn(sum(counts), heads, head_dim, device=device, dtype=torch.bfloat16) for heads in (32, 8, 8))
        got = attend(layer, q, k, v)
        k_scale, v_scale = backend._scales[layer]
        first = 0
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            blocks = tables[row, : -(-(start + count) // BLOCK)].long()
            key, value = (c.double()[blocks].transpose(0, 1).flatten(1, 2)[:, : start + count] for c in backend.cache.of(layer))
            key, value = (x.repeat_interleave(4, 0) for x in (key * k_scale, value * v_scale))
            scores = torch.einsum("thd,hsd->hts", q[first : first + count].double(), key) * head_dim**-0.5
            positions = torch.arange(start + count, device=device)
            scores.masked_fill_(positions > positions[start:, None], float("-inf"))
            wanted = torch.einsum("hts,hsd->thd", scores.softmax(-1), value)
            assert relative_error(got[first : first + count].cpu(), wanted.cpu()) < 1e-2
            first += count


def test_pages_of_a_step() -> None:
    pages = list_pages(np.array([15, 16, 0], np.int32), np.array([1, 1, 33], np.int32), 16)
    assert pages.query_starts.tolist() == [0, 1, 2, 35]
    assert pages.page_starts.tolist() == [0, 1, 3, 6]
    assert pages.last_page.tolist() == [16, 1, 1]
    assert pages.row.tolist() == [0, 1, 1, 2, 2, 2]
    assert pages.column.tolist() == [0, 0, 1, 0, 1, 2]


@pytest.mark.usefixtures("package")
def test_kernels_that_cannot_be_compiled_are_said_at_the_start(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def plan(*_: object, **__: object) -> None:
        raise RuntimeError("Could not find nvcc.\nA page of output.")

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    with pytest.raises(ConfigError, match=r"could not compile them: Could not find nvcc\. It needs .* TRITON_ATTN") as refusal:
        FlashInferAttention(LAYERS, BLOCKS, BLOCK, torch.float16, device)
    assert "A page" not in str(refusal.value)


@pytest.mark.usefixtures("package")
def test_scales_by_head_are_refused(device: torch.device) -> None:
    by_head = {0: KvScales(torch.ones(2), torch.ones(2))}
    with pytest.raises(ConfigError, match="one scale a layer"):
        FlashInferAttention(LAYERS, BLOCKS, BLOCK, torch.float8_e4m3fn, device, scales=by_head)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("device_info", "heads", "settings", "words"),
    [
        (HOPPER, (LayerSpec(8, 2, 80, 1.0),), {}, "heads of 64, 128, 256, not of 80"),
        (HOPPER, LAYERS, {"dtype": "float32"}, "bfloat16 and float16 models"),
        (HOPPER, LAYERS, {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, "--calculate-kv-scales"),
        (DeviceInfo("cuda", "T4", 2**34, 2**34, 4, capability=(7, 5)), LAYERS, {"dtype": "float16"}, "T4 is too old"),
    ],
)
def test_what_it_cannot_do_is_said(device_info: DeviceInfo, heads: tuple[LayerSpec, ...], settings: dict[str, Any], words: str) -> None:
    chosen = config(device_info, attention_backend="FLASHINFER", **settings)
    assert words in (unsupported(chosen, heads) or "")
    assert unsupported(config(attention_backend="FLASHINFER"), LAYERS) is None


@pytest.mark.skipif(INSTALLED, reason="flashinfer is installed")
def test_a_missing_package_is_named() -> None:
    assert "octavo[flashinfer]" in (unsupported(config(attention_backend="FLASHINFER"), LAYERS) or "")
