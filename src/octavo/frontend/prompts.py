"""The forms in which a prompt may come, and turning any of them into one.

A prompt is a string, a list of token ids, or a dict with `prompt` or `prompt_token_ids` (`TextPrompt`, `TokensPrompt`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

from octavo.errors import InvalidRequest, NotYet


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt`, if given, is only shown."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]

_NOT_YET = {
    "prompt_embeds": "prompt embeddings",
    "multi_modal_data": "images, audio and video",
    "encoder_prompt": "encoder-decoder models",
    "decoder_prompt": "encoder-decoder models",
}


@dataclass(frozen=True)
class ParsedPrompt:
    """Text, or token ids, or both (the ids count then)."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """One prompt in any of the allowed forms.

    Raises:
        InvalidRequest: none of them (param "prompt").
        NotYet: embeddings, images and the like.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(_valid_text(prompt), None)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    return ParsedPrompt(None, _parse_ids(prompt))


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """What `LLM.generate` takes, as a list: one prompt in any form, or a sequence of them. A list of ints is one prompt."""
    if isinstance(prompts, (str, Mapping, bytes, bytearray, memoryview)):
        return [cast(Prompt, prompts)]
    try:
        items = list(prompts.tolist() if hasattr(prompts, "tolist") else prompts)  # numpy arrays and tensors
    except TypeError:
        raise InvalidRequest(
            f"A prompt must be a string, a list of token ids, or a dict with prompt or prompt_token_ids; got {type(prompts).__name__}.",
            param="prompt",
        ) from None
    if items and all(_is_integer(item) for item in items):
        return [cast(Sequence[int], items)]
    return cast(list[Prompt], items)


def _is_integer(value: Any) -> bool:
    # Arrays and tensors have __index__ too, but only those without dimensions are numbers.
    return hasattr(value, "__index__") and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key, what in _NOT_YET.items():
        if prompt.get(key) is not None and not (hasattr(prompt[key], "__len__") and len(prompt[key]) == 0):
            raise NotYet(f"{key}: Octavo does not take {what} yet. Send text or token ids.", param=key)
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"prompt must be a string, got {type(text).__name__}.", param="prompt")
    if text is None and ids is None:
        raise InvalidRequest(
            f"A prompt dict needs prompt (text) or prompt_token_ids (ids); got the keys {', '.join(map(repr, prompt)) or 'none'}.",
            param="prompt",
        )
    return ParsedPrompt(None if text is None else _valid_text(text), None if ids is None else _parse_ids(ids), prompt.get("cache_salt"))


def _parse_ids(ids: Any) -> list[int]:
    if isinstance(ids, bytes | bytearray | memoryview) or (not isinstance(ids, Sequence) and not hasattr(ids, "tolist")):
        raise InvalidRequest(
            f"A prompt must be a string, a list of token ids, or a dict with prompt or prompt_token_ids; got {type(ids).__name__}.",
            param="prompt",
        )
    values = ids.tolist() if hasattr(ids, "tolist") else ids  # numpy arrays and tensors
    if isinstance(values, list) and set(map(type, values)) <= {int}:
        return values.copy()  # Nearly always; the rest takes a millisecond for 4,000 tokens.
    for value in values:
        if not _is_integer(value):
            raise InvalidRequest(f"Token ids must be integers, got {value!r}.", param="prompt")
    return [operator.index(value) for value in values]


def _valid_text(text: str) -> str:
    """Half a surrogate pair is legal in JSON and in str, but no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"The prompt has an unpaired surrogate at position {e.start}: it is not valid text.", param="prompt") from None
    return text
