"""Log-probabilities in the two shapes that OpenAI's API has, and in the raw one of `prompt_logprobs`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest
from octavo.frontend.http.prompts import EncodedPrompt
from octavo.frontend.http.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from octavo.frontend.outputs import PositionLogprobs
from octavo.frontend.text.logprobs import TextOffsets, TokenDisplay, display_token

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""
TAIL = 16
"""Prompt tokens that decide how the first output token joins the text."""


class TokenNames:
    """How tokens are spelled in replies: their own text, or `token_id:123`."""

    def __init__(self, llm: AsyncLLM, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self.tokenizer: Tokenizer | None = None
        # With skip_tokenizer_init ids are all there is.
        with contextlib.suppress(InvalidRequest):
            self.tokenizer = llm.tokenizer

    def show(self, token_id: int) -> TokenDisplay:
        return display_token(self.tokenizer, token_id, as_id=self._as_ids)


class CompletionScores:
    """The `logprobs` of one choice of a completion, piece by piece. `text_offset` points into the text that is returned."""

    def __init__(self, names: TokenNames, prompt: EncodedPrompt, *, skip_special_tokens: bool) -> None:
        self._names = names
        self._prompt = prompt
        self._skip = skip_special_tokens
        self._offset = 0
        self._outputs: TextOffsets | None = None

    def prompt(self, rows: Sequence[PositionLogprobs | None] | None) -> CompletionLogprobs:
        """The prompt's part, for `echo`. The first token has no logprob; no rows: none has."""
        ids = self._prompt.token_ids
        rows = [None] * len(ids) if rows is None else rows
        return self._piece(ids, rows, self._prompt_offsets())

    def outputs(self, ids: Sequence[int], rows: Sequence[PositionLogprobs]) -> CompletionLogprobs:
        """The next output tokens."""
        tokenizer = self._names.tokenizer
        if tokenizer is None:
            return self._piece(ids, rows, [0] * len(ids))
        if self._outputs is None:
            tail = self._prompt.token_ids[-TAIL:]
            self._outputs = TextOffsets(tokenizer, tail, skip_special_tokens=self._skip, start=self._offset)
        return self._piece(ids, rows, self._outputs.push(ids))

    def _prompt_offsets(self) -> list[int]:
        ids, tokenizer = self._prompt.token_ids, self._names.tokenizer
        if tokenizer is None:
            return [0] * len(ids)
        # The echoed text is what was sent: a BOS that the tokenizer put before it is not in it.
        added, prefix = 0, tokenizer.prefix
        text = self._prompt.text
        if text is not None and prefix and ids[: len(prefix)] == prefix:
            added = 0 if text.startswith(tokenizer.decode(prefix, skip_special_tokens=False)) else len(prefix)
        offsets = TextOffsets(tokenizer, ids[:added], skip_special_tokens=False)
        result = [0] * added + offsets.push(ids[added:])
        self._offset = len(text) if text is not None else offsets.offset
        return result

    def _piece(self, ids: Sequence[int], rows: Sequence[PositionLogprobs | None], offsets: list[int]) -> CompletionLogprobs:
        result = CompletionLogprobs(offsets, [], [], [])
        for token_id, row in zip(ids, rows, strict=True):
            own = None if row is None else row.get(token_id)
            result.tokens.append(self._names.show(token_id).token)
            result.token_logprobs.append(None if own is None else finite(own.logprob))
            result.top_logprobs.append(
                None if row is None else {self._names.show(i).token: finite(entry.logprob) for i, entry in row.items()}
            )
        return result


def joined(pieces: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    whole = CompletionLogprobs([], [], [], [])
    for piece in pieces:
        whole.text_offset += piece.text_offset
        whole.token_logprobs += piece.token_logprobs
        whole.tokens += piece.tokens
        whole.top_logprobs += piece.top_logprobs
    return whole


def chat_logprobs(names: TokenNames, token_ids: Sequence[int], rows: Sequence[PositionLogprobs], top: int) -> ChatLogprobs:
    """`top` alternatives a token (-1: all there are), most likely first."""
    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        own = names.show(token_id)
        ranked = sorted(row.items(), key=lambda item: -item[1].logprob)
        alternatives = []
        for other_id, other in ranked if top == -1 else ranked[:top]:
            shown = names.show(other_id)
            alternatives.append(TopLogprob(shown.token, finite(other.logprob), shown.bytes))
        content.append(ChatLogprob(own.token, finite(row[token_id].logprob), own.bytes, alternatives))
    return ChatLogprobs(content)


def prompt_logprobs(rows: Sequence[PositionLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """The `prompt_logprobs` extension: token id -> {logprob, rank, decoded_token}, one a prompt token."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(token_id): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token_id, entry in row.items()
        }
        for row in rows
    ]


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
