"""Bytes of tokens, read off the decoder."""

from __future__ import annotations

import json

import pytest
from tokenizers import decoders

from octavo.frontend.text.token_bytes import byte_level_alphabet, byte_rule

LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def as_json(decoder: decoders.Decoder) -> dict[str, object]:
    state: dict[str, object] = json.loads(decoder.__getstate__())
    return state


def test_alphabet_has_a_visible_character_for_every_byte() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert all(len(c) == 1 and c.isprintable() and not c.isspace() for c in alphabet)
    assert alphabet["Ġ"] == ord(" ")
    assert alphabet["Ċ"] == ord("\n")


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel()])])
def test_byte_level(decoder: decoders.Decoder) -> None:
    rule = byte_rule(as_json(decoder))
    assert rule is not None
    assert rule.to_bytes("Ġhi") == b" hi"
    assert rule.to_bytes("Ã©") == "é".encode()
    assert rule.to_bytes("<tool call>") == b"<tool call>"
    assert rule.to_bytes("日") == "日".encode()
    assert not rule.strips_space


def test_byte_fallback() -> None:
    rule = byte_rule(as_json(decoders.Sequence(LLAMA)))
    assert rule is not None
    assert rule.to_bytes("<0xE2>") == b"\xe2"
    assert rule.to_bytes("<0xZZ>") == b"<0xZZ>"
    assert rule.to_bytes("▁a▁b") == b" a b"
    assert not rule.strips_space
    stripping = byte_rule(as_json(decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)])))
    assert stripping is not None
    assert stripping.strips_space


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([*LLAMA, decoders.Strip("x", 1, 0)]),
        decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([*LLAMA, decoders.Replace("a", "b")]),
    ],
)
def test_decoders_that_do_more_have_no_rule(decoder: decoders.Decoder) -> None:
    assert byte_rule(as_json(decoder)) is None


def test_no_decoder() -> None:
    assert byte_rule(None) is None
