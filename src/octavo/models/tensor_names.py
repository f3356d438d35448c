"""How the names of checkpoint tensors are read, and what is left of a parameter to fill. No torch."""

from __future__ import annotations

import re

from octavo.models.spec import Parameter

_NUMBER = re.compile(r"(?:(?<=\.)|^)(0|[1-9]\d{0,5})(?=\.)")


def pattern_of(name: str) -> tuple[str, dict[str, str]]:
    """A tensor's name with its first two numbers replaced by {i} and {e}, and what stood there."""
    numbers: dict[str, str] = {}

    def replaced(match: re.Match[str]) -> str:
        if len(numbers) == 2:
            return match[0]
        key = "e" if numbers else "i"
        numbers[key] = match[0]
        return f"{{{key}}}"

    return _NUMBER.sub(replaced, name), numbers


def unfilled(parameter: Parameter) -> set[str | None]:
    """The parts of a parameter; None is the whole of one without parts."""
    return {*parameter.parts} or {None}
