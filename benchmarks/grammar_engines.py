"""Compares grammar engines: time to compile a schema, time to compute a mask, and how much of JSON Schema they cover.

    python benchmarks/grammar_engines.py --tokenizer FOLDER --bfcl BFCL_DATA --suite JSON_SCHEMA_TEST_SUITE [--engines llguidance,xgrammar]

`FOLDER` has a tokenizer.json; `BFCL_DATA` is `bfcl_eval/data` of the package `bfcl-eval` (tool schemas of real APIs); the suite is
`json/tests/draft2020-12` in the source distribution of `jsonschema`. Of the suite, a schema counts as *sound* if every invalid
instance is refused and *complete* if every valid one is accepted (with the separators of json.dumps).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

TYPES = {"dict": "object", "float": "number", "tuple": "array", "hashtable": "object", "any": None, "char": "string", "double": "number"}


class Engine(Protocol):
    name: str

    def compile(self, schema: str) -> Any:
        """A fresh matcher. Raises ValueError when the schema is refused."""

    def accepts(self, matcher: Any, ids: list[int]) -> bool: ...

    def walk(self, matcher: Any, ids: list[int]) -> list[float]:
        """Seconds that each mask on the way along `ids` takes."""


class LLGuidance:
    name = "llguidance"

    def __init__(self, folder: str) -> None:
        import llguidance

        self._module = llguidance
        self.tokenizer = llguidance.LLTokenizer(str(Path(folder) / "tokenizer.json"))
        self._mask = np.zeros((1, (self.tokenizer.vocab_size + 31) // 32), np.int32)

    def compile(self, schema: str) -> Any:
        grammar = self._module.LLMatcher.grammar_from_json_schema(schema)
        matcher = self._module.LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def accepts(self, matcher: Any, ids: list[int]) -> bool:
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(self, matcher: Any, ids: list[int]) -> list[float]:
        from llguidance.numpy import fill_next_token_bitmask

        times = []
        for token in ids:
            began = time.perf_counter()
            fill_next_token_bitmask(matcher, self._mask)
            times.append(time.perf_counter() - began)
            if not matcher.consume_token(token):
                break
        return times


class XGrammar:
    name = "xgrammar"

    def __init__(self, folder: str) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        self._module = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(folder))
        self._info = info
        self._mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def compile(self, schema: str) -> Any:
        try:
            compiler = self._module.GrammarCompiler(self._info, max_threads=2, cache_enabled=False)
            return self._module.GrammarMatcher(compiler.compile_json_schema(schema))
        except Exception as e:
            raise ValueError(str(e)) from None

    def accepts(self, matcher: Any, ids: list[int]) -> bool:
        return all(matcher.accept_token(i) for i in ids) and matcher.accept_token(self._info.stop_token_ids[0])

    def walk(self, matcher: Any, ids: list[int]) -> list[float]:
        times = []
        for token in ids:
            began = time.perf_counter()
            matcher.fill_next_token_bitmask(self._mask)
            times.append(time.perf_counter() - began)
            if not matcher.accept_token(token):
                break
        return times


def normal(schema: Any) -> Any:
    """A BFCL parameter description as JSON Schema: it names types as Python does."""
    if isinstance(schema, list):
        return [normal(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: normal(v) for k, v in schema.items()}
    kind = out.get("type")
    if isinstance(kind, str):
        kind = TYPES.get(kind.lower(), kind.lower())
        out.pop("type")
        if kind in ("object", "array", "string", "number", "integer", "boolean", "null"):
            out["type"] = kind
    return out


def tool_schemas(folder: Path) -> list[str]:
    found: dict[str, None] = {}
    for path in sorted(folder.glob("BFCL_v4_*.json")):
        for line in path.read_text().splitlines():
            try:
                functions = json.loads(line).get("function", [])
            except ValueError:  # a few files are one JSON document over many lines, and hold no tools
                continue
            for function in functions:
                found[json.dumps(normal(function["parameters"]))] = None
    return list(found)


def sample(schema: Any) -> Any:
    """Some instance of a simple schema, all properties set."""
    if not isinstance(schema, dict):
        return "x"
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    if kind == "object":
        return {k: sample(v) for k, v in schema.get("properties", {}).items()}
    if kind == "array":
        return [sample(schema.get("items", {}))] * 2
    return {"number": 1.5, "integer": 12, "boolean": True, "null": None}.get(kind, "some words of text")


def percentile(values: list[float], q: float) -> float:
    return float(np.percentile(values, q)) * 1e3


def measure(engine: Engine, encode: Any, schemas: list[str], suite: Path) -> dict[str, Any]:
    compile_times, mask_times, refused, first = [], [], [], True
    for text in schemas:
        began = time.perf_counter()
        try:
            matcher = engine.compile(text)
        except ValueError as e:
            refused.append(str(e)[:100])
            continue
        if not first:
            compile_times.append(time.perf_counter() - began)
        first = False
        mask_times += engine.walk(matcher, encode(json.dumps(sample(json.loads(text)))))
    big = json.dumps(
        {
            "type": "object",
            "properties": {f"field_{i}": {"type": "string"} for i in range(100)},
            "required": [f"field_{i}" for i in range(100)],
        }
    )
    began = time.perf_counter()
    matcher = engine.compile(big)
    hundred = time.perf_counter() - began
    began = time.perf_counter()
    engine.walk(matcher, encode('{"')[:1])
    hundred_first_mask = time.perf_counter() - began
    totals = dict.fromkeys(("schemas", "compiled", "sound", "complete", "exact"), 0)
    for path in sorted(suite.glob("*.json")):
        for group in json.loads(path.read_text()):
            totals["schemas"] += 1
            schema = json.dumps(group["schema"])
            try:
                engine.compile(schema)
            except ValueError:
                continue
            totals["compiled"] += 1
            verdicts = [(t["valid"], engine.accepts(engine.compile(schema), encode(json.dumps(t["data"])))) for t in group["tests"]]
            sound = all(not ok for valid, ok in verdicts if not valid)
            complete = all(ok for valid, ok in verdicts if valid)
            totals["sound"] += sound
            totals["complete"] += complete
            totals["exact"] += sound and complete
    return {
        "engine": engine.name,
        "tool_schemas": len(schemas),
        "tool_schemas_refused": len(refused),
        "compile_ms": {"p50": percentile(compile_times, 50), "p99": percentile(compile_times, 99), "max": max(compile_times) * 1e3},
        "mask_ms": {
            "p50": percentile(mask_times, 50),
            "mean": statistics.mean(mask_times) * 1e3,
            "p99": percentile(mask_times, 99),
            "max": max(mask_times) * 1e3,
        },
        "compile_100_fields_ms": hundred * 1e3,
        "first_mask_100_fields_ms": hundred_first_mask * 1e3,
        "suite": totals,
        "why_refused": sorted(set(refused))[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--bfcl", type=Path, required=True)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--engines", default="llguidance,xgrammar")
    parser.add_argument("--limit", type=int, default=100_000, help="most tool schemas")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    schemas = tool_schemas(args.bfcl)[: args.limit]
    results = []
    for name in args.engines.split(","):
        engine: Engine = {"llguidance": LLGuidance, "xgrammar": XGrammar}[name](args.tokenizer)
        results.append(measure(engine, encode, schemas, args.suite))
        print(json.dumps(results[-1], indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
