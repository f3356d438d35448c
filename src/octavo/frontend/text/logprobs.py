"""How single tokens are shown in logprobs, and where in the text they stand.

* A token is shown as its own text, with its leading space, special tokens spelled out. One that holds part of a character
  only is shown as its bytes, `bytes:\\xf0\\x9f`, as OpenAI does, so that different tokens never look the same.
* The offset of a token is the length, in characters, of the text before it. A token moves it by the characters it completes:
  its own length, except that a part of a character moves it only when the character is whole, and a token that is not in
  the text (a skipped special token) not at all. Offsets therefore always point into the text that is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.frontend.text.detokenizer import IncrementalDetokenizer
from octavo.frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenDisplay:
    """One token as logprobs show it."""

    token: str
    bytes: list[int]
    """The bytes it stands for: those of neighbours put together are the text in UTF-8."""


def display_token(tokenizer: Tokenizer | None, token_id: int, *, as_id: bool = False) -> TokenDisplay:
    """A token for a logprobs entry.

    Args:
        tokenizer: None if the engine runs without one; then only the id can be shown.
        as_id: show `token_id:N` (return_tokens_as_token_ids).
    """
    data = tokenizer.token_bytes(token_id) if tokenizer is not None else b""
    if tokenizer is None or as_id:
        return TokenDisplay(f"token_id:{token_id}", list(data))
    return TokenDisplay(_label(data), list(data))


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's own text, or `bytes:...` for one that is no whole text. For `Logprob.decoded_token`."""
    return _label(tokenizer.token_bytes(token_id))


def _label(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextOffsets:
    """Offsets of the tokens of one text, in order.

    Args:
        prompt_tail_ids: what comes before, when the prompt is not part of the text (no echo).
        start: offset of the first token.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail_ids: Sequence[int] = (), *, skip_special_tokens: bool = True, start: int = 0
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_tail_ids, skip_special_tokens)
        self.offset = start
        """Where the next token stands."""

    def push(self, ids: Iterable[int]) -> list[int]:
        """The offset of each of the next tokens."""
        offsets = []
        for token_id in ids:
            offsets.append(self.offset)
            self.offset += len(self._detokenizer.push([token_id]))
        return offsets
