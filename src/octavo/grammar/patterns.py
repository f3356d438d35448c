"""Regular expressions that the engine takes although they are none. Others it refuses by itself."""

from __future__ import annotations


def pattern_problem(pattern: str) -> str:
    """What is wrong with a regular expression; "" if nothing is known to be."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        return "the regular expression ends in a backslash that escapes nothing; a backslash itself is written twice"
    return ""
