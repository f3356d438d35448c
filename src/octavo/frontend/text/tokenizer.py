"""`Tokenizer`: text to token ids and back, the same way for every path a prompt can take.

The one rule for special tokens: those a tokenizer puts at the ends of a text (BOS, sometimes EOS) are added only when the
caller asks (`add_special_tokens`), the tokenizer says so, and the text does not have them there already. So a prompt never
starts with two BOS, offline or over HTTP, as plain text or as a rendered chat template. Plain prompts ask by default;
rendered templates (`encode_chat`) do not, because a template writes its own.

Nothing here changes after construction, so one tokenizer may be used from any number of threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from octavo.checkpoint.types import Checkpoint
from octavo.config.args import EngineArgs
from octavo.errors import InvalidRequest
from octavo.frontend.characters import whole_characters
from octavo.frontend.parsing.formats import GENERIC, CallSyntax
from octavo.frontend.text.backend import TokenBackend
from octavo.frontend.text.chat_template import ChatTemplates

MIN_PART = 20_000
"""Characters that are always tokenized: shorter texts are never cut."""
PART_MARGIN = 8192
"""Characters around a cut: in the first half a blank is looked for."""
SPARE_TOKENS = 64
"""Tokens next to a cut that may be others than without it."""
_BEFORE_BLANK = re.compile(r"\S(?=\s)")


class Tokenizer:
    """The tokenizer of one model, with its chat templates."""

    def __init__(
        self,
        backend: TokenBackend,
        *,
        templates: ChatTemplates,
        special_tokens: Mapping[str, Any],
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
    ) -> None:
        """
        Args:
            special_tokens: bos_token, eos_token, ... as text.
            prefix: ids the tokenizer puts before a text (BOS); `suffix`: after it.
        """
        self.backend = backend
        self.templates = templates
        self.prefix = list(prefix)
        self.suffix = list(suffix)
        self.special_ids = backend.special_ids
        self.bos_token_id = self._named_id(special_tokens, "bos_token")
        self.eos_token_id = self._named_id(special_tokens, "eos_token")
        rule = backend.rule
        self._bytes = _TokenBytes(backend, rule.to_bytes) if rule else None
        self.strips_space = rule is not None and rule.strips_space
        """A space at the very beginning of a decoded text is dropped."""

    def _named_id(self, special_tokens: Mapping[str, Any], name: str) -> int | None:
        token = special_tokens.get(name)
        return self.backend.id_of(token) if isinstance(token, str) else None

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text become their ids.

        Raises:
            InvalidRequest: not a string.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"A prompt must be a string, got {type(text).__name__}.", param="prompt")
        try:
            ids = self.backend.encode(text)
        except (UnicodeEncodeError, TypeError):  # half a surrogate pair, which JSON can carry and UTF-8 cannot
            ids = self.backend.encode(whole_characters(text))
        if not add_special_tokens:
            return ids
        if self.prefix and ids[: len(self.prefix)] != self.prefix:
            ids = self.prefix + ids
        if self.suffix and ids[-len(self.suffix) :] != self.suffix:
            ids = ids + self.suffix
        return ids

    def encode_part(self, text: str, tokens: int, *, from_end: bool, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text of which only the first (or last) `tokens` tokens are wanted: those are in the result, with more beside them.

        Costs what the wanted part costs, whatever the text has besides. A cut changes the tokens around it, so it is made where a word
        begins, and far enough away; only in a text without blanks for thousands of characters may a token differ.
        """
        size = max(MIN_PART, (tokens + 1) * self.longest_token + PART_MARGIN)
        while size < len(text):
            ids = self.encode(_part(text, size, from_end), add_special_tokens)
            if len(ids) >= tokens + SPARE_TOKENS:
                return ids
            size *= 4  # some normalizers make little of long texts
        return self.encode(text, add_special_tokens)

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> tuple[list[int], int]:
        """Ids of two texts as a model that scores pairs wants them, and where the second begins.

        Args:
            limit: cut to this many tokens, from the end of the second text; the special tokens behind it stay.

        Raises:
            InvalidRequest: the limit leaves nothing of the second text.
        """
        whole = first, second
        if limit is not None:
            most = max(MIN_PART, (limit + 1) * self.longest_token + PART_MARGIN)
            first, second = _part(first, most, False), _part(second, most, False)
        ids, types = self.backend.encode_pair(first, second)
        if limit is not None and len(ids) < limit + SPARE_TOKENS and (first, second) != whole:
            # Some normalizers make little of long texts: then what was cut off would have been kept.
            ids, types = self.backend.encode_pair(*whole)
        begin = types.index(1) if 1 in types else len(ids)
        if limit is None or len(ids) <= limit:
            return ids, begin
        behind = next((n for n, token in enumerate(reversed(ids)) if token not in self.special_ids), 0)
        if limit - behind <= begin:
            raise InvalidRequest(
                f"The first text alone has {'at least ' if first != whole[0] else ''}{begin} tokens, which leaves no room for the second within {limit}. Shorten it.",
                param="truncate_prompt_tokens",
            )
        return ids[: limit - behind] + ids[len(ids) - behind :], begin

    def encode_chat(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered chat template: what the template wrote, nothing added unless asked, never BOS twice."""
        return self.encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self,
        messages: Any,
        *,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        call_syntax: CallSyntax | None = GENERIC.syntax,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation; see `ChatTemplates.render`. `kwargs` are variables for the template."""
        return self.templates.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=kwargs,
            call_syntax=call_syntax,
        )

    # Ids to text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids outside the vocabulary are nothing; bytes that are no UTF-8 become U+FFFD.

        `spaces_between_special_tokens` matters to the Python tokenizers of transformers alone, as it does there.
        """
        if self._bytes is None:
            return self.backend.decode([i for i in ids if i >= 0], skip_special_tokens, spaces_between_special_tokens)
        table, skipped = self._bytes, self.special_ids if skip_special_tokens else ()
        text = b"".join([table[i] for i in ids if i not in skipped]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space else text

    def token_text(self, token_id: int) -> str:
        """A token's own text, with its leading space if it has one; U+FFFD where it holds part of a character."""
        if self._bytes is not None:
            return self._bytes[token_id].decode("utf-8", "replace")
        return self.backend.decode([token_id], False, True) if token_id >= 0 else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for (its text's bytes, for a tokenizer that is not made of bytes)."""
        return self._bytes[token_id] if self._bytes is not None else self.token_text(token_id).encode("utf-8", "replace")

    @property
    def made_of_bytes(self) -> bool:
        """Text is the tokens' bytes put together (true of nearly all LLM tokenizers)."""
        return self._bytes is not None

    # The vocabulary

    @cached_property
    def _extent(self) -> tuple[int, int]:
        vocab = self.backend.vocab()
        return max(vocab.values(), default=-1) + 1, max((len(token) for token in vocab), default=0)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._extent[0]

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least about n / longest_token tokens, so one that
        is far too long can be refused without being encoded."""
        return self._extent[1]

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens by their text."""
        return {token: i for i in sorted(self.special_ids) if (token := self.backend.token(i)) is not None}

    @property
    def chat_template(self) -> str | None:
        """The model's usual chat template; None if it has none."""
        return self.templates.default


def _part(text: str, size: int, from_end: bool) -> str:
    """About `size` characters of a text, cut where a word begins if one does."""
    if len(text) <= size:
        return text
    at = len(text) - size if from_end else size
    found = _BEFORE_BLANK.search(text, at, at + PART_MARGIN // 2)
    at = found.end() if found is not None else at
    return text[at:] if from_end else text[:at]


def load_tokenizer(checkpoint: Checkpoint, args: EngineArgs) -> Tokenizer:
    """The tokenizer of a checkpoint, or the one that --tokenizer names, with --chat-template applied.

    Raises:
        CheckpointError: no tokenizer, or its files are malformed.
        UnsupportedModel: a GGUF vocabulary of a kind that is not known.
        ModelNotFound: --tokenizer names nothing.
        ConfigError: --chat-template is neither a file nor a valid template, or transformers is needed and not there.
    """
    from octavo.frontend.text.load import load  # it builds Tokenizers, so it imports this module

    return load(checkpoint, args)


class _TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled as ids are met. Threads may fill it together: they write the same values."""

    def __init__(self, backend: TokenBackend, to_bytes: Any) -> None:
        super().__init__()
        self._backend = backend
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.token(token_id)
        value: bytes = b"" if token is None else self._to_bytes(token)
        self[token_id] = value
        return value
