"""Octavo, llama.cpp, OpenVINO GenAI and transformers on the CPU with the bundled model: the same prompts, greedy, at 1, 8 and 32 requests.

Every engine sits in a process of its own and takes its turn within each round, so that a busy machine slows all alike. Published
are medians over the rounds, with the slowest and the fastest; ratios are taken within a round, and are what to read. Decode speed is
(time of N tokens - time of 1 token), overall speed counts the prompts too.

    python benchmarks/cpu_peers.py [--llama-cpp-python /path/to/python] [--openvino-python /path/to/python] [--rounds 3]
        [--engines octavo 'octavo int16' transformers]

llama.cpp runs the file as it is (Q4_1) and in Q4_0, which it made itself of the same file and which is its fastest format.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from octavo.checkpoint.bundled import ensure_bundled_model
from octavo.cli.bench.results import environment, write_json
from octavo.config.device import usable_cores
from octavo.config.home import octavo_home

HERE = Path(__file__).parent
PROMPT_TOKENS, OUTPUT_TOKENS = 152, 128
BATCHES = (1, 8, 32)
KEYS = ("decode", "overall", "prefill")


class Peer:
    """One engine's process: send a job, get its result."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        start = time.perf_counter()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.title = self._read()["engine"]
        self.start_seconds = time.perf_counter() - start

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.name} ended with code {self._process.wait()}; its message is above.")

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def prompts(count: int, source: random.Random) -> list[list[int]]:
    """Random ids of ordinary tokens, new ones for each run: no cache may answer for an earlier run."""
    return [[source.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def measure(peer: Peer, count: int, source: random.Random) -> dict[str, float]:
    """One round: tokens a second while decoding, and over all."""
    first = peer.run(prompts(count, source), 1)["seconds"]
    result = peer.run(prompts(count, source), OUTPUT_TOKENS)
    produced = sum(len(t) for t in result["tokens"])
    if produced != count * OUTPUT_TOKENS:
        raise SystemExit(f"{peer.name} produced {produced} tokens instead of {count * OUTPUT_TOKENS}")
    return {
        "decode": count * (OUTPUT_TOKENS - 1) / max(result["seconds"] - first, 1e-9),
        "overall": produced / result["seconds"],
        "prefill": count * PROMPT_TOKENS / first,
    }


def commands(options: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """How each engine is started."""
    cache = octavo_home() / "benchmarks"
    cache.mkdir(parents=True, exist_ok=True)
    threads = str(options.threads)
    octavo = [sys.executable, str(HERE / "peers/octavo_llm.py"), model, "", threads]
    found = {
        "octavo": [*octavo, options.octavo_settings],
        "octavo int16": [*octavo, json.dumps({"cpu_activations": "int16", **json.loads(options.octavo_settings)})],
        "transformers": [sys.executable, str(HERE / "peers/transformers_generate.py"), model, str(cache / "float32"), threads],
    }
    if options.llama_cpp_python:
        for kind in ("", "Q4_0"):
            settings = json.dumps({"requantize": kind, "cache": str(cache)})
            script = str(HERE / "peers/llama_cpp_batch.py")
            found[f"llama.cpp {kind or 'Q4_1'}"] = [options.llama_cpp_python, script, model, "", threads, settings]
    if options.openvino_python:
        found["OpenVINO"] = [options.openvino_python, str(HERE / "peers/openvino_batch.py"), model, "", threads, ""]
    return {name: command for name, command in found.items() if not options.engines or name in options.engines}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU throughput against other engines, ratios in one run.")
    parser.add_argument("--llama-cpp-python", default=os.environ.get("LLAMA_CPP_PYTHON", ""), help="Interpreter with llama-cpp-python.")
    parser.add_argument("--openvino-python", default=os.environ.get("OPENVINO_PYTHON", ""), help="Interpreter with openvino-genai.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument(
        "--engines", nargs="+", help="Only these: octavo, 'octavo int16', transformers, 'llama.cpp Q4_1', 'llama.cpp Q4_0', OpenVINO."
    )
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--octavo-settings", default="{}", help="JSON: more settings of LLM(...).")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "cpu_peers.json")
    options = parser.parse_args()
    model = ensure_bundled_model()
    load_before = round(os.getloadavg()[0], 2)
    peers = [Peer(name, command) for name, command in commands(options, model).items()]
    try:
        results: dict[str, Any] = {p.name: {"engine": p.title, "start_seconds": round(p.start_seconds, 2)} for p in peers}
        measured: dict[str, dict[str, list[dict[str, float]]]] = {p.name: {} for p in peers}
        for count in options.batches:
            source = random.Random(count)
            for peer in peers:  # the first run of a shape pays for allocation
                peer.run(prompts(count, source), 2)
            for _ in range(options.rounds):
                for peer in peers:
                    measured[peer.name].setdefault(str(count), []).append(measure(peer, count, source))
    finally:
        for peer in peers:
            peer.__exit__()
    for name, by_count in measured.items():
        results[name] |= {n: {key: spread([r[key] for r in rounds]) for key in KEYS} for n, rounds in by_count.items()}
    show(results, options.batches)
    ratios = ratios_of(measured)
    write_json(
        options.output,
        {
            "bench": "cpu_peers",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "rounds": options.rounds,
            "threads": options.threads,
            "load_before": load_before,
            "octavo_settings": json.loads(options.octavo_settings),
            "results": results,
            "octavo_over": ratios,
            "environment": environment(),
        },
    )
    print(f"Written to {options.output}.")


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def ratios_of(measured: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Octavo's speed over each other engine's, round by round."""
    ours = measured.get("octavo", {})
    return {
        name: {
            n: {key: spread([a[key] / b[key] for a, b in zip(ours[n], rounds, strict=True)]) for key in KEYS}
            for n, rounds in theirs.items()
        }
        for name, theirs in measured.items()
        if name != "octavo" and ours
    }


def show(results: dict[str, Any], batches: list[int]) -> None:
    print(
        f"{'tokens/s (decode / overall / prefill), medians':<64}" + "".join(f"{f'{n} together':>28}" for n in batches) + f"{'start s':>10}"
    )
    for entry in results.values():
        of = [{key: entry[str(n)][key]["median"] for key in KEYS} for n in batches]
        cells = "".join(f"{m['decode']:>13.1f} /{m['overall']:>6.1f} /{m['prefill']:>5.0f}" for m in of)
        print(f"{entry['engine']:<64}{cells}{entry['start_seconds']:>10.1f}")


if __name__ == "__main__":
    main()
