"""JSON Schema through generation: whatever a random model writes under a schema must validate against it.

    PYTHONPATH=src:. python benchmarks/schema_generation.py --suite JSON_SCHEMA_TEST_SUITE [--samples 8] [--seed 0]

The suite is `json/tests` in the source distribution of `jsonschema`. Every schema of its drafts is asked of a tiny model with random
weights, as `structured_outputs.json`, through the whole engine: the door, the core's constraints, the masks, the sampler. A bias towards
what ends strings, numbers and lists keeps the texts short. Prints a table, writes results/schema_generation.json:

* refused: a 400 at the door, with the reason;
* no end: no sample was complete after --max-tokens (nothing to validate);
* valid / invalid: every finished sample validates (with the formats that are enforced; others are annotations), or one does not. An
  invalid one is a fault.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema import validators
from tests.support.scripts import token_ids
from tests.support.tiny_checkpoint import write_tiny_checkpoint

from octavo import LLM, InvalidRequest, SamplingParams, StructuredOutputsParams
from octavo.grammar.json_schema import FORMATS

RESULTS = Path(__file__).parent / "results" / "schema_generation.json"
DIALECTS = {"draft7": "http://json-schema.org/draft-07/schema#", "draft2020-12": "https://json-schema.org/draft/2020-12/schema"}
BATCH = 64


def schemas(suite: Path, draft: str) -> Iterator[tuple[str, Any]]:
    for path in sorted((suite / draft).glob("*.json")):
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DIALECTS[draft], **schema}
            yield f"{path.stem}: {group['description']}", schema


def biases(strength: float) -> dict[int, float]:
    """Towards what ends a text; away from blanks."""
    return {token_ids(char)[0]: strength for char in '"}],:'} | {token_ids(char)[0]: -strength for char in " \t\n\r\\"} | {2: strength}


def fitting(llm: LLM, schema: Any) -> str:
    """ "" if the schema is accepted, else why not."""
    try:
        llm.generate("x", SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(json=schema)))
    except InvalidRequest as error:
        return str(error)
    return ""


def problem(text: str, schema: Any, dialect: Any) -> str:
    """What is wrong with a text under a schema; "" if nothing is.

    Numbers are compared as they are written where binary fractions say something else (1.2 is a multiple of 0.0001).
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    errors = _errors(value, schema, dialect)
    if errors and not _errors(json.loads(text, parse_float=Decimal), json.loads(json.dumps(schema), parse_float=Decimal), dialect):
        return ""
    return errors


def _errors(value: Any, schema: Any, dialect: Any) -> str:
    formats = jsonschema.FormatChecker(FORMATS & dialect.FORMAT_CHECKER.checkers.keys())
    return "; ".join(error.message for error in dialect(schema, format_checker=formats).iter_errors(value))[:300]


def run(llm: LLM, suite: Path, draft: str, samples: int, seed: int, max_tokens: int) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    endless: list[str] = []
    texts = 0
    dialect: Any = validators.validator_for({"$schema": DIALECTS[draft]})
    accepted = []
    for name, schema in schemas(suite, draft):
        counts["schemas"] += 1
        why = fitting(llm, schema)
        if why:
            counts["refused"] += 1
            reasons[reason(why)] += 1
        else:
            accepted.append((name, schema))
    counts["accepted"] = len(accepted)
    jobs = [(number, sample) for number in range(len(accepted)) for sample in range(samples)]
    outputs: dict[int, list[str]] = {number: [] for number in range(len(accepted))}
    for begin in range(0, len(jobs), BATCH):
        part = jobs[begin : begin + BATCH]
        params = [
            SamplingParams(
                temperature=(0.7, 1.0, 2.0)[sample % 3],
                seed=seed + 1000 * sample + number,
                max_tokens=max_tokens,
                logit_bias=biases((0.0, 3.0, 5.0)[sample % 3] if sample else 5.0),
                structured_outputs=StructuredOutputsParams(json=accepted[number][1]),
            )
            for number, sample in part
        ]
        for (number, _), output in zip(part, llm.generate(["x"] * len(part), params, use_tqdm=False), strict=True):
            choice = output.outputs[0]
            if choice.error is not None:
                faults.append({"schema": accepted[number][0], "definition": accepted[number][1], "problem": choice.error})
            elif choice.finish_reason == "stop":
                outputs[number].append(choice.text)
    for number, (name, schema) in enumerate(accepted):
        texts += len(outputs[number])
        wrong = [(text, what) for text in outputs[number] if (what := problem(text, schema, dialect))]
        if not outputs[number]:
            endless.append(name)
        counts["no end" if not outputs[number] else "invalid" if wrong else "valid"] += 1
        faults += [{"schema": name, "definition": schema, "text": text[:200], "problem": what} for text, what in wrong[:1]]
    return {"draft": draft, **counts, "texts": texts, "faults": faults, "no_end": endless, "why_refused": dict(reasons.most_common(40))}


def reason(message: str) -> str:
    """A refusal without what differs from schema to schema."""
    text = re.sub(r"^.*?cannot be used: ", "", message)
    text = re.sub(r"^at \S+: ", "", text)
    return re.sub(r"'[^']*'|\b\d+\b", "…", text)[:80] if not text.startswith("Unimplemented") else text[:120]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--drafts", nargs="+", default=list(DIALECTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_checkpoint(Path(folder) / "model")
        with LLM(str(model), load_format="dummy", device="cpu", dtype="float32", max_num_seqs=BATCH) as llm:
            for draft in args.drafts:
                results.append(run(llm, args.suite, draft, args.samples, args.seed, args.max_tokens))
    print(f"{'draft':<14} {'schemas':>8} {'refused':>8} {'accepted':>9} {'valid':>6} {'invalid':>8} {'no end':>7} {'texts':>6}")
    for r in results:
        numbers = [r.get(key, 0) for key in ("schemas", "refused", "accepted", "valid", "invalid", "no end", "texts")]
        print(f"{r['draft']:<14} " + " ".join(f"{n:>{w}}" for n, w in zip(numbers, (8, 8, 9, 6, 8, 7, 6), strict=True)))
        for fault in r["faults"]:
            print("  ", json.dumps(fault)[:600])
    args.out.write_text(
        json.dumps(
            {
                "jsonschema": metadata.version("jsonschema"),
                "llguidance": metadata.version("llguidance"),
                "samples": args.samples,
                "seed": args.seed,
                "results": results,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
