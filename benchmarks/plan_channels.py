"""How a step's plan reaches another rank: the ring in shared memory against a link over loopback TCP, in turns in one run.

    PYTHONPATH=src python benchmarks/plan_channels.py

Times of the sender's own work, which every step has to pay, and from there to the moment when another process has the decoded plan and
has said so through a pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.executor.link import LinkReader, LinkWriter, prepare
from octavo.executor.ring import RingReader, RingWriter, make_memory
from octavo.protocol.params import SamplingParams
from octavo.protocol.ranks import RunStep, decode_down, encode
from octavo.protocol.step import SlotInit, StepPlan

RESULTS = Path(__file__).parent / "results" / "plan_channels.json"


class Reader(Protocol):
    def receive(self) -> bytes | None: ...

    def finished(self) -> None: ...


class Writer(Protocol):
    def send(self, data: bytes) -> None: ...


def plan(rows: int, prompt: int) -> StepPlan:
    """A decode step of so many rows, with a new request of so many tokens in it."""
    ids, none = np.arange(rows, dtype=np.int32), np.empty(0, np.int32)
    init = [SlotInit(0, np.arange(prompt, dtype=np.int32), 0, none, SamplingParams(), 0, [])] if prompt else []
    return StepPlan(
        step_id=1, init=init, free_slots=none, slots=ids, start=ids + 900, count=np.ones(rows, np.int32), sample=np.ones(rows, np.bool_),
        table_slots=ids[::16], table_index=ids[::16], table_blocks=ids[::16], copy_src=none, copy_dst=none, num_tokens=rows, max_context=1000,
    )  # fmt: skip


def ring() -> tuple[Writer, Callable[[], Reader]]:
    memory, (read, write) = make_memory(), os.pipe()
    return RingWriter(memory, [write]), lambda: RingReader(memory, 0, read)


def link() -> tuple[Writer, Callable[[], Reader]]:
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    for sock in (near, far):
        prepare(sock)
    return LinkWriter(near), lambda: LinkReader(far, lambda: os._exit(1))


def other_process(open_reader: Callable[[], Reader]) -> tuple[int, int]:
    """Its id, and the reading end of a pipe with a byte for each plan that it has decoded."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        reader = open_reader()
        while data := reader.receive():
            decode_down(data)
            reader.finished()
            os.write(write, b"x")
        os._exit(0)
    return pid, read


def measure(writer: Writer, done: int, step: StepPlan, count: int) -> tuple[list[float], list[float]]:
    """Microseconds of (encoding and sending, until it is there) of each of `count` plans."""
    sending, arriving = [], []
    for _ in range(count):
        began = time.perf_counter()
        writer.send(encode(RunStep(step)))
        sent = time.perf_counter()
        os.read(done, 1)
        arriving.append((time.perf_counter() - began) * 1e6)
        sending.append((sent - began) * 1e6)
        time.sleep(0.001)  # a step's time: the reader waits again
    return sending, arriving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    writers = {"ring": ring(), "link": link()}
    channels = {name: (writer, other_process(reader)) for name, (writer, reader) in writers.items()}
    rows: list[dict[str, Any]] = []
    for batch, prompt in ((1, 0), (64, 0), (256, 0), (64, 8192)):
        step, best = plan(batch, prompt), {name: ([], []) for name in channels}
        for _ in range(options.rounds):
            for name, (writer, (_, done)) in channels.items():
                sending, arriving = measure(writer, done, step, options.count)
                best[name][0].append(statistics.median(sending))
                best[name][1].append(statistics.median(arriving))
        for name, (sent, there) in best.items():
            row = {"channel": name, "rows": batch, "new_prompt_tokens": prompt, "bytes": len(encode(RunStep(step)))}
            row |= {"send_us": round(min(sent), 1), "there_us": round(min(there), 1), "there_us_rounds": [round(t, 1) for t in there]}
            rows.append(row)
            print(row)
    result = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for _, (pid, _) in channels.values():  # each has the other's ends too: neither sees ours close
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
