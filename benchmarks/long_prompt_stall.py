"""What a long prompt does to the streams beside it: gaps between their tokens before and while it is computed.

A real server with the bundled model (or --model) answers a few short chats; in the middle of that comes one long prompt. The scheduler
cuts it into chunks that should keep a step near --target-step-ms.

    python -m benchmarks.long_prompt_stall [--streams 4] [--prompt-tokens 7000] [--runs 1]

Every run is added to benchmarks/results/long_prompt_stall.json, with the load of the machine before it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

RESULTS = Path(__file__).parent / "results" / "long_prompt_stall.json"
BEFORE = 4.0
"""Seconds of streaming before the long prompt comes."""


@contextlib.contextmanager
def server(model: str, target_ms: float | None) -> Iterator[str]:
    """The address of a server process."""
    command = [sys.executable, "-m", "octavo", "serve", "--host", "127.0.0.1", "--port", "0", "--disable-request-summary"]
    command += [model] if model else []
    command += ["--target-step-ms", str(target_ms)] if target_ms else []
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while True:
                log.seek(0)
                text = log.read()
                if found := re.search(r"Listening on (http\S+)", text):
                    break
                if process.poll() is not None:
                    raise SystemExit(text)
                time.sleep(0.05)
            yield found[1]
        finally:
            process.terminate()
            process.wait(20)


async def stream(client: httpx.AsyncClient, times: list[float], until: asyncio.Event) -> None:
    """Token times of one completion after another."""
    while not until.is_set():
        body = {"prompt": f"Story {random.random()}: once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.monotonic())
                if until.is_set():
                    return
        times.append(math.nan)  # between two completions there is no gap to count


async def run(url: str, streams: int, prompt_tokens: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        done = asyncio.Event()
        times: list[list[float]] = [[] for _ in range(streams)]
        tasks = [asyncio.create_task(stream(client, one, done)) for one in times]
        await asyncio.sleep(BEFORE)
        begun = time.monotonic()
        prompt = [random.randrange(1000, 40000) for _ in range(prompt_tokens)]
        reply = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        reply.raise_for_status()
        ended = time.monotonic()
        await asyncio.sleep(1.0)
        done.set()
        await asyncio.gather(*tasks)
    before, during = [], []
    for one in times:
        for earlier, later in itertools.pairwise(one):
            gap = (later - earlier) * 1e3
            if not math.isnan(gap) and earlier > begun - BEFORE + 1.0:
                (during if later > begun and earlier < ended else before if later < begun else []).append(gap)
    result: dict[str, Any] = {"streams": streams, "prompt_tokens": prompt_tokens, "prompt_seconds": round(ended - begun, 2)}
    for name, gaps in (("before", before), ("during", during)):
        gaps.sort()
        result |= {
            f"gap_ms_{name}_p50": round(statistics.median(gaps), 1),
            f"gap_ms_{name}_p99": round(gaps[int(len(gaps) * 0.99)], 1),
            f"gap_ms_{name}_max": round(gaps[-1], 1),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--target-step-ms", type=float)
    parser.add_argument("--model", default="")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--label", default="")
    options = parser.parse_args()
    with server(options.model, options.target_step_ms) as url:
        for number in range(options.runs):
            load = os.getloadavg()[0]
            result = asyncio.run(run(url, options.streams, options.prompt_tokens))
            result = {"label": options.label, "long_prompt_number": number + 1, **result, "load_before": round(load, 2)}
            print("  ".join(f"{name}={value}" for name, value in result.items()), flush=True)
            kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
            kept["runs"].append(result)
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
