"""What a step's matrix products and attention take on this CPU: the compiled kernels against torch float32, in the same run.

Shapes are those of the bundled model (30 layers, 4-bit layers, 8-bit head); weights are random. The contenders take turns, each
keeps its best round, and the ratios are what to read on a machine with other work. Writes benchmarks/results/cpu_kernels.json.

    python benchmarks/cpu_kernels.py [--threads 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.attention.base import LayerSpec, StepBatch
from octavo.attention.native_cpu import NativeCpuAttention
from octavo.attention.torch_paged import TorchPagedAttention
from octavo.cli.bench.results import environment, write_json
from octavo.config.device import usable_cores
from octavo.config.types import CpuActivations
from octavo.ops.cpu import abi, panels
from octavo.ops.packed import EncodedRows, LinearWeight, PanelWeight
from octavo.ops.registry import load_ops

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""(out, in) of qkv, attention output, gate and up, down."""
HEAD = (49152, 576)
CONTEXT = 216


def packed(rows: int, columns: int, encoding: str, block_bytes: int) -> PanelWeight:
    generator = np.random.default_rng(rows)
    blocks = generator.integers(0, 256, (rows, columns // 32, block_bytes), np.uint8)
    blocks[:, :, :4] = np.array([0.01, -0.08], np.float16).view(np.uint8)
    return PanelWeight((panels.pack_rows(EncodedRows(encoding, (rows, columns), blocks.reshape(rows, -1))),), rows, columns)


def best_of(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds + 1):  # the first warms up, and may win
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def matmuls(threads: int, rounds: int) -> dict[str, dict[str, float]]:
    ops, engine = load_ops("cpu"), abi.Engine(threads)
    layers = [[packed(n, k, "Q4_1", 20) for n, k in SHAPES] for _ in range(LAYERS)]
    head = packed(*HEAD, "Q8_0", 34)
    dense: list[LinearWeight] = [ops.pack_linear(torch.randn(n, k)) for _ in range(LAYERS) for n, k in SHAPES]
    dense.append(ops.pack_linear(torch.randn(*HEAD)))
    results = {}
    for tokens in (1, 8, 32, 128):
        inputs = {k: torch.randn(tokens, k) for k in (576, 1536)}

        def native(activations: CpuActivations, inputs: dict[int, torch.Tensor] = inputs) -> None:
            for layer in layers:
                for weight in layer:
                    panels.linear(engine, inputs[weight.in_features], weight, None, activations=activations)
            panels.linear(engine, inputs[576], head, None, activations=activations)

        def plain(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in dense:
                ops.linear(inputs[weight.in_features], weight, None)

        contenders: dict[str, Callable[[], None]] = {f"native {a}": partial(native, a) for a in abi.READ_AS}
        contenders["torch float32"] = plain
        results[str(tokens)] = best_of(contenders, rounds)
    return results


def attention(threads: int, rounds: int) -> dict[str, dict[str, float]]:
    specs = tuple(LayerSpec(9, 3, 64, 0.125) for _ in range(LAYERS))
    results = {}
    for name, starts, counts in (
        *((f"{n} decodes at {CONTEXT}", [CONTEXT - 1] * n, [1] * n) for n in (1, 8, 32)),
        ("prompt of 152", [0], [152]),
        ("prompt of 1024", [0], [1024]),
    ):
        blocks = -(-(starts[0] + counts[0]) // 16)
        tables = (torch.randperm(len(starts) * blocks) + 1).view(len(starts), blocks).int()
        batch = step_of(starts, counts, tables)
        shape = (specs, len(starts) * blocks + 1, 16)
        native = NativeCpuAttention(*shape, torch.float16, torch.device("cpu"), threads)
        plain = TorchPagedAttention(*shape, torch.float32, torch.device("cpu"))
        for backend in (native, plain):
            for cache in (*backend._keys, *backend._values):
                cache.normal_()
        q, k, v = (torch.randn(batch.num_tokens, heads, 64) for heads in (9, 3, 3))

        def run(backend: Any, q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, batch: StepBatch = batch) -> None:
            attend = backend.plan(batch)
            for layer in range(LAYERS):
                attend(layer, q, k, v)

        results[name] = best_of({"native float16 cache": lambda b=native: run(b), "torch float32 cache": lambda b=plain: run(b)}, rounds)
    return results


def step_of(starts: list[int], counts: list[int], tables: torch.Tensor) -> StepBatch:
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    return StepBatch(
        cpu_start=np.asarray(starts, np.int32),
        cpu_count=np.asarray(counts, np.int32),
        num_decodes=len(counts) if max(counts) == 1 else 0,
        num_tokens=sum(counts),
        max_context=starts[0] + counts[0],
        token_ids=torch.zeros_like(positions),
        positions=positions,
        row_of_token=rows,
        block_tables=tables,
        cache_slots=tables[rows, positions // 16].long() * 16 + positions % 16,
        context_lens=torch.tensor([s + c for s, c in zip(starts, counts, strict=True)], dtype=torch.int32),
    )


def show(title: str, results: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(results.values())))
    print(f"\n{title}, ms{'':24}" + "".join(f"{name:>22}" for name in names) + "   torch / native")
    for case, row in results.items():
        print(f"{case:<34}" + "".join(f"{row[name]:22.1f}" for name in names) + f"{row[names[-1]] / row[names[0]]:15.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if abi.library() is None:
        raise SystemExit("The compiled CPU kernels are not there: pip install -e . with a C++ compiler, then try again.")
    torch.set_num_threads(options.threads)
    level = abi.LEVELS[abi.loaded().octavo_level()]
    print(f"kernels: {level}, {options.threads} threads")
    with torch.inference_mode():
        products, attended = matmuls(options.threads, options.rounds), attention(options.threads, options.rounds)
    show("All matrix products of a step, by tokens", products)
    show("All attention of a step", attended)
    path = Path(__file__).parent / "results" / "cpu_kernels.json"
    figures = {"level": level, "threads": options.threads, "matmul_ms": products, "attention_ms": attended}
    write_json(path, {**figures, "environment": environment()})


if __name__ == "__main__":
    main()
