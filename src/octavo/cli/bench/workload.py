"""What a benchmark sends: random token ids, or the prompts of a data set. Pure functions of their arguments and the seed."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.flags import positive_int
from octavo.cli.parser import CommandParser, Namespace
from octavo.config.sizes import parse_size
from octavo.errors import ConfigError


@dataclass(frozen=True)
class Span:
    """Lengths drawn uniformly from low..high, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high) if self.high > self.low else self.low


def span(text: str) -> Span:
    """`512`, or `100-1024`. For use as an argparse type."""
    low, dash, high = text.partition("-")
    try:
        values = Span(parse_size(low), parse_size(high if dash else low))
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    if not 1 <= values.low <= values.high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length like 512, or a range like 100-1024.")
    return values


@dataclass(frozen=True)
class BenchRequest:
    """One request: token ids or text, and how many tokens to generate."""

    prompt: list[int] | str
    output_len: int


def random_requests(
    count: int, input_len: Span, output_len: Span, *, seed: int = 0, vocab_size: int = 10_000, prefix_len: int = 0
) -> list[BenchRequest]:
    """`count` prompts of random token ids, all prompts drawn first and then all output lengths.

    Args:
        vocab_size: ids are drawn from 0..vocab_size, both included (as the common offline benchmark does).
        prefix_len: tokens at the start that all prompts share.
    """
    source = random.Random(seed)
    prefix = [source.randint(0, vocab_size) for _ in range(prefix_len)]
    prompts = [prefix + [source.randint(0, vocab_size) for _ in range(input_len.draw(source))] for _ in range(count)]
    return [BenchRequest(prompt, output_len.draw(source)) for prompt in prompts]


def dataset_requests(path: str, count: int | None, output_len: Span | None, *, seed: int = 0) -> list[BenchRequest]:
    """Prompts from a file: .txt (one a line), .jsonl (prompt, optionally output_len), or .json in ShareGPT's form.

    Raises:
        ConfigError: the file cannot be read or holds no prompts.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}.") from None
    try:
        found = list(_dataset_entries(path, text))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{path} is not a data set that can be read here ({type(e).__name__}: {e}).") from None
    if not found:
        raise ConfigError(f"{path}: there is no prompt in it.")
    source = random.Random(seed)
    source.shuffle(found)
    chosen = [found[i % len(found)] for i in range(count or len(found))]
    return [BenchRequest(prompt, output_len.draw(source) if output_len else length) for prompt, length in chosen]


_DEFAULT_OUTPUT = 128


def _dataset_entries(path: str, text: str) -> Sequence[tuple[str, int]]:
    if path.endswith(".jsonl"):
        entries = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [(str(e["prompt"]), int(e.get("output_len", _DEFAULT_OUTPUT))) for e in entries]
    if path.endswith(".json"):
        turns = [e.get("conversations") or e.get("conversation") or [] for e in json.loads(text)]
        # A word is about 1.3 tokens; the recorded answer only sets how much to generate.
        return [(t[0]["value"], max(4, round(len(t[1]["value"].split()) * 1.3))) for t in turns if len(t) >= 2 and t[0]["value"]]
    return [(line, _DEFAULT_OUTPUT) for line in text.splitlines() if line.strip()]


def add_workload_flags(parser: CommandParser, *, num_prompts: int, input_len: str, output_len: str) -> None:
    """`--num-prompts`, `--input-len`, `--output-len`, `--dataset-path`, ..."""
    group = parser.group("workload")
    group.add_argument("--num-prompts", type=positive_int, metavar="N", help=f"Requests. Default: {num_prompts}.")
    group.add_argument(
        "--input-len",
        "--random-input-len",
        dest="input_len",
        type=span,
        metavar="N",
        help=f"Prompt tokens: N or LOW-HIGH. Default: {input_len}.",
    )
    group.add_argument(
        "--output-len", "--random-output-len", dest="output_len", type=span, metavar="N", help=f"Output tokens. Default: {output_len}."
    )
    group.add_argument(
        "--prefix-len", "--random-prefix-len", dest="prefix_len", type=int, metavar="N", help="Tokens that all prompts share. Default: 0."
    )
    group.add_argument("--dataset-name", metavar="NAME", help="random, or the kind of --dataset-path (its ending tells it).")
    group.add_argument("--dataset-path", metavar="FILE", help="Prompts: .txt, .jsonl, or .json in ShareGPT's form. Default: random tokens.")
    group.add_argument("--vocab-size", type=positive_int, metavar="N", help="Random token ids are at most this. Default: 10000.")
    group.add_argument("--workload-seed", type=int, metavar="N", help="Seed of lengths, tokens and arrival times. Default: 0.")
    group.set_defaults(workload_defaults=(num_prompts, span(input_len), span(output_len)))


DEFAULT_LARGEST_ID = 10_000


def largest_id(options: Namespace, vocab_size: int | None = None) -> int:
    """Random token ids go up to this: as asked, or a common number that the model (where its `vocab_size` is known) still has."""
    default = DEFAULT_LARGEST_ID if vocab_size is None else min(DEFAULT_LARGEST_ID, vocab_size - 1)
    return int(getattr(options, "vocab_size", default))


def workload(options: Namespace, vocab_size: int | None = None) -> list[BenchRequest]:
    """The requests that the flags ask for, of a model with `vocab_size` tokens."""
    count, input_len, output_len = options.workload_defaults
    seed = getattr(options, "workload_seed", 0)
    if path := getattr(options, "dataset_path", None):
        return dataset_requests(path, getattr(options, "num_prompts", None), getattr(options, "output_len", None), seed=seed)
    return random_requests(
        getattr(options, "num_prompts", count),
        getattr(options, "input_len", input_len),
        getattr(options, "output_len", output_len),
        seed=seed,
        vocab_size=largest_id(options, vocab_size),
        prefix_len=getattr(options, "prefix_len", 0),
    )


def describe(options: Namespace) -> dict[str, Any]:
    """The workload in a result file: enough to repeat it."""
    count, input_len, output_len = options.workload_defaults
    return {
        "num_prompts": getattr(options, "num_prompts", count),
        "input_len": str(getattr(options, "input_len", input_len)),
        "output_len": str(getattr(options, "output_len", output_len)),
        "prefix_len": getattr(options, "prefix_len", 0),
        "dataset_path": getattr(options, "dataset_path", None),
        "seed": getattr(options, "workload_seed", 0),
    }
