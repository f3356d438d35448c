"""Log-probabilities in the two shapes that OpenAI's API has, and in the raw one of `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.frontend.http.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from octavo.frontend.outputs import Logprob, PositionLogprobs

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenNames:
    """How tokens are spelled in replies: their own text, or `token_id:123`."""

    def __init__(self, llm: AsyncLLM, *, as_ids: bool) -> None:
        self._llm = llm
        self._as_ids = as_ids

    def name(self, token_id: int, logprob: Logprob | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self._llm.tokenizer.token_text(token_id)

    def bytes(self, token_id: int, name: str) -> list[int]:
        """The token's own bytes: half a character has bytes, though no text."""
        return list(name.encode()) if self._as_ids else list(self._llm.tokenizer.token_bytes(token_id))


def completion_logprobs(
    names: TokenNames, token_ids: Sequence[int], rows: Sequence[PositionLogprobs | None], offset: int
) -> CompletionLogprobs:
    """One entry a token. A row that is None (the first prompt token has no logprob) gives nulls.

    `text_offset` starts at `offset` and rises by the length of each token's own text; `next_offset` goes on from there.
    """
    result = CompletionLogprobs([], [], [], [])
    for token_id, row in zip(token_ids, rows, strict=True):
        own = None if row is None else row.get(token_id)
        name = names.name(token_id, own)
        result.text_offset.append(offset)
        result.tokens.append(name)
        result.token_logprobs.append(None if own is None else finite(own.logprob))
        result.top_logprobs.append(None if row is None else _by_name(names, row))
        offset += len(name)
    return result


def next_offset(logprobs: CompletionLogprobs, offset: int) -> int:
    return logprobs.text_offset[-1] + len(logprobs.tokens[-1]) if logprobs.tokens else offset


def _by_name(names: TokenNames, row: PositionLogprobs) -> dict[str, float]:
    """Different tokens can share a text (halves of characters do): the token of this position comes first and wins."""
    result: dict[str, float] = {}
    for token_id, entry in row.items():
        result.setdefault(names.name(token_id, entry), finite(entry.logprob))
    return result


def chat_logprobs(names: TokenNames, token_ids: Sequence[int], rows: Sequence[PositionLogprobs], top: int) -> ChatLogprobs:
    """`top` alternatives a token (-1: all there are), most likely first."""
    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        own = row[token_id]
        name = names.name(token_id, own)
        ranked = sorted(row.items(), key=lambda item: -item[1].logprob)
        alternatives = []
        for other_id, other in ranked if top == -1 else ranked[:top]:
            other_name = names.name(other_id, other)
            alternatives.append(TopLogprob(other_name, finite(other.logprob), names.bytes(other_id, other_name)))
        content.append(ChatLogprob(name, finite(own.logprob), names.bytes(token_id, name), alternatives))
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
