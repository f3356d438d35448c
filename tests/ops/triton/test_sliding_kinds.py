"""Models whose layers slide in part, on the Triton backends: tables of their own for each kind of cache, eagerly, as graphs do, and
through a whole worker, past the window and with its old blocks in the hands of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.attention.base import Attend, GraphShape, KindTables, LayerSpec, StepBatch
from octavo.attention.invariant import InvariantAttention
from octavo.attention.kinds import SlidingBlocks
from octavo.attention.reference import ReferenceAttention
from octavo.attention.torch_paged import TorchPagedAttention
from octavo.attention.triton import TritonAttention
from octavo.core.loop import EngineCore
from octavo.frontend.client import InProcessClient
from octavo.layers.rope import Rotation
from octavo.ops import reference
from octavo.ops.triton.sampling import draw_tokens
from octavo.sampling.sampler import Sampler
from octavo.worker.graphs import StepGraphs
from octavo.worker.worker import Worker
from tests.support.core_engine import check_core
from tests.support.paged_batches import Pool, step_batch
from tests.support.tiny_models import save_tiny

from .paged import relative_error

BLOCK, BLOCKS, SLIDING_BLOCKS, DIM = 4, 90, 70, 16
WINDOW = 9
LAYERS = (
    LayerSpec(4, 2, DIM, 0.25, sliding_window=WINDOW),
    LayerSpec(4, 2, DIM, 0.25),
    LayerSpec(4, 2, DIM, 0.25, sliding_window=WINDOW - 2, soft_cap=3.0),
    LayerSpec(4, 2, DIM, 0.25, soft_cap=3.0),
)
SECOND = SlidingBlocks(frozenset({0, 2}), SLIDING_BLOCKS)
HALF = torch.float16
BACKENDS = {"triton": TritonAttention, "invariant": InvariantAttention, "torch": TorchPagedAttention}
backends = pytest.mark.parametrize("name", BACKENDS)


def step(starts: list[int], counts: list[int], tables: list[torch.Tensor], device: torch.device, **more: Any) -> StepBatch:
    first, second = (step_batch(starts, counts, table, BLOCK) for table in tables)
    tensors = {n: v.to(device) for n, v in vars(first).items() if isinstance(v, torch.Tensor)}
    where = KindTables(second.block_tables.to(device), second.cache_slots.to(device))
    return StepBatch(**(vars(first) | tensors | {"sliding": where} | more))


def qkv(batch: StepBatch, layer: int, seed: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + layer)
    return [torch.randn(batch.num_tokens, h, DIM, generator=generator).to(HALF).to(device) for h in (4, 2, 2)]


def steps(device: torch.device) -> tuple[list[tuple[StepBatch, StepBatch]], list[torch.Tensor]]:
    """Steps of three rows, past the window, with the tables of both kinds, and the same for the oracle, which has one; the tables."""
    tables = [Pool(BLOCKS, BLOCK).tables([61, 40, 30]), Pool(SLIDING_BLOCKS, BLOCK, seed=1).tables([61, 40, 30])]
    told = [([0, 0, 0], [50, 30, 7]), ([50, 30, 7], [1, 1, 20]), ([51, 31, 27], [1, 1, 2]), ([52, 32, 29], [1, 1, 1])]
    both = [(step(s, c, tables, device), step_batch(s, c, tables[0], BLOCK)) for s, c in told]
    return both, tables


@backends
def test_each_kind_reads_its_own_blocks(name: str, device: torch.device) -> None:
    backend = BACKENDS[name](LAYERS, BLOCKS, BLOCK, HALF, device, sliding=SECOND)
    oracle = ReferenceAttention(LAYERS, BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
    for seed, (batch, plain) in enumerate(steps(device)[0]):
        attend, expected = backend.plan(batch), oracle.plan(plain)
        for layer in range(len(LAYERS)):
            q, k, v = qkv(batch, layer, seed, device)
            wanted = expected(layer, q.cpu().float(), k.cpu().float(), v.cpu().float())
            assert relative_error(attend(layer, q, k, v).cpu(), wanted.double()) < 5e-3
    assert backend.bytes_per_block(LAYERS, BLOCK, HALF) > 0


@pytest.mark.parametrize("name", ["triton", "invariant"])
@pytest.mark.parametrize("shape", [GraphShape(5, 5), GraphShape(4, 20, 2)])
def test_a_graph_reads_what_an_eager_step_reads(name: str, shape: GraphShape, device: torch.device) -> None:
    backend: Any = BACKENDS[name](LAYERS, BLOCKS, BLOCK, HALF, device, sliding=SECOND)
    batches = [batch for batch, _ in steps(device)[0]]
    for seed, batch in enumerate(batches[:-1]):
        attend = backend.plan(batch)
        for layer in range(len(LAYERS)):
            attend(layer, *qkv(batch, layer, seed, device))
    batch = batches[-1]
    plan = np.full(backend.graph_plan_size(shape), 77, np.int32)
    backend.graph_plan(batch.cpu_start, batch.cpu_count, shape, plan, None)
    kinds = []
    for kind in (0, 1):
        part = batch.of_kind(kind)
        blocks = torch.zeros(shape.rows, part.block_tables.shape[1], dtype=torch.int32, device=device)
        blocks[:3] = part.block_tables
        places = torch.zeros(shape.tokens, dtype=torch.int64, device=device)
        places[:3] = part.cache_slots
        kinds.append(KindTables(blocks, places))
    replayed: Attend = backend.graph_attend(torch.from_numpy(plan).to(device), shape, kinds)
    eager = backend.plan(batch)
    for layer in range(len(LAYERS)):
        given = qkv(batch, layer, 9, device)
        wide = [torch.cat([t, torch.zeros(shape.tokens - 3, *t.shape[1:], dtype=HALF, device=device)]) for t in given]
        assert relative_error(replayed(layer, *wide)[:3], eager(layer, *given).double()) < 1e-3


@pytest.mark.parametrize("last", [0, 1], ids=["the last layer slides", "the last layer sees everything"])
def test_the_wanted_rows_of_the_last_layer_are_read_by_its_kind(last: int, device: torch.device) -> None:
    layers = (LAYERS[1 - last], LAYERS[last])
    second = SlidingBlocks(frozenset(i for i, layer in enumerate(layers) if layer.sliding_window), SLIDING_BLOCKS)
    fused, plain = (TritonAttention(layers, BLOCKS, BLOCK, HALF, device, sliding=second) for _ in range(2))
    both, tables = steps(device)
    for seed, (batch, _) in enumerate(both[:2]):
        for backend in (fused, plain):
            attend = backend.plan(batch)
            for layer in range(2):
                attend(layer, *qkv(batch, layer, seed, device))
    starts, counts = [51, 31, 27], [1, 1, 3]
    batch = step(starts, counts, tables, device, cpu_wanted=np.asarray([0, 2], np.int32))
    rotation = Rotation(torch.cat([torch.ones(64, 8), torch.zeros(64, 8)], 1).to(device), batch.positions)
    q, k, v = qkv(batch, 1, 7, device)
    wanted = torch.tensor([0, 4], device=device)
    flat = torch.cat([t.reshape(batch.num_tokens, -1) for t in (q, k, v)], 1)
    attend = fused.plan(batch)
    assert attend.can_select  # type: ignore[attr-defined]
    got = attend.attend_wanted(1, flat.clone(), rotation, None, wanted)  # type: ignore[attr-defined]
    expected = plain.plan(step(starts, counts, tables, device))(1, q, k, v)[wanted].flatten(1)
    assert relative_error(got, expected.double()) < 5e-3


@backends
def test_copies_stay_within_their_kind(name: str, device: torch.device) -> None:
    backend: Any = BACKENDS[name](LAYERS, BLOCKS, BLOCK, HALF, device, sliding=SECOND)
    (batch, _), *_ = steps(device)[0]
    attend = backend.plan(batch)
    for layer in range(len(LAYERS)):
        attend(layer, *qkv(batch, layer, 0, device))

    def keys() -> list[torch.Tensor]:
        caches = backend._keys if name == "torch" else [backend.cache.of(layer)[0] for layer in range(len(LAYERS))]
        return [cache.float().nan_to_num().clone() for cache in caches]

    before = keys()
    pairs = [(1, 2), (2, 1), (BLOCKS + 5, BLOCKS + 6)]
    src, dst = (torch.tensor(n, dtype=torch.int32, device=device) for n in zip(*pairs, strict=True))
    backend.copy_blocks(src, dst)
    for layer, (old, new) in enumerate(zip(before, keys(), strict=True)):
        expected = old.clone()
        if layer in SECOND.layers:
            assert len(old) == SLIDING_BLOCKS
            expected[6] = old[5]
        else:
            assert len(old) == BLOCKS
            expected[2], expected[1] = old[1], old[2]
        assert torch.equal(new, expected)


def serve(folder: Path, length: int) -> tuple[list[list[int]], EngineCore]:
    """Tokens of two requests that begin alike, and of two that find their beginnings in the cache."""
    chance = np.random.default_rng(4)
    shared = chance.integers(3, 128, length).tolist()
    prompts = [shared + chance.integers(3, 128, 5 + i).tolist() for i in range(3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True, "dtype": "float16", "block_size": BLOCK, "max_model_len": length + 30, "max_num_seqs": 4,
        "max_num_batched_tokens": 256, "num_gpu_blocks_override": 4 * length // BLOCK + 40, "target_step_ms": None,
    }  # fmt: skip
    with LLM(str(folder), **settings) as llm:
        client = llm._client
        assert isinstance(client, InProcessClient) and isinstance(client._core, EngineCore)
        tokens = []
        for some in (prompts[:2], prompts[1:]):
            tokens += [list(o.outputs[0].token_ids) for o in llm.generate([{"prompt_token_ids": p} for p in some], greedy)]
            check_core(client._core)
        return tokens, client._core


def plain_rope_cache(
    qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    heads: int, *, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """`rope_cache`, which `test_fused_ops` compares: of all kernels it takes the interpreter longest."""
    parts, kv_heads = qkv.view(len(qkv), -1, DIM), keys.shape[1]
    q, k, v = parts.split([heads, kv_heads, kv_heads], dim=1)
    q, k = (reference.OPS.rope(reference.OPS.rms_norm(x, w, eps), table[positions]) for x, w in ((q, q_weight), (k, k_weight)))
    keys[slots // BLOCK, :, slots % BLOCK], values[slots // BLOCK, :, slots % BLOCK] = k, v
    parts[:, :heads] = q
    return parts[:, :heads]


def with_graphs(patch: pytest.MonkeyPatch, launched: list[GraphShape]) -> None:
    """Steps of a worker on a CPU go the way that graphs take, uncaptured; which shapes they took is noted."""
    shapes = [GraphShape(4, 4), GraphShape(4, 48, 4)]
    launch = StepGraphs.launch

    def graphs(worker: Worker, attention: Any, _: object) -> StepGraphs:
        made = StepGraphs(worker._model, attention, worker._tables, worker._state, draw_tokens, shapes, inflight=0)
        for shape in shapes:
            made.capture(shape)
        return made

    def noted(self: StepGraphs, plan: Any, captured: Any) -> torch.Tensor:
        launched.append(captured.layout.shape)
        return launch(self, plan, captured)

    patch.setattr(Worker, "_make_graphs", graphs)
    patch.setattr("octavo.worker.worker.Sampler", lambda *given, **named: Sampler(*given, **named | {"draw": draw_tokens}))
    patch.setattr(Worker, "_capture", lambda *_, **__: None)
    patch.setattr(StepGraphs, "launch", noted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there, tests/gpu runs whole workers")
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "as graphs"])
def test_a_worker_gives_the_same_tokens_while_old_blocks_go_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    kernels: Any = TritonAttention
    window, length = 6, kernels.reads_before_window + 20
    save_tiny(
        tmp_path, "gemma3", head_dim=DIM, sliding_window=window, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=length + 64,
    )  # fmt: skip
    expected, _ = serve(tmp_path, length)
    monkeypatch.setattr("octavo.attention.select.attention_class", lambda *_: kernels)
    monkeypatch.setattr("octavo.attention.paged_cache.rope_cache", plain_rope_cache)
    launched: list[GraphShape] = []
    if captured:
        with_graphs(monkeypatch, launched)
    found, core = serve(tmp_path, length)
    assert found == expected
    assert [kind.window for kind in core.kv.kinds] == [None, window + kernels.reads_before_window]
    assert ({shape.chunks for shape in launched} == {0, 4}) is captured
