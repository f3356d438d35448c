"""Half surrogate pairs: JSON and `str` can carry them, UTF-8 cannot, so that no tokenizer, reply or file takes them.

Where a request holds one it is refused at the door. Where one comes out of something that was decoded later (arguments of a tool call
that are JSON inside a text, a chat template's own escapes) it is replaced here.
"""

from __future__ import annotations


def whole_characters(text: str) -> str:
    """`text` with pairs put together and halves replaced by U+FFFD; nearly always as it is."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
