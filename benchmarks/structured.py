"""What structured output costs: tokens per second of a full batch, held to a schema and free, in turns. Writes results/structured.json.

    PYTHONPATH=src python benchmarks/structured.py [--model GGUF_OR_FOLDER] [--batch 32] [--rounds 6]

Every round runs the same prompts once free, once under one schema, and once under a schema a request (all of which must be compiled in
the first round; later rounds find them). Texts do not end before --tokens: the schemas ask for long lists. The share is the median over the
rounds of constrained speed by the free speed next to it. CPU time (of all threads of the process) says the same with less noise where other
programs run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams, StructuredOutputsParams

RESULTS = Path(__file__).parent / "results" / "structured.json"
PROMPTS = [
    "List people and where they live.",
    "Describe the weather of ten cities.",
    "Write down a shopping list.",
    "Name books and authors.",
]


def schema(number: int) -> dict[str, Any]:
    """A list of records that does not end soon; another one for each number."""
    record = {
        "type": "object",
        "properties": {
            f"name_{number}" if number else "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120 + number},
            "kind": {"enum": ["person", "place", "thing"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "additionalProperties": False,
    }
    record["required"] = list(record["properties"])
    return {"type": "array", "items": record, "minItems": 200}


def wishes(kind: str, batch: int) -> list[StructuredOutputsParams | None]:
    if kind == "free":
        return [None] * batch
    return [StructuredOutputsParams(json=schema(i + 1 if kind == "a schema each" else 0)) for i in range(batch)]


def speed(llm: LLM, kind: str, batch: int, tokens: int, temperature: float) -> tuple[float, float]:
    """Generated tokens per second, and CPU milliseconds a token."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True, structured_outputs=wish)
        for i, wish in enumerate(wishes(kind, batch))
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(batch)]
    began, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    counted = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert counted == batch * tokens, "a text ended early"
    return counted / seconds, 1e3 * cpu / counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    kinds = ("free", "one schema", "a schema each")
    results = []
    with LLM(args.model, max_num_seqs=args.batch) as llm:
        for temperature in args.temperatures:
            runs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for number in range(args.rounds + 1):
                for kind in kinds if number % 2 else kinds[::-1]:
                    found = speed(llm, kind, args.batch, args.tokens, temperature)
                    if number:  # the first round compiles
                        runs[kind].append(found)
            for kind in kinds:
                share = statistics.median(a / b for (a, _), (b, _) in zip(runs[kind], runs["free"], strict=True))
                cpu = statistics.median(a / b for (_, a), (_, b) in zip(runs[kind], runs["free"], strict=True))
                wall = statistics.median(x for x, _ in runs[kind])
                results.append(
                    {
                        "temperature": temperature,
                        "kind": kind,
                        "tokens_per_second": round(wall, 1),
                        "of_free": round(share, 3),
                        "cpu_of_free": round(cpu, 3),
                        "rounds": [round(x, 1) for x, _ in runs[kind]],
                    }
                )
                print(f"temperature {temperature:<4} {kind:<14} {wall:8.1f} tok/s  {share:6.1%} of free, CPU time {cpu:6.1%}")
    load = [round(x, 2) for x in os.getloadavg()]
    report = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": load,
        "batch": args.batch,
        "tokens": args.tokens,
        "results": results,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
