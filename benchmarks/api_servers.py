"""What several API servers cost and bring: CPU time a streamed chunk, by process, and chunks a second at full speed.

A server as users start it, with a script in place of a model (`--debug-scripted-model`) whose steps take a fixed time, so that the
engine process does its real work but computes nothing. Many streams are read by bare sockets.

    python -m benchmarks.api_servers [--counts 1 2] [--streams 32] [--rate 2000] [--seconds 8]

--rate 0 lets the engine go as fast as it can. Every run is added to benchmarks/results/api_servers.json, with the load of the machine
before it: on a machine with two cores, engine, servers and clients share them, and only the CPU times compare.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results" / "api_servers.json"


def role(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return "engine" if "octavo.engine" in line else "api_server" if "api_servers.process" in line else "main"


def cpu_seconds(pid: int) -> dict[str, float]:
    """User and system time of the server's processes, by role."""
    main = psutil.Process(pid)
    seconds: dict[str, float] = {}
    for process in (main, *main.children(recursive=True)):
        times = process.cpu_times()
        seconds[role(process)] = seconds.get(role(process), 0.0) + times.user + times.system
    return seconds


async def read(port: int, until: float) -> list[float]:
    """When the chunks of one stream came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "hello", "stream": True, "max_tokens": 1 << 15, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    times = []
    try:
        while time.monotonic() < until:
            line = await reader.readline()
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
            elif not line:
                break
    finally:
        writer.close()
    return times


def measure(count: int, streams: int, rate: float, seconds: float) -> dict[str, Any]:
    from tests.support.octavo_process import environment, free_port
    from tests.support.tiny_checkpoint import write_tiny_checkpoint

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as log:
        folder = Path(name)
        checkpoint = write_tiny_checkpoint(folder / "checkpoint", max_model_len=1 << 16)
        script = folder / "script.json"
        delay = streams / rate * 1e3 if rate else 0.0
        script.write_text(json.dumps({"rules": [{"tokens": list(range(67, 93)), "cycle": True}], "default": [70], "step_delay_ms": delay}))
        port = free_port()
        settings = {"device": "cpu", "load-format": "dummy", "debug-scripted-model": script, "port": port, "api-server-count": count}
        settings["max-num-seqs"] = streams
        flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "octavo", "serve", str(checkpoint), "--disable-request-summary", *flags]
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
        try:
            while True:
                log.seek(0)
                if re.search("Listening on", text := log.read()):
                    break
                if process.poll() is not None:
                    raise SystemExit(text)
                time.sleep(0.05)
            before, began = cpu_seconds(process.pid), time.monotonic()

            async def clients() -> list[list[float]]:
                return await asyncio.gather(*(read(port, began + seconds) for _ in range(streams)))

            times = asyncio.run(clients())
            after, elapsed = cpu_seconds(process.pid), time.monotonic() - began
        finally:
            process.terminate()
            process.wait(20)
    chunks = sum(map(len, times))
    gaps = sorted(later - earlier for one in times for earlier, later in itertools.pairwise(one))
    used = {f"{name}_cpu_us_per_chunk": round((after[name] - before[name]) / chunks * 1e6, 1) for name in sorted(after)}
    return {
        "api_servers": count,
        "streams": streams,
        "offered_per_s": rate or None,
        "chunks_per_s": round(chunks / elapsed),
        **used,
        "gap_ms_p50": round(statistics.median(gaps) * 1e3, 2),
        "gap_ms_p99": round(gaps[int(len(gaps) * 0.99)] * 1e3, 2),
        "load_before": round(load, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2000)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    for _ in range(options.rounds):
        for count in options.counts:
            result = measure(count, options.streams, options.rate, options.seconds)
            print("  ".join(f"{name}={value}" for name, value in result.items()), flush=True)
            kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
            kept["runs"].append(result)
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
