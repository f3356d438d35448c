"""Text of a growing sequence of tokens, piece by piece.

The invariant, at any split of the tokens: what `push` has returned plus `flush` equals the text that decoding prompt and
output together adds to that of the prompt, but for a character at its end that is not complete; and no piece ends inside a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from octavo.frontend.text.tokenizer import Tokenizer

_UTF8_BYTES = 4
"""The longest character."""
_CONTEXT = 4
"""Visible tokens before the new ones that a decoder needs to see: it may drop the space of the first word it gets."""
_REPLACEMENT = "�"


class IncrementalDetokenizer:
    """Detokenizes one sequence. Work per token is constant, whatever came before.

    Args:
        prompt_tail_ids: the prompt, or at least the end of it. Only the last few visible tokens are looked at: they decide
            whether a first space counts, and may hold the beginning of a character that the output completes.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: matters to Python tokenizers of transformers alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._stream: _ByteStream | _WindowStream
        if tokenizer.made_of_bytes:
            self._stream = _ByteStream(tokenizer, prompt_tail_ids, skip_special_tokens)
        else:
            self._stream = _WindowStream(tokenizer, prompt_tail_ids, skip_special_tokens, spaces_between_special_tokens)

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` add. Bytes of an incomplete character are kept until the rest of it comes."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """At the end of the sequence: what is left. A limit may have cut it inside a character (an emoji has up to four tokens): of that nothing
        is shown, as U+FFFD would be none of the model's text."""
        return self._stream.flush()


def _visible_tail(ids: Sequence[int], skipped: frozenset[int], tokenizer: Tokenizer, tokens: int, size: int) -> list[int]:
    """The last visible tokens of `ids`, until there are `tokens` of them or they hold `size` bytes."""
    tail: list[int] = []
    for token_id in reversed(ids):
        if len(tail) >= tokens or size <= 0:
            break
        if token_id not in skipped and (data := tokenizer.token_bytes(token_id)):
            tail.append(token_id)
            size -= len(data)
    return tail[::-1]


class _ByteStream:
    """For tokenizers made of bytes: exactly the text of the bytes, by an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = _visible_tail(prompt, self._skipped, tokenizer, tokens=_UTF8_BYTES, size=_UTF8_BYTES)
        # What the last four bytes decode to is the prompt's; what the decoder keeps of them is ours to complete.
        self._decoder.decode(b"".join(map(self._token_bytes, tail)))
        self._drop_space = tokenizer.strips_space and not tail

    def push(self, ids: Iterable[int]) -> str:
        return self._trim(self._decoder.decode(b"".join([self._token_bytes(i) for i in ids if i not in self._skipped])))

    def flush(self) -> str:
        kept, _ = self._decoder.getstate()
        self._decoder.reset()
        # All that it keeps is the beginning of a character, or of half a surrogate pair, which is none.
        return self._trim(kept.decode("utf-8", "replace")) if kept[:1] == b"\xed" and kept[1:2] >= b"\xa0" else ""

    def _trim(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


class _WindowStream:
    """For any other tokenizer: decode a short window twice, with and without the new tokens; the difference is the new text.

    Exact for decoders where later tokens do not change text that is already out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool, spaces: bool) -> None:
        self._tokenizer = tokenizer
        self._spaces = spaces
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._window = _visible_tail(prompt, self._skipped, tokenizer, tokens=_CONTEXT + _UTF8_BYTES, size=1 << 30)
        self._shown = len(self._window)
        """Tokens of the window whose text is out."""

    def push(self, ids: Iterable[int]) -> str:
        # Ids outside the vocabulary would push the tokens that give context out of the window.
        self._window += [i for i in ids if i not in self._skipped and self._tokenizer.backend.token(i) is not None]
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        pending = len(self._window) - self._shown
        if pending == 0:
            return ""
        before, after = self._text(self._window[: self._shown]), self._text(self._window)
        # A character has at most four bytes, so a longer wait is for one that will never be complete.
        if after.endswith(_REPLACEMENT) and pending < _UTF8_BYTES and not final:
            return ""
        self._window = self._window[-max(_CONTEXT, pending) :]
        self._shown = len(self._window)
        added = after[len(before) :]
        return added.rstrip(_REPLACEMENT) if final and pending < _UTF8_BYTES else added

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=self._spaces)
