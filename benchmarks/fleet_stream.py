"""What streams lose on the way through a fleet (`octavo deploy`), beside a server of its own with the same scripted engine.

    PYTHONPATH=src python -m benchmarks.fleet_stream [--streams 1 8 24] [--tokens 150]

Both run at once on this machine and are asked in turns. Prints chunks a second and the gaps between a stream's reads, and writes
benchmarks/results/fleet_stream.json with the load of the machine before it. Needs ray[serve].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

RESULTS = Path(__file__).parent / "results" / "fleet_stream.json"
DELAY_MS = 20
"""Of the scripted engine, a step."""
ROOT = Path(__file__).parents[1]


def flags(folder: Path, streams: int) -> list[str]:
    from tests.support.scripts import scripted_args, token_ids

    rule = {"prompt_contains_ids": token_ids("slow"), "tokens": token_ids("abcde"), "cycle": True, "delay_ms": DELAY_MS}
    args = scripted_args(folder, default="Hello", rules=[rule])
    return [
        args.model, "--load-format", "dummy", "--device", "cpu", "--debug-scripted-model", str(args.debug_scripted_model),
        "--served-model-name", "tiny", "--max-num-seqs", str(streams), "--host", "127.0.0.1",
    ]  # fmt: skip


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def read(client: httpx.AsyncClient, tokens: int, gaps: list[float]) -> int:
    """One stream: the time between its reads, and how many chunks it had."""
    body = {"model": "tiny", "prompt": "slow", "max_tokens": tokens, "stream": True, "temperature": 0}
    last, chunks = 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for part in reply.aiter_raw():
            now, count = time.perf_counter(), part.count(b"data: {")
            chunks += count
            if last and count:
                gaps.append(now - last)
            last = now
    return chunks


async def measure(url: str, streams: int, tokens: int) -> dict[str, float]:
    gaps: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=streams)) as client:
        began = time.perf_counter()
        chunks = await asyncio.gather(*(read(client, tokens, gaps) for _ in range(streams)))
        seconds = time.perf_counter() - began
    gaps.sort()
    return {
        "chunks_per_s": round(sum(chunks) / seconds, 1),
        "gap_ms_median": round(1e3 * statistics.median(gaps), 1),
        "gap_ms_p99": round(1e3 * gaps[int(0.99 * len(gaps))], 1),
    }


def wait_for(url: str) -> None:
    for _ in range(300):
        try:
            if httpx.get(url + "/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    sys.exit(f"{url} does not answer.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 24])
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    from ray import cluster_utils

    load = os.getloadavg()[0]
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}"
    ports = free_port(), free_port()
    urls = {name: f"http://127.0.0.1:{port}" for name, port in zip(("server", "fleet"), ports, strict=True)}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        common = flags(Path(folder), max(args.streams))
        command = [sys.executable, "-m", "octavo"]
        server = subprocess.Popen([*command, "serve", *common, "--port", str(ports[0])], stderr=subprocess.DEVNULL)
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            os.environ["RAY_ADDRESS"] = cluster.address
            subprocess.run([*command, "deploy", *common, "--port", str(ports[1]), "--proxies", "head"], check=True)
            wait_for(urls["server"])
            for streams in args.streams:
                for name, url in urls.items():
                    runs.append({"to": name, "streams": streams, **asyncio.run(measure(url, streams, args.tokens))})
                    print(runs[-1], flush=True)
            subprocess.run([*command, "deploy", "--delete"], check=True)
        finally:
            server.terminate()
            server.wait()
            cluster.shutdown()
    report = {"benchmark": "fleet_stream", "cores": os.cpu_count(), "load_before": round(load, 2), "step_ms": DELAY_MS, "runs": runs}
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
