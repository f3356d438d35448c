"""Experts of a mixture on a CPU: the grouped product against a loop over experts.

    python benchmarks/cpu_experts.py

Both compute the same in float32, in turns in one process; of each the best of many calls counts, because other programs share the machine.
The load of the machine is written down. Writes benchmarks/results/cpu_experts.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.ops.registry import load_ops

SHAPES = ((8, 2, 1024, 2048), (8, 2, 2048, 1408), (64, 6, 1024, 704))
"""Experts, chosen, hidden, width of an expert."""
TOKENS = (1, 64)


def best_of(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Seconds of the fastest of `rounds` calls of each, taken in turns."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(rounds):
        for i, call in enumerate(calls):
            began = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_experts.json"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    grouped, loop = load_ops("cpu"), load_ops("reference")
    results = []
    for experts, chosen_count, hidden, inner in SHAPES:
        weights = [torch.randn(experts, 2 * inner, hidden) * 0.02, torch.randn(experts, hidden, inner) * 0.02]
        packed, plain = ([ops.pack_experts(w.clone()) for w in weights] for ops in (grouped, loop))
        for tokens in TOKENS:
            x = torch.randn(tokens, hidden)
            chosen = torch.rand(tokens, experts).topk(chosen_count, -1).indices
            share = torch.rand(tokens, chosen_count)
            run = [partial(ops.experts, x, chosen, share, *w, None, None, "silu") for ops, w in ((grouped, packed), (loop, plain))]
            torch.testing.assert_close(run[0](), run[1](), atol=1e-3, rtol=1e-3)
            ours, theirs = best_of(run, options.rounds)
            result = {
                "experts": experts, "chosen": chosen_count, "hidden": hidden, "inner": inner, "tokens": tokens,
                "grouped_ms": ours * 1e3, "loop_ms": theirs * 1e3, "ratio": theirs / ours,
            }  # fmt: skip
            results.append(result)
            print(
                f"{experts:3} experts, {chosen_count} chosen, {hidden} x {inner}, {tokens:3} tokens: grouped {ours * 1e3:7.2f} ms, "
                f"loop {theirs * 1e3:7.2f} ms = {theirs / ours:.1f}x"
            )
    report = {"bench": "cpu_experts", "threads": options.threads, "load": os.getloadavg()[0], "results": results}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
