"""Finds the grammar engine. The only place that imports it, and only when a request needs it."""

from __future__ import annotations

import importlib
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


def one_line(message: str) -> str:
    """The engine draws its errors over several lines, and appends its state."""
    return " ".join(message.partition("<state>")[0].split())[:400]
