"""The tokenizer implementations behind `Tokenizer`: Rust `tokenizers`, and Python tokenizers of `transformers`.

A backend turns text into ids and ids into text, nothing more: special tokens at the ends, chat templates and streaming are the
business of `Tokenizer`. Backends are read-only once made, so any number of threads may use one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from octavo.frontend.text.token_bytes import ByteRule, byte_rule

if TYPE_CHECKING:
    import tokenizers


LONG_TEXT = 5_000
"""Characters from which on a text is encoded without the GIL. (Getting it back may take 5 ms, longer than a short text takes.)"""


class TokenBackend(Protocol):
    """What `Tokenizer` needs of an implementation."""

    special_ids: frozenset[int]
    """Tokens that skip_special_tokens leaves out."""
    rule: ByteRule | None
    """How tokens spell bytes; None if `decode` is the only way to text."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, special tokens in it recognised, none added."""
        ...

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Ids of two texts as one, with the special tokens around and between them; and 1 for each that belongs to the second."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str: ...

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id it does not have."""
        ...

    def id_of(self, token: str) -> int | None: ...

    def vocab(self) -> dict[str, int]: ...

    def as_json(self) -> str:
        """The tokenizer as the `tokenizers` library writes it; empty if it cannot be written so."""
        ...


class FastBackend:
    """A `tokenizers.Tokenizer`. It releases the GIL while it works on a long text, so that one can be encoded in a thread."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # A tokenizer.json may carry the padding and truncation of its training; prompts must get neither.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        decoder = tokenizer.decoder
        self.rule = byte_rule(json.loads(decoder.__getstate__())) if decoder is not None else None

    def encode(self, text: str) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # `encode` keeps the GIL; this does not, and leaves out the offsets that nobody here reads.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        encoded = self._tokenizer.encode(first, second, add_special_tokens=True)
        types = encoded.type_ids
        if not any(types):  # the tokenizer does not number its texts, but knows which is which
            types = [int(sequence == 1) for sequence in encoded.sequence_ids]
        return encoded.ids, types

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def as_json(self) -> str:
        return self._tokenizer.to_str()

    def added_ends(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's own post-processor puts before and after a text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []


class SlowBackend:
    """A Python tokenizer of `transformers` (plain SentencePiece, tiktoken and the like)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.rule: ByteRule | None = None
        self._size = len(tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        encoded = self._tokenizer(first, second, return_token_type_ids=True)
        return list(encoded["input_ids"]), list(encoded["token_type_ids"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
        known = [i for i in ids if 0 <= i < self._size]
        return str(
            self._tokenizer.decode(
                known,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < self._size else None

    def id_of(self, token: str) -> int | None:
        return self.vocab().get(token)

    def vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def as_json(self) -> str:
        return ""

    def added_ends(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after a text."""
        full = list(self._tokenizer.build_inputs_with_special_tokens([-1]))
        return full[: full.index(-1)], full[full.index(-1) + 1 :]
