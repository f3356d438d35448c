"""Finds the grammar engine. The only place that imports it, and only when a request needs it."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from typing import Any

from octavo.config.address_space import is_refusal
from octavo.errors import NotYet

INSTALL = "pip install 'octavo[structured]'"
_LEAST = (1, 9)
"""The oldest version that is used, see pyproject.toml."""


def llguidance() -> Any:
    """The module.

    Raises:
        NotYet: it is not installed, or too old.
        MemoryError: the system gives no memory for it.
    """
    try:
        found = importlib.import_module("llguidance")
    except ImportError as error:
        if is_refusal(error):
            raise MemoryError("The system gives no memory for the grammar engine.") from None
        raise NotYet(
            f"Structured output (response_format, structured_outputs, tool_choice required or named, strict tools) needs the package "
            f"llguidance, which this server lacks: {INSTALL}."
        ) from None
    if (version := _too_old()) is not None:
        raise NotYet(
            f"Structured output needs llguidance {_LEAST[0]}.{_LEAST[1]} or newer; this server has {version}: {INSTALL} --upgrade."
        )
    return found


@functools.cache
def _too_old() -> str | None:
    """The version that is installed, if it cannot be used."""
    version = importlib.metadata.version("llguidance")
    return version if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _LEAST else None


TOO_COMPLEX = "it is too complex. Use a simpler one, with fewer alternatives and smaller repetitions."
_OTHER_WORDS = (
    ("too many expressions constructed", TOO_COMPLEX),
    ("Unable to determine if regex is empty", TOO_COMPLEX),
    (
        "Failed to generate regex for",
        "the range of this number is too large to be kept: with both of minimum and maximum, each may go up to 9223372036854775807, with one "
        "of them up to 999999999999999999. Leave it out, or use a smaller one.",
    ),
    ("is greater than number of properties", "no object can match it: minProperties asks for more properties than it can have."),
    ("required > maxProperties", "no object can match it: it requires more properties than maxProperties allows."),
    ("anyOf is empty", "nothing can match it: its list of values or alternatives is empty."),
    ("invalid multiple of", "multipleOf must be above 0."),
    (
        "oneOf constraints are not supported",
        "the parts of this oneOf may overlap, and exactly one of them cannot be enforced. Parts are known to exclude one another by their "
        "types, const or enum values, ranges and lengths, and by a required property of which these differ. Or use anyOf.",
    ),
)
"""What the engine says about its inside, or about options that no request has."""


def of_pattern(problem: str) -> str:
    """What `one_line` says of a grammar that is but one regular expression."""
    return problem.partition("(in regex): ")[2] or problem


_NO_NUMBER = re.compile(r"Expected f64 for '(\w+)'")
_BAD_PATTERN = re.compile(r"regex parse error:.*?\berror: ([^\n|]*?)(?:\s+\d+ \||\s*$|\n)", re.DOTALL)


def one_line(message: str) -> str:
    """What the engine says, for users. It draws its errors over several lines, and appends its state."""
    if (found := _BAD_PATTERN.search(message)) is not None:
        message = f"{message[: found.start()]}the regular expression cannot be read: {found.group(1)}"
    for theirs, ours in _OTHER_WORDS:
        if theirs in message:
            return ours
    message = _NO_NUMBER.sub(r"\1 must be a number", message)
    return " ".join(message.partition("<state>")[0].replace("<non-verbose/>", "").split())[:400]
