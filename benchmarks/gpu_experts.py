"""Experts of a mixture on one GPU: measured time against the floor (the chosen experts' weights once, or the products' FLOPs).

    python benchmarks/gpu_experts.py

Shapes of Qwen3-30B-A3B and Mixtral-8x7B (one layer) at decode and prefill sizes. Times are CUDA-graph replays over routings and
inputs that differ, and over as many copies of the weights as the L2 cache needs to be passed. Writes benchmarks/results/gpu_experts.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_attention import graph_us
from octavo.ops.packed import ExpertsWeight
from octavo.ops.triton.experts import experts

BYTES_PER_S = 4.55e12
FLOPS = 790e12
L2_BYTES = 60e6
DTYPE = torch.bfloat16
MODELS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral-8x7B": (8, 2, 4096, 14336)}
"""experts, chosen, hidden, width of an expert."""
TOKENS = (1, 8, 32, 64, 256, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_experts.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    device = torch.device("cuda")
    results = []
    for model, (count, top_k, hidden, inner) in MODELS.items():
        size = 3 * count * hidden * inner * DTYPE.itemsize
        copies = max(1, int(2 * L2_BYTES / size) + 1)
        layers = [
            (
                ExpertsWeight.plain(torch.randn(count, 2 * inner, hidden, device=device, dtype=DTYPE)),
                ExpertsWeight.plain(torch.randn(count, hidden, inner, device=device, dtype=DTYPE)),
            )
            for _ in range(copies)
        ]
        for tokens in TOKENS:
            calls, used = [], 0
            for i in range(8):
                x = torch.randn(tokens, hidden, device=device, dtype=DTYPE)
                chosen = torch.rand(tokens, count, device=device).topk(top_k).indices
                weights = torch.rand(tokens, top_k, device=device)
                used += len(chosen.unique())
                calls.append(partial(experts, x, chosen, weights, *layers[i % copies], None, None, "silu"))
            us = graph_us(calls)
            floor = max(used / 8 / count * size / BYTES_PER_S, 6 * tokens * top_k * hidden * inner / FLOPS) * 1e6
            results.append({"model": model, "tokens": tokens, "us": round(us, 1), "floor_us": round(floor, 1)})
            print(f"{model:15} {tokens:5} tokens {us:9.1f} us, floor {floor:8.1f} ({floor / us:.0%})", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"bench": "gpu_experts", "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
