"""FlashInfer's paged attention against Octavo's own on one GPU: what a layer of an 8B shape costs with either, and a step's planning.

    python benchmarks/gpu_flashinfer.py

Both backends get the same steps with the same cache. A layer's time is that of rotation, cache write and attention, replayed as one
graph over several layers' caches, so that the L2 cache does not answer; what planning takes is the host's time, a step. Last come
whole layers (products, norms, attention): as one graph, which the engine makes of its own kernels alone, and launched one by one
behind a plan, as it runs FlashInfer's. Needs flashinfer-python. Prints a table and writes benchmarks/results/gpu_flashinfer.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from benchmarks.gpu_attention import BLOCK, DEVICE, FLOAT8, graph_us, random_cache, tables
from benchmarks.gpu_throughput import SHAPES
from octavo.attention.base import LayerSpec, StepBatch
from octavo.attention.flashinfer import FlashInferAttention
from octavo.attention.triton import TritonAttention
from octavo.layers.rope import Rotation
from octavo.models.assembly import Assembly
from octavo.models.decoder import Decoder
from octavo.models.registry import model_spec
from octavo.ops.registry import load_ops

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
BACKENDS: dict[str, Any] = {"octavo": TritonAttention, "flashinfer": FlashInferAttention}
WHOLE_LAYERS = 6
"""Enough weights to pass the L2 cache many times."""


@dataclass(frozen=True)
class Case:
    name: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    cache_dtype: torch.dtype = DTYPE


CASES = (
    Case("1 x 1024", (1023,), (1,)),
    Case("32 x 256", (255,) * 32, (1,) * 32),
    Case("32 x 843", tuple(632 + 422 * row // 31 for row in range(32)), (1,) * 32),
    Case("32 x 4096", (4095,) * 32, (1,) * 32),
    Case("32 x 4096 fp8", (4095,) * 32, (1,) * 32, FLOAT8),
    Case("8k from 0", (0,), (8192,)),
    Case("31 x 843 and 512 from 0", (842,) * 31 + (0,), (1,) * 31 + (512,)),
)


def batch_of(case: Case) -> tuple[StepBatch, int]:
    """(The step, blocks in the cache.)"""
    starts, counts = np.array(case.starts, np.int32), np.array(case.counts, np.int32)
    table, num_blocks = tables(starts + counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = torch.from_numpy(np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])).to(DEVICE)
    row_of_token = torch.from_numpy(rows).to(DEVICE)
    slots = table[row_of_token, positions // BLOCK].long() * BLOCK + positions % BLOCK
    batch = StepBatch(
        cpu_start=starts,
        cpu_count=counts,
        num_decodes=int((counts == 1).sum()),
        num_tokens=len(rows),
        max_context=int((starts + counts).max()),
        token_ids=torch.zeros_like(positions),
        positions=positions,
        row_of_token=row_of_token,
        block_tables=table,
        cache_slots=slots,
        context_lens=torch.from_numpy(starts + counts).to(DEVICE),
    )
    return batch, num_blocks


def host_us(call: Callable[[], object], repeats: int = 20) -> float:
    """Median microseconds of the host, the device idle before each."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def attention(case: Case) -> dict[str, object]:
    batch, num_blocks = batch_of(case)
    bytes_of_layer = 2 * num_blocks * KV_HEADS * BLOCK * HEAD_DIM * case.cache_dtype.itemsize
    layers = max(2, min(12, int(4e8 / bytes_of_layer) + 1))
    spec = LayerSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
    qkv = torch.randn(batch.num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=DEVICE, dtype=DTYPE)
    # Turned by 45 degrees again and again: what stays in place must not grow.
    rotation = Rotation(torch.full((batch.max_context, HEAD_DIM), 0.5**0.5, device=DEVICE), batch.positions)
    result: dict[str, object] = {"case": case.name, "layers": layers}
    outputs, untouched = [], qkv.clone()  # Queries are turned where they lie.
    cached = random_cache((2, num_blocks, KV_HEADS, BLOCK, HEAD_DIM), case.cache_dtype)
    for name, kind in BACKENDS.items():
        backend = kind((spec,) * layers, num_blocks, BLOCK, case.cache_dtype, DEVICE, model_dtype=DTYPE)
        for layer in range(layers):
            backend.cache.of(layer).copy_(cached)
        attend = backend.plan(batch)
        outputs.append(attend.attend_qkv(0, untouched.clone(), rotation, None).float())
        plan_us = host_us(functools.partial(backend.plan, batch))
        attend = backend.plan(batch)
        us = graph_us([functools.partial(attend.attend_qkv, layer, qkv, rotation, None) for layer in range(layers)])
        result[name] = {"layer_us": round(us, 2), "plan_us": round(plan_us, 1)}
        del backend, attend
    result["difference"] = float((outputs[0] - outputs[1]).norm() / outputs[0].norm())
    return result


def whole_layers(rows: int, context: int) -> dict[str, object]:
    """Microseconds a layer of the 8B shape at `rows` decodes."""
    spec, family = model_spec({**SHAPES["llama-3.1-8b"], "num_hidden_layers": WHOLE_LAYERS})
    assembly = Assembly(spec, family.weights, load_ops("cuda"), DTYPE, DEVICE)
    with torch.no_grad():
        for _ in assembly.fill_dummy(0):
            pass
        model = Decoder(spec, assembly.finish(), load_ops("cuda"), max_length=2048)
    batch, num_blocks = batch_of(Case("", (context - 1,) * rows, (1,) * rows))
    tokens = torch.randint(0, spec.vocab_size, (rows,), device=DEVICE)
    result: dict[str, object] = {"case": f"whole layers, {rows} x {context}", "layers": WHOLE_LAYERS}
    for name, kind in BACKENDS.items():
        backend = kind(spec.layer_specs, num_blocks, BLOCK, DTYPE, DEVICE, model_dtype=DTYPE)
        for layer in range(WHOLE_LAYERS):
            backend.cache.of(layer).normal_()
        attend = backend.plan(batch)
        captured = graph_us([functools.partial(model.forward, tokens, batch.positions, attend)]) / WHOLE_LAYERS

        def step(backend: Any = backend) -> None:
            model.forward(tokens, batch.positions, backend.plan(batch))
            torch.cuda.synchronize()

        step()
        result[name] = {"graph_us": round(captured, 1), "one_by_one_us": round(host_us(step) / WHOLE_LAYERS, 1)}
        del backend, attend
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait-for", type=Path, help="Compile everything first, then start to measure once this file is there.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_flashinfer.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    import flashinfer

    torch.manual_seed(0)
    if args.wait_for is not None:
        whole_layers(32, 256)
        for case in CASES:
            attention(case)
        print("compiled", flush=True)
        while not args.wait_for.exists():
            time.sleep(0.05)
    results = [attention(case) for case in CASES] + [whole_layers(32, 256)]
    for result in results:
        print(json.dumps(result), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    versions["flashinfer"] = flashinfer.__version__
    args.out.write_text(json.dumps({**versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
