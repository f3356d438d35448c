"""`octavo eval`: what low-bit weights (or any other setting) cost, as perplexity on a text and agreement with another model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.bench.offline import engine_of, open_llm
from octavo.cli.bench.results import add_result_flags, publish
from octavo.cli.flags import add_engine_settings, engine_args, positive_int
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.cli.progress import LoadingProgress
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.checkpoint.types import Checkpoint


def configure(parser: CommandParser) -> None:
    group = parser.group("evaluation")
    group.add_argument("--text", metavar="FILE", help="A plain text, of the kind the model is used for. Needed.")
    group.add_argument("--against", metavar="MODEL", help="A second model with the same tokens: the unquantised one.")
    group.add_argument("--window", type=_window, metavar="N", help="Tokens read at once. Default: 512, or the model's longest.")
    group.add_argument("--max-tokens", type=positive_int, metavar="N", help="Of the text, at most. Default: 16384.")
    add_result_flags(parser)
    add_engine_settings(parser)


def _window(text: str) -> int:
    if (value := positive_int(text)) < 2:
        raise argparse.ArgumentTypeError("a window needs at least 2 tokens")
    return value


@dataclass(frozen=True)
class Scores:
    """One model's, a number a scored token."""

    logprobs: Sequence[float]
    """Of the text's own tokens."""
    likeliest: Sequence[int]
    """What the model would have said."""
    hits: int
    """Tokens of the text that were the likeliest."""

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


def run(options: Namespace) -> int:
    if (file := getattr(options, "text", None)) is None:
        raise UsageError("Give a text to read: octavo eval MODEL --text FILE.")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a UTF-8 text.") from None
    against = getattr(options, "against", None)
    other = None if against is None else _second(options, against)  # before the first one takes its time
    with open_llm(options) as llm:
        windows = _windows(options, llm, text, file)
        if other is not None:
            _check_tokens(windows, other.hf_config.get("vocab_size"), other.name)
        engine, ours = engine_of(llm), _score(llm, windows)
    theirs = None
    if other is not None:
        options.model, options.model_argument = against, None
        if hasattr(options, "quantization"):
            del options.quantization
        with open_llm(options) as llm:
            _check_tokens(windows, llm.config.model.vocab_size, other.name)
            theirs, against = _score(llm, windows), other.name
    _publish(options, engine, windows, ours, theirs, against)
    return 0


def _second(options: Namespace, model: str) -> Checkpoint:
    """Raises OctavoError: there is no such model."""
    from octavo.checkpoint.resolve import resolve_checkpoint

    args = engine_args(options)
    with LoadingProgress() as progress:
        return resolve_checkpoint(
            model,
            revision=args.revision,
            download_dir=args.download_dir,
            token=args.hf_token,
            load_format=args.load_format,
            progress=progress,
        )


def _check_tokens(windows: Sequence[list[int]], vocab_size: Any, model: str) -> None:
    if isinstance(vocab_size, int) and any(max(window) >= vocab_size for window in windows):
        raise ConfigError(f"--against {model}: it has other tokens than the first model.")


def _windows(options: Namespace, llm: Any, text: str, file: str) -> list[list[int]]:
    """The text's tokens, cut."""
    size = min(getattr(options, "window", 512), llm.ready_report.max_model_len - 1)
    tokens = list(llm.get_tokenizer().encode(text))[: getattr(options, "max_tokens", 16384)]
    windows = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigError(f"{file} has too little text: at least 2 tokens are needed, it makes {len(tokens)}.")
    return windows


def _score(llm: Any, windows: Sequence[list[int]]) -> Scores:
    from octavo.protocol.params import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], params, use_tqdm=False)
    logprobs: list[float] = []
    likeliest: list[int] = []
    hits = 0
    for window, output in zip(windows, outputs, strict=True):
        if (error := output.outputs[0].error) is not None:
            raise ConfigError(f"The model failed on the text: {error}")
        for token, row in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            best = min(row, key=lambda t: row[t].rank or math.inf)
            logprobs.append(row[token].logprob)
            likeliest.append(best)
            hits += best == token
    return Scores(logprobs, likeliest, hits)


def _publish(
    options: Namespace, engine: dict[str, Any], windows: Sequence[list[int]], ours: Scores, theirs: Scores | None, against: str | None
) -> None:
    count = len(ours.logprobs)
    rows = [
        ("model", engine["model"]),
        ("scored", f"{count:,} tokens in {len(windows):,} windows"),
        ("perplexity", f"{ours.perplexity:.4f}"),
        ("next token right", f"{ours.hits / count:.2%}"),
    ]
    result = {"engine": engine, "tokens": count, "perplexity": ours.perplexity, "right": ours.hits / count}
    if theirs is not None:
        agreement = sum(a == b for a, b in zip(ours.likeliest, theirs.likeliest, strict=True)) / count
        ratio = ours.perplexity / theirs.perplexity
        moved = math.fsum(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) / count
        rows += [
            (f"perplexity of {against}", f"{theirs.perplexity:.4f}"),
            ("perplexity changes by", f"{ratio - 1:+.2%}"),
            ("same likeliest token", f"{agreement:.2%}"),
            ("logprobs differ by", f"{moved:.4f} on average"),
        ]
        result |= {"against": against, "against_perplexity": theirs.perplexity, "agreement": agreement, "mean_logprob_difference": moved}
    publish(options, "eval", rows, result)
