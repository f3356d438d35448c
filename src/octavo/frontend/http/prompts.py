"""From the `prompt` of a request to token ids: every form it may have, checked by hand so that errors stay short."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.limits import COST_OF_AN_ENTRY, LARGE_IDS, TOKENIZE_CHARS

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

LONG_TEXT = 20_000
"""Characters from which on tokenising moves to a thread, so that it does not hold up every other stream."""

_FORMS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids, and the text they come from (None when the request gave ids)."""

    token_ids: list[int]
    text: str | None


def split_prompts(prompt: Any, param: str = "prompt") -> list[str | list[int]]:
    """The prompts in the field `param` of a request.

    Raises:
        InvalidRequest: none, or not one of the four forms.
    """
    if prompt is None:
        raise InvalidRequest(f"{param} is missing.", param=param)
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequest(f"{param} {_FORMS}; got {short_repr(prompt)}.", param=param)
    if not prompt:
        raise InvalidRequest(f"{param} must not be empty: the list has no prompts and no tokens.", param=param)
    if _is_token_id(prompt[0]):
        return [_token_ids(prompt, param)]
    prompts: list[str | list[int]] = []
    for item in prompt:
        if isinstance(item, list):
            prompts.append(_token_ids(item, param))
        elif isinstance(item, str):
            prompts.append(item)
        else:
            raise InvalidRequest(f"{param} {_FORMS}; got {short_repr(item)} in the list.", param=param)
    return prompts


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(values: list[Any], param: str) -> list[int]:
    for value in values:
        if not _is_token_id(value):
            raise InvalidRequest(f"{param} {_FORMS}; got {short_repr(value)} among token ids.", param=param)
    return values


@dataclass(frozen=True)
class Truncation:
    """How many tokens of a prompt are wanted: its last ones, or its first."""

    tokens: int
    from_end: bool = True

    @staticmethod
    def asked(llm: AsyncLLM, limit: int | None, side: str | None, max_tokens: int | None) -> Truncation | None:
        """What a request's truncate_prompt_tokens and truncation_side mean: -1 is what fits beside `max_tokens`.

        Raises:
            InvalidRequest: no such limit.
        """
        if limit is None:
            return None
        if limit != -1 and limit < 1:
            raise InvalidRequest(f"truncate_prompt_tokens must be -1 or at least 1, got {limit}.", param="truncate_prompt_tokens")
        if limit == -1:
            limit = max(1, llm.ready_report.max_model_len - max(1, max_tokens or 1))
        return Truncation(limit, from_end=side != "right")

    def of(self, prompt: EncodedPrompt) -> EncodedPrompt:
        ids = prompt.token_ids
        if len(ids) <= self.tokens:
            return prompt
        return EncodedPrompt(ids[-self.tokens :] if self.from_end else ids[: self.tokens], None)


async def encode_text(
    llm: AsyncLLM,
    text: str,
    *,
    add_special_tokens: bool,
    must_fit: bool = False,
    truncation: Truncation | None = None,
    param: str = "prompt",
) -> list[int]:
    """`text` as token ids.

    Args:
        truncation: of a long text only a part is tokenized, in which the wanted tokens are.
        must_fit: refuse a text that cannot fit into the context without tokenising it, which takes seconds for megabytes.
        param: the field that the text comes from.

    Raises:
        InvalidRequest: this server has no tokenizer; or see `must_fit`.
    """
    tokenizer = llm.tokenizer
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if must_fit:
        check_length(llm, len(text), param)
    if truncation is not None:
        encode_part = partial(tokenizer.encode_part, from_end=truncation.from_end, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(encode_part, text, truncation.tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def check_length(llm: AsyncLLM, characters: int, param: str = "prompt") -> None:
    """Raises InvalidRequest when a prompt of so many characters cannot fit into the context, whatever its tokens."""
    limit, longest = llm.ready_report.max_model_len, llm.tokenizer.longest_token
    if characters > limit * longest:
        raise InvalidRequest(
            f"This model's context length is {limit} tokens, but the prompt has {characters} characters: at least "
            f"{characters // longest} tokens. Shorten the prompt (or use truncate_prompt_tokens).",
            param=param,
            code="context_length_exceeded",
        )


def check_tokenizable(llm: AsyncLLM, text: str, param: str) -> None:
    """Raises InvalidRequest when a text is longer than /tokenize takes."""
    limit = max(TOKENIZE_CHARS, llm.ready_report.max_model_len * llm.tokenizer.longest_token)
    if len(text) > limit:
        raise InvalidRequest(
            f"{param} has {len(text)} characters; {limit} can be tokenized in one request. Send it in pieces.", param=param
        )


async def encode_prompts(
    llm: AsyncLLM, prompts: Sequence[str | list[int]], *, add_special_tokens: bool, truncation: Truncation | None = None
) -> list[EncodedPrompt]:
    """All prompts of a request, cut by `truncation`; without one they must fit into the context.

    Raises:
        InvalidRequest: a prompt with no tokens. (What the ids are is checked by the engine's door.)
    """
    encoded, done, must_fit = [], 0, truncation is None
    for number, prompt in enumerate(prompts):
        if (done := done + COST_OF_AN_ENTRY + len(prompt)) > LONG_TEXT:
            done = 0
            await asyncio.sleep(0)  # many short texts take as long as a long one: the streams of others get their turn
        if isinstance(prompt, str):
            ids = await encode_text(llm, prompt, add_special_tokens=add_special_tokens, must_fit=must_fit, truncation=truncation)
            one = EncodedPrompt(ids, prompt)
        else:
            _check_ids_fit(llm, prompt, must_fit)
            one = EncodedPrompt(prompt, None)
        if not one.token_ids:
            which = f"prompt {number} of the list" if len(prompts) > 1 else "it"
            raise InvalidRequest(f"prompt must not be empty: {which} has no tokens.", param="prompt")
        encoded.append(one if truncation is None else truncation.of(one))
    return encoded


def _check_ids_fit(llm: AsyncLLM, ids: list[int], must_fit: bool) -> None:
    """Refuse a long list that cannot fit before anything looks at each of its ids. (A short one is left to the engine's door.)"""
    limit = llm.ready_report.max_model_len
    if must_fit and len(ids) > max(limit, LARGE_IDS):
        raise InvalidRequest(
            f"This model's context length is {limit} tokens, but the prompt has {len(ids)} tokens. "
            "Shorten the prompt (or use truncate_prompt_tokens).",
            param="prompt",
            code="context_length_exceeded",
        )


def check_token_ids(llm: AsyncLLM, ids: Sequence[int], param: str) -> None:
    """Raises InvalidRequest when an id is not in the vocabulary."""
    size = llm.ready_report.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        wrong = next(i for i in ids if not 0 <= i < size)
        raise InvalidRequest(f"{param}: {short_repr(wrong)} is not a token id of this model (0 to {size - 1}).", param=param)


def prompt_text(llm: AsyncLLM, prompt: EncodedPrompt) -> str:
    """The prompt as text, for `echo`."""
    if prompt.text is not None:
        return prompt.text
    return llm.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
