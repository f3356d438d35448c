"""Finds the grammar engine. The only place that imports it, and only when a request needs it."""

from __future__ import annotations

import importlib
import re
from typing import Any

from octavo.errors import NotYet

INSTALL = "pip install 'octavo[structured]'"


def llguidance() -> Any:
    """The module.

    Raises:
        NotYet: it is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise NotYet(
            f"Structured output (response_format, structured_outputs, tool_choice required or named, strict tools) needs the package "
            f"llguidance, which this server lacks: {INSTALL}."
        ) from None


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
_NO_NUMBER = re.compile(r"Expected f64 for '(\w+)'")


def one_line(message: str) -> str:
    """What the engine says, for users. It draws its errors over several lines, and appends its state."""
    for theirs, ours in _OTHER_WORDS:
        if theirs in message:
            return ours
    message = _NO_NUMBER.sub(r"\1 must be a number", message)
    return " ".join(message.partition("<state>")[0].replace("<non-verbose/>", "").split())[:400]
