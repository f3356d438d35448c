"""Fused kernels on one GPU: measured time against the floor (bytes that must move, each once, at the copy bandwidth).

    python benchmarks/gpu_ops.py

Shapes of Llama-3.1-8B and Qwen3-0.6B at decode and prefill sizes. Times are CUDA-graph replays over inputs rotated past the L2
cache. Prints a table and writes benchmarks/results/gpu_ops.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from benchmarks.gpu_attention import graph_us
from octavo.ops.triton.gated_mul import gated_mul
from octavo.ops.triton.gather_inputs import StepInputs, gather_step_inputs
from octavo.ops.triton.rms_norm import add_rms_norm, rms_norm
from octavo.ops.triton.rope_cache import rope_cache

COPY_BYTES_PER_S = 4.28e12
L2_BYTES = 60e6
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
MODELS = {"8B": (4096, 14336, 32, 8, 128, False), "0.6B": (1024, 3072, 16, 8, 128, True)}
"""hidden, intermediate, heads, kv heads, head dim, QK-norm."""
TOKENS = (1, 32, 256, 8192)


def rotations(size: float) -> int:
    """Input sets whose total is well past the L2 cache."""
    return max(2, min(64, int(3 * L2_BYTES / size) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_ops.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    results: list[dict[str, object]] = []

    def measure(op: str, model: str, tokens: int, size: float, calls: list[Callable[[], object]]) -> None:
        us, floor = graph_us(calls), size / COPY_BYTES_PER_S * 1e6
        results.append({"op": op, "model": model, "tokens": tokens, "us": round(us, 2), "floor_us": round(floor, 2)})
        print(f"{op:18} {model:5} {tokens:5} tokens {us:8.2f} us, floor {floor:7.2f}")

    for model, (hidden, intermediate, heads, kv_heads, head_dim, norm) in MODELS.items():
        weight = torch.randn(hidden, device=DEVICE, dtype=DTYPE)
        head_weight = torch.randn(head_dim, device=DEVICE, dtype=DTYPE) if norm else None
        cos_sin = torch.randn(16384, head_dim, device=DEVICE)
        blocks = 8192 * 4 // 16
        caches = torch.zeros(2, blocks, kv_heads, 16, head_dim, device=DEVICE, dtype=DTYPE)
        for tokens in TOKENS:
            n = rotations(tokens * hidden * 4)
            xs = [torch.randn(tokens, hidden, device=DEVICE, dtype=DTYPE) for _ in range(n)]
            rs = [torch.randn(tokens, hidden, device=DEVICE, dtype=DTYPE) for _ in range(n)]
            measure("rms_norm", model, tokens, tokens * hidden * 4, [lambda x=x, w=weight: rms_norm(x, w, 1e-5) for x in xs])  # type: ignore[misc]
            measure(
                "add_rms_norm",
                model,
                tokens,
                tokens * hidden * 8,
                [lambda x=x, r=r, w=weight: add_rms_norm(x, r, w, 1e-5) for x, r in zip(xs, rs, strict=True)],  # type: ignore[misc]
            )
            gates = [torch.randn(tokens, 2 * intermediate, device=DEVICE, dtype=DTYPE) for _ in range(rotations(tokens * intermediate * 6))]
            measure("gated_mul", model, tokens, tokens * intermediate * 6, [lambda g=g: gated_mul(g, "silu") for g in gates])  # type: ignore[misc]
            width = (heads + 2 * kv_heads) * head_dim
            qkvs = [torch.randn(tokens, width, device=DEVICE, dtype=DTYPE) for _ in range(rotations(tokens * width * 4))]
            positions = torch.randint(0, 16384, (tokens,), device=DEVICE)
            slots = torch.randperm((blocks - 1) * 16, device=DEVICE)[:tokens] + 16

            def rope(
                qkv: torch.Tensor,
                positions: torch.Tensor = positions,
                slots: torch.Tensor = slots,
                caches: torch.Tensor = caches,
                cos_sin: torch.Tensor = cos_sin,
                heads: int = heads,
                head_weight: torch.Tensor | None = head_weight,
            ) -> None:
                rope_cache(qkv, positions, cos_sin, slots, caches[0], caches[1], heads, q_weight=head_weight, k_weight=head_weight)

            measure("rope_cache", model, tokens, tokens * (width * 4 + head_dim * 4), [lambda q=q, rope=rope: rope(q) for q in qkvs])  # type: ignore[misc]
    for rows in (1, 256, 1024):
        token_table = torch.randint(0, 1000, (rows, 16384), dtype=torch.int32, device=DEVICE)
        block_table = torch.randint(1, 1000, (rows, 1024), dtype=torch.int32, device=DEVICE)
        contexts = torch.randint(101, 2001, (rows,), dtype=torch.int32, device=DEVICE)
        order = torch.randperm(rows, device=DEVICE).int()
        inputs, count = StepInputs.allocate(rows, rows, 1024, DEVICE), torch.tensor([rows], dtype=torch.int32, device=DEVICE)

        def gather(
            order: torch.Tensor = order,
            contexts: torch.Tensor = contexts,
            count: torch.Tensor = count,
            token_table: torch.Tensor = token_table,
            block_table: torch.Tensor = block_table,
            inputs: StepInputs = inputs,
        ) -> None:
            gather_step_inputs(order, contexts, count, token_table, [block_table], 16, inputs)

        size = float(((contexts + 15) // 16).sum()) * 8 + rows * 40
        measure("gather_inputs", "-", rows, size, [gather, gather, gather])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    args.out.write_text(json.dumps({**versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
