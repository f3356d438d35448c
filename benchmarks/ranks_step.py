"""What a step costs the engine's process more when other ranks take part: encoding the plan and handing it on.

    PYTHONPATH=src python benchmarks/ranks_step.py

A reader in another process takes the plans and decodes them, as a rank does. CPU time of the sender, and the time until the reader has it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from octavo.executor.ring import RingReader, RingWriter, make_memory
from octavo.protocol.ranks import RunStep, StopRank, decode_down, encode
from octavo.protocol.step import StepPlan

RESULTS = Path(__file__).parent / "results" / "ranks_step.json"


def decode_step(rows: int, step: int) -> StepPlan:
    """Steady decoding: every 16th row gets a block."""
    slots, nothing = np.arange(rows, dtype=np.int32), np.zeros(0, np.int32)
    growing = slots[step % 16 :: 16]
    return StepPlan(
        step_id=step,
        init=[],
        free_slots=nothing,
        slots=slots,
        start=np.full(rows, 1000 + step, np.int32),
        count=np.ones(rows, np.int32),
        sample=np.ones(rows, np.bool_),
        table_slots=growing,
        table_index=np.full(len(growing), 62, np.int32),
        table_blocks=growing + 1,
        copy_src=nothing,
        copy_dst=nothing,
        num_tokens=rows,
        max_context=1001 + step,
    )


def read(memory: int, index: int, pipe: int, arrived: Any, steps: int) -> None:
    """A rank that computes nothing. Sends back when each plan had been decoded."""
    reader, times = RingReader(memory, index, pipe), []
    while (data := reader.receive()) is not None:
        message = decode_down(data)
        times.append(time.monotonic())
        reader.finished()
        if isinstance(message, StopRank):
            break
    arrived.send(times[:steps])


def measure(rows: int, ranks: int, steps: int) -> dict[str, float]:
    """Steps a few milliseconds apart, as a model leaves them."""
    memory = make_memory()
    pipes = [os.pipe() for _ in range(ranks)]
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(ranks)]
    children = [context.Process(target=read, args=(memory, i, pipes[i][0], ends[i][1], steps)) for i in range(ranks)]
    for child in children:
        child.start()
    writer = RingWriter(memory, [write for _, write in pipes])
    cost, sent = [], []
    for step in range(steps):
        plan = decode_step(rows, step)
        time.sleep(0.002)
        sent.append(time.monotonic())
        began = time.process_time()
        writer.send(encode(RunStep(plan)))
        cost.append(time.process_time() - began)
    writer.send(encode(StopRank()))
    arrivals = [end.recv() for end, _ in ends]
    for child in children:
        child.join()
    late = [max(times) - start for start, *times in zip(sent, *arrivals, strict=True)]
    return {
        "sender_cpu_us": round(statistics.median(cost) * 1e6, 1),
        "until_decoded_us": round(statistics.median(late) * 1e6, 1),
        "until_decoded_p99_us": round(sorted(late)[int(0.99 * len(late))] * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    runs = [{"rows": rows, "other_ranks": ranks, **measure(rows, ranks, args.steps)} for rows in (1, 32, 256) for ranks in (1, 3)]
    print(f"{'rows':>5} {'other ranks':>12} {'sender CPU us':>14} {'until decoded us':>17} {'p99':>7}")
    for run in runs:
        line = f"{run['rows']:>5} {run['other_ranks']:>12} {run['sender_cpu_us']:>14} {run['until_decoded_us']:>17}"
        print(f"{line} {run['until_decoded_p99_us']:>7}")
    args.out.write_text(json.dumps({"benchmark": "ranks_step", "python": platform.python_version(), "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
