"""Octavo's server and llama-server on a CPU under the same clients: `octavo bench serve` with 1, 8 and 32 open requests.

Both servers run the bundled file (llama-server also the Q4_0 of it that cpu_peers.py made, if that is there), one at a time so
that neither idles beside the other. Rounds alternate, the best of each counts, and the ratios are what to read.
Writes benchmarks/results/cpu_http.json.

    python benchmarks/cpu_http.py --llama-server /path/to/llama-server [--rounds 2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.startup import free_port
from octavo.checkpoint.bundled import ensure_bundled_model
from octavo.cli.bench.results import environment, write_json
from octavo.config.device import usable_cores
from octavo.config.home import octavo_home

PROMPT_WORDS, OUTPUT_TOKENS = 150, 128
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "thing",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "name",
    "team",
    "minute",
]
"""A token each. Text rather than random ids: what follows those is often no valid UTF-8, at which llama-server drops the request."""
LOADS = ((1, 4), (8, 16), (32, 64))
"""(open requests, requests in all)"""
FIGURES = {"output_tok_s": "output_throughput", "p95_ttft_ms": "p95_ttft_ms", "median_tpot_ms": "median_tpot_ms", "failed": "failed"}
"""Ours -> the report's. Failed requests count for none of the others."""
READY_SECONDS = 120.0


def commands(options: argparse.Namespace, port: int) -> dict[str, list[str]]:
    """How each server is started."""
    model, threads = ensure_bundled_model(), str(options.threads)
    octavo = [sys.executable, "-m", "octavo", "serve", "--port", str(port), "--device", "cpu", "--threads", threads]
    llama = [options.llama_server, "--port", str(port), "-t", threads, "--ctx-size", str(32 * 512), "--parallel", "32"]
    files = {"llama-server Q4_1": model}
    cache = octavo_home() / "benchmarks"
    for path in sorted(cache.glob("*.Q4_0.gguf")):
        files["llama-server Q4_0"] = str(path)
    return {"octavo": octavo, **{name: [*llama, "-m", path] for name, path in files.items()}}


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """The server, until it is ready and then as long as the block lasts."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        start = time.monotonic()
        while True:
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as r,
            ):
                if r.status == 200:
                    break
            if process.poll() is not None or time.monotonic() - start > READY_SECONDS:
                raise SystemExit(f"{command[0]} did not become ready.")
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def load(port: int, concurrency: int, requests: int, seed: int) -> dict[str, float]:
    """What the clients of one load see."""
    with tempfile.TemporaryDirectory() as folder:
        report, dataset = Path(folder) / "report.json", Path(folder) / "prompts.jsonl"
        source = random.Random(seed)
        prompts = [" ".join(source.choices(WORDS, k=PROMPT_WORDS)) for _ in range(requests)]
        dataset.write_text("".join(json.dumps({"prompt": p, "output_len": OUTPUT_TOKENS}) + "\n" for p in prompts))
        flags = {
            "--base-url": f"http://127.0.0.1:{port}",
            "--num-prompts": requests,
            "--max-concurrency": concurrency,
            "--dataset-path": dataset,
            "--output-len": OUTPUT_TOKENS,
            "--output-json": report,
        }
        command = [sys.executable, "-m", "octavo", "bench", "serve", "--ignore-eos", *(str(x) for pair in flags.items() for x in pair)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # the report counts what failed
        found = json.loads(report.read_text())
    return {key: float(found[name]) for key, name in FIGURES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", required=True, help="Path of the executable.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu_http.json")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for round_ in range(options.rounds):
        for name, command in commands(options, port := free_port()).items():
            with running(command, port):
                for concurrency, requests in LOADS:
                    best = results.setdefault(name, {}).setdefault(str(concurrency), {})
                    for key, value in load(port, concurrency, requests, seed=100 * round_ + concurrency).items():
                        better = max if key == "output_tok_s" else min
                        best[key] = round(better(best.get(key, value), value), 2)
            print(f"round {round_ + 1}, {name}: {results[name]}", flush=True)
    ratios = {name: ratio(results["octavo"], theirs) for name, theirs in results.items() if name != "octavo"}
    show(results)
    document: dict[str, Any] = {
        "bench": "cpu_http",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "prompt_words": PROMPT_WORDS,
        "output_tokens": OUTPUT_TOKENS,
        "rounds": options.rounds,
        "threads": options.threads,
        "results": results,
        "octavo_over": ratios,
        "environment": environment(),
    }
    write_json(options.output, document)
    print(f"Written to {options.output}.")


def ratio(ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Octavo's figures over another's, by load."""
    return {load: {key: round(ours[load][key] / theirs[load][key], 2) for key in FIGURES if key != "failed"} for load in ours}


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"{'tokens/s / p95 time to first token, ms':<42}" + "".join(f"{f'{n} open':>20}" for n, _ in LOADS))
    for name, loads in results.items():
        print(f"{name:<42}" + "".join(f"{loads[str(n)]['output_tok_s']:>11.1f} /{loads[str(n)]['p95_ttft_ms']:>7.0f}" for n, _ in LOADS))


if __name__ == "__main__":
    main()
