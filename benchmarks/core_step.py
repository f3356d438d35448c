"""CPU cost of the core: one turn (plan, dispatch, settle, deltas, statistics) of steady decoding, without a model.

    PYTHONPATH=src python benchmarks/core_step.py

Prints a table and writes results/core_step.json. Also plays a trace of a million tokens of mixed traffic and checks that nothing
leaks: in the end every block is free or cached.

Times are CPU time of the thread, because the machine may have other things to do; wall time is given too. Each size is measured
several times; the table shows the best repeat and the JSON all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.loop import EngineCore
from octavo.core.simulate import EOS_TOKEN, InstantExecutor, simulation_config
from octavo.protocol.engine import NewRequest
from octavo.protocol.params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "core_step.json"
TARGET_MS = {256: 0.3, 1024: 1.0}


WINDOW = 128
CACHES: dict[str, dict[str, int]] = {"all tokens": {}, "window": {"window": WINDOW}, "two kinds": {"sliding_window": WINDOW}}
"""What the layers of the model see: everything, a window, or some of them the one and some the other."""


def steady_decode(running: int, inflight: int, steps: int, seed: int, *, quiet_gc: bool, cache: str = "all tokens") -> dict[str, float]:
    """Milliseconds a turn with `running` decoding requests of mixed lengths: CPU time, and wall time beside it.

    Args:
        quiet_gc: collect garbage rarely, as a server process does that has frozen what it allocated at start.
        cache: one of `CACHES`.
    """
    rng = random.Random(seed)
    config = simulation_config(max_num_seqs=running, max_model_len=4096, max_num_batched_tokens=16384, inflight=inflight)
    core = EngineCore(config, InstantExecutor(config, running * 256 + 1, **CACHES[cache]))
    for i in range(running):
        prompt = [rng.randrange(3, 1 << 15) for _ in range(rng.randint(32, 256))]
        sampling = SamplingParams(max_tokens=3000, ignore_eos=True, seed=i)
        core.add(NewRequest(str(i), prompt, sampling, arrival_time=0.0, eos_token_ids=[EOS_TOKEN]))
    while core.stats().waiting or core.stats().generation_tokens < 4 * running:
        core.step()
    gc.collect()
    gc.freeze()
    threshold = gc.get_threshold()
    if quiet_gc:
        gc.set_threshold(100_000, 20, 100)
    times = []
    for _ in range(steps):
        begin, cpu = time.perf_counter(), time.thread_time()
        outputs = core.step()
        times.append(((time.thread_time() - cpu) * 1e3, (time.perf_counter() - begin) * 1e3))
        assert len(outputs.deltas) == running
    gc.unfreeze()
    gc.set_threshold(*threshold)
    cpu_ms, wall_ms = zip(*times, strict=True)
    return {
        "min_ms": min(cpu_ms),
        "median_ms": float(np.median(cpu_ms)),
        "p99_ms": float(np.percentile(cpu_ms, 99)),
        "mean_ms": float(np.mean(cpu_ms)),
        "wall_median_ms": float(np.median(wall_ms)),
        "wall_p99_ms": float(np.percentile(wall_ms, 99)),
    }


def million_tokens(tokens: int, seed: int) -> dict[str, Any]:
    """Mixed traffic with shared prefixes, siblings and aborts in a cache that is too small for it, until `tokens` are through."""
    rng = random.Random(seed)
    config = simulation_config(max_num_seqs=256, max_model_len=2048, inflight=1, policy="fair")
    core = EngineCore(config, InstantExecutor(config, 6000))
    prefixes = [[rng.randrange(3, 1 << 15) for _ in range(rng.randint(64, 600))] for _ in range(8)]
    added = ended = 0
    begin = time.perf_counter()
    while True:
        stats = core.stats()
        if stats.prompt_tokens + stats.generation_tokens < tokens:
            while stats.waiting + added - ended < 300:
                prompt = rng.choice(prefixes)[: rng.randint(16, 600)] + [rng.randrange(3, 1 << 15) for _ in range(rng.randint(1, 200))]
                length, n = rng.randint(8, 300), rng.choice([1, 1, 1, 2])
                sampling = SamplingParams(max_tokens=400, min_tokens=length - 1, seed=added, n=n)
                core.add(NewRequest(f"r{added}", prompt, sampling, time.monotonic(), eos_token_ids=[EOS_TOKEN], fair_key=rng.choice("abc")))
                added += n
        elif not core.has_work():
            break
        if rng.random() < 0.02:
            core.life.abort(f"r{rng.randrange(max(1, added))}", None)
        ended += sum(delta.finish_reason is not None for delta in core.step().deltas)
    stats = core.stats()
    leaked = stats.kv_blocks_total - core.kv.available
    return {
        "tokens": stats.prompt_tokens + stats.generation_tokens,
        "sequences": ended,
        "steps": stats.step,
        "seconds": time.perf_counter() - begin,
        "preemptions": stats.preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        "prefix_hit_rate": stats.prefix_hits / stats.prefix_queries,
        "cow_copies": stats.cow_copies,
        "evictions": stats.evictions,
        "leaked_blocks": leaked,
        "accounting_repairs": core.kv.pool.repairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trace-tokens", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    runs = []
    print(f"{'running':>8} {'in flight':>9} {'gc':>8} {'cache':>10} {'median ms':>10} {'p99 ms':>8} {'target ms':>10} {'wall median':>12}")
    cases = [(0, False, "all tokens"), (1, False, "all tokens"), *((1, True, cache) for cache in CACHES)]
    for running in args.running:
        for inflight, quiet_gc, cache in cases:
            repeats = [steady_decode(running, inflight, args.steps, seed, quiet_gc=quiet_gc, cache=cache) for seed in range(args.repeats)]
            best = min(repeats, key=lambda r: r["median_ms"])
            target = TARGET_MS.get(running)
            gc_name = "quiet" if quiet_gc else "default"
            row = {
                "running": running,
                "in_flight": inflight,
                "gc": gc_name,
                "cache": cache,
                "target_ms": target,
                "best": best,
                "repeats": repeats,
            }
            runs.append(row)
            print(
                f"{running:>8} {inflight:>9} {gc_name:>8} {cache:>10} {best['median_ms']:>10.3f} {best['p99_ms']:>8.3f} {target or '-':>10} {best['wall_median_ms']:>12.3f}"
            )
    trace = million_tokens(args.trace_tokens, seed=0)
    print(
        f"trace: {trace['tokens']:,} tokens, {trace['sequences']:,} sequences, {trace['steps']:,} steps in {trace['seconds']:.1f} s, "
        f"{trace['preemptions']} preemptions, {trace['leaked_blocks']} blocks leaked"
    )
    result = {
        "benchmark": "core_step",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "steady_decode": runs,
        "trace": trace,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    if trace["leaked_blocks"] or trace["accounting_repairs"]:
        raise SystemExit("The trace leaked blocks.")


if __name__ == "__main__":
    main()
