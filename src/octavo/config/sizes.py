"""Numbers as people write them: `8k` = 8000, `8K` = 8192; the same for m/M and g/G; decimals with lower case only."""

from __future__ import annotations

import re

from octavo.errors import ConfigError

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "": 1}


def parse_size(text: str) -> int:
    """`text` as a whole number.

    Raises:
        ConfigError: not a number, or a decimal with a binary suffix.
    """
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([kKmMgG]?)i?[bB]?\s*", text)
    if not match:
        raise ConfigError(f"{text!r} is not a size. Write a whole number, or one like 8k (8000), 8K (8192), 1.5g.")
    digits, unit = match.groups()
    if "." in digits and unit in ("K", "M", "G", ""):
        raise ConfigError(f"{text!r}: decimals go with k, m or g (powers of 1000), not with {unit or 'no suffix'}.")
    return round(float(digits) * _UNITS[unit]) if "." in digits else int(digits) * _UNITS[unit]


def format_bytes(n: float) -> str:
    """`n` bytes with a binary unit: 96.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
