"""Sampling flags of the commands that generate text, and the server address flags that go with them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from octavo.cli.flags import positive_int
from octavo.cli.parser import CommandParser, Namespace


@dataclass(frozen=True)
class _Option:
    name: str
    type: Any
    help: str
    many: bool = False


_OPTIONS = (
    _Option("max_tokens", positive_int, "Most tokens to generate. Default: up to the context limit."),
    _Option("temperature", float, "0 is greedy. Default: the model's own, else 1."),
    _Option("top_p", float, "Keep the most likely tokens that make up this probability."),
    _Option("top_k", int, "Keep this many tokens; 0 is off."),
    _Option("min_p", float, "Drop tokens less likely than this fraction of the most likely one."),
    _Option("seed", int, "The same seed gives the same text."),
    _Option("presence_penalty", float, "Make tokens that have appeared less likely, -2 to 2."),
    _Option("frequency_penalty", float, "The same, by how often they appeared."),
    _Option("repetition_penalty", float, "The same, as a factor; 1 is off."),
    _Option("stop", str, "Stop at this text; several may be given.", many=True),
)


def add_sampling_flags(parser: CommandParser) -> None:
    """`--temperature` and the like. Those not given are left to the model's defaults."""
    group = parser.group("sampling")
    for option in _OPTIONS:
        flag = "--" + option.name.replace("_", "-")
        dest = "sampling_" + option.name
        keywords: dict[str, Any] = {"action": "append"} if option.many else {}
        names = [flag] if not parser.has(flag) else ["--sampling-" + option.name.replace("_", "-")]
        group.add_argument(*names, dest=dest, type=option.type, metavar="TEXT" if option.type is str else "N", help=option.help, **keywords)


def sampling_options(options: Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, by their names in requests.

    Raises:
        InvalidRequest: a value outside its range.
    """
    given = {o.name: getattr(options, "sampling_" + o.name) for o in _OPTIONS if hasattr(options, "sampling_" + o.name)}
    from octavo.protocol.params import SamplingParams

    SamplingParams(**given)
    return given


def add_server_flags(parser: CommandParser) -> None:
    """`--url` and `--api-key`: use a running server instead of loading the model here."""
    group = parser.group("server")
    group.add_argument("--url", "--base-url", dest="url", metavar="URL", help="Use this OpenAI-compatible server; load nothing here.")
    if not parser.has("--api-key"):
        group.add_argument("--api-key", metavar="KEY", help="Key for that server. Default: $OCTAVO_API_KEY or $OPENAI_API_KEY.")


def api_key(options: Namespace) -> str | None:
    """The key given, or the environment's."""
    return getattr(options, "api_key", None) or os.environ.get("OCTAVO_API_KEY") or os.environ.get("OPENAI_API_KEY")
