"""How much a JSON text holds, known before anything is built of it.

A decoder builds millions of empty lists out of a few megabytes in one go, with every other thread waiting, and the garbage collector
walks over them from then on. And what it takes to read a number grows with the square of its digits. So objects, lists, texts, depth and
digits are counted in the bytes first. What these counts allow, any later walk over the values goes through in a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_CONTAINERS = 50_000
"""Objects and lists of a text."""
MAX_FIELDS = 300_000
"""Fields of all its objects: a logit_bias may name every token of a vocabulary."""
MAX_TEXTS = 1_000_000
"""Texts in it, names of fields too."""
MAX_VALUES = 4_000_000
"""Values of all lists and objects: numbers are the smallest, and prompts may be token ids."""
MAX_DEPTH = 100
MAX_DIGITS = 320
"""Digits in a row of a number: enough for the largest float written out."""

_TOO_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)
_AS_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_QUOTE, _OPEN, _CLOSE, _COLON, _COMMA, _ZERO, _NINE = (ord(c) for c in '"{}:,09')
_FOLD = 0x20
"""[ and ] differ from { and } by this bit."""


class TooMuch(ValueError):
    """A text holds more than is allowed. The message ends a sentence that begins with the text's name: "holds 50001 lists; ..."."""


@dataclass(frozen=True)
class JsonShape:
    """Counts of one text, exact for valid JSON. (For anything else they mean nothing, and the decoder refuses it.)"""

    containers: int
    fields: int
    texts: int
    values: int
    """At most one too many for each empty list or object."""
    depth: int
    """0 where it was not asked for."""


def json_shape(data: bytes, *, depth_up_to: int | None = None) -> JsonShape:
    """Counts in one pass of numpy: about 10 ns a byte, most of it outside of the interpreter's lock.

    Args:
        depth_up_to: with more containers than these, the depth is left out: it takes longer than the rest.
    """
    import numpy as np

    text, quotes, outside = _marked(data)
    folded = text | _FOLD
    opens = (folded == _OPEN) & outside
    containers = int(np.count_nonzero(opens))
    depth = 0
    if depth_up_to is None or containers <= depth_up_to:
        steps = opens.view(np.int8) - ((folded == _CLOSE) & outside).view(np.int8)
        depth = int(np.cumsum(steps[steps != 0], dtype=np.int64).max(initial=0))
    return JsonShape(
        containers=containers,
        fields=int(np.count_nonzero((text == _COLON) & outside)),
        texts=int(np.count_nonzero(quotes)) // 2,
        values=int(np.count_nonzero((text == _COMMA) & outside)) + containers,
        depth=depth,
    )


def _marked(data: bytes) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """The bytes of a JSON text, which of them are quotes, and which are outside of its texts."""
    if b"\\" in data:  # pairs are taken from the left, so what is left before a quote escapes it
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    import numpy as np  # not for the sake of a help page

    text = np.frombuffer(data, np.uint8)
    quotes = text == _QUOTE
    return text, quotes, ~np.bitwise_xor.accumulate(quotes)


def _has_long_number(data: bytes) -> bool:
    """Whether a number of a JSON text has more than `MAX_DIGITS` digits in a row."""
    text, _, outside = _marked(data)
    digits = (text >= _ZERO) & (text <= _NINE) & outside
    length = 1
    while length <= MAX_DIGITS:  # where so many digits begin, from where half of them do
        step = min(length, MAX_DIGITS + 1 - length)
        digits = digits[:-step] & digits[step:]
        length += step
    return bool(digits.any())


def check_shape(data: bytes) -> None:
    """Raises TooMuch when a JSON text holds more than any request needs.

    Counts that cannot be too low come first: most texts are small, and need no more.
    """
    digits = len(data) > MAX_DIGITS and _TOO_MANY_DIGITS in data.translate(_AS_DIGITS)  # perhaps within a text, where they cost nothing
    if digits and _has_long_number(data):
        raise TooMuch(f"holds a number of more than {MAX_DIGITS} digits.")
    if (
        data.count(b"[") + data.count(b"{") <= MAX_DEPTH
        and data.count(b":") <= MAX_FIELDS
        and data.count(b'"') // 2 <= MAX_TEXTS
        and data.count(b",") + MAX_DEPTH <= MAX_VALUES
    ):
        return
    shape = json_shape(data, depth_up_to=MAX_CONTAINERS)
    for given, limit, what in (
        (shape.containers, MAX_CONTAINERS, "objects and lists"),
        (shape.fields, MAX_FIELDS, "fields of its objects"),
        (shape.texts, MAX_TEXTS, "texts"),
        (shape.values, MAX_VALUES, "values"),
    ):
        if given > limit:
            raise TooMuch(f"holds {given} {what}; at most {limit} are allowed in one request.")
    if shape.depth > MAX_DEPTH:
        raise TooMuch(f"is nested too deeply: {shape.depth} levels; {MAX_DEPTH} are allowed.")
