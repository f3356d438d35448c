"""Which bytes a token stands for, read off a tokenizer's decoder.

Nearly every LLM tokenizer is made of bytes: byte-level BPE spells them in printable characters, SentencePiece with byte
fallback writes them as <0xE2>. For those, text is the concatenation of the tokens' bytes read as UTF-8, which makes decoding
exact at every split and O(1) a token. The invariant: a rule is only returned if that holds for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class ByteRule:
    """How the tokens of one vocabulary spell bytes."""

    to_bytes: Callable[[str], bytes]
    strips_space: bool = False
    """One space at the very beginning of a text is an artefact of the tokenizer and is dropped."""


def byte_rule(decoder: Mapping[str, Any] | None) -> ByteRule | None:
    """The rule of a `tokenizers` decoder given as JSON, or None for one that is not a plain concatenation of bytes."""
    steps = _flatten(decoder) if decoder else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteRule(_byte_level)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        pattern = steps[0].get("pattern")
        space = pattern.get("String") if isinstance(pattern, dict) else None
        if space != "▁" or steps[0].get("content") != " ":
            return None
        if kinds[3:] and (steps[3].get("content"), steps[3].get("start"), steps[3].get("stop")) != (" ", 1, 0):
            return None
        return ByteRule(_byte_fallback, strips_space=bool(kinds[3:]))
    return None


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", ()) for step in _flatten(inner)]
    return [decoder]


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2): itself where it can, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in printable}
    table |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in set(printable))}
    return table


def _byte_level(token: str) -> bytes:
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[c] for c in token])
    except KeyError:  # an added token, spelled as it is
        return token.encode("utf-8", "replace")


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode("utf-8", "replace")
