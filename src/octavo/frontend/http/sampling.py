"""From request fields to `SamplingParams`. What a request leaves out comes from the server's generation config, then from OpenAI's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import InvalidRequest, NotYet
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.schemas import GenerationRequest
from octavo.protocol.params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

LARGEST = 2**31 - 1
"""Counts above this mean no limit just as well, and everything behind the door may use 32 bits."""

_FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_AS_GIVEN = (
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logprob_token_ids",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stream_interval",
    "thinking_token_budget",
)


def check_common(body: GenerationRequest, max_sequences: int, prompts: int) -> None:
    """Relations between fields, and what is known not to work.

    Raises:
        InvalidRequest, NotYet
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options can be given only with stream: true.", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed; use stream: false.", param="prompt_logprobs")
    n = 1 if body.n is None else body.n
    if n * prompts > max_sequences:
        raise InvalidRequest(f"n={n} x {prompts} prompts is more than the {max_sequences} sequences allowed in one request.", param="n")
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest(f"best_of={body.best_of} is not supported: leave it out, or make it equal to n={n}.", param="best_of")
    if body.use_beam_search and body.thinking_token_budget is not None:
        raise InvalidRequest("use_beam_search cannot be combined with thinking_token_budget.", param="use_beam_search")
    if body.truncation_side not in (None, "left", "right"):
        raise InvalidRequest(f"truncation_side must be left or right, got {short_repr(body.truncation_side)}.", param="truncation_side")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= 1024:
        raise InvalidRequest(f"cache_salt must have 1 to 1024 characters, got {len(body.cache_salt)}.", param="cache_salt")
    for name in ("repetition_detection", "kv_transfer_params"):
        if getattr(body, name) is not None:
            raise NotYet(f"{name} is not supported yet; leave it out.", param=name)


def sampling_params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured_outputs: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """`max_tokens` None fills the context; the server's own limit, if it has one, caps it.

    Raises:
        InvalidRequest: a value outside its range.
    """
    values: dict[str, Any] = {name: defaults[name] for name in _FROM_GENERATION_CONFIG if defaults.get(name) is not None}
    for name in (*_FROM_GENERATION_CONFIG, *_AS_GIVEN):
        if (value := getattr(body, name)) is not None:
            values[name] = value
    if "top_k" in values:
        values["top_k"] = min(values["top_k"], LARGEST)
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = max(prompt_logprobs, values.get("prompt_logprobs", 0))
    if body.use_beam_search:
        # The search has parameters of its own (beam_params); these are checked, and n is its width.
        values["temperature"] = max(1.0, values.get("temperature", 1.0))
    return SamplingParams(
        **values,
        max_tokens=_capped(max_tokens, defaults.get("max_tokens")),
        logprobs=logprobs,
        extra_args=body.vllm_xargs,
        structured_outputs=structured_outputs,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )


def beam_params(body: GenerationRequest, max_tokens: int | None, room: int) -> BeamSearchParams:
    """`n` is the beam width; every beam is returned."""
    return BeamSearchParams(
        beam_width=1 if body.n is None else body.n,
        max_tokens=room if max_tokens is None else min(max_tokens, LARGEST),
        ignore_eos=bool(body.ignore_eos),
        temperature=body.temperature or 0.0,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def _capped(max_tokens: int | None, limit: int | None) -> int | None:
    given = [value for value in (max_tokens, limit) if value is not None]
    return min(*given, LARGEST) if given else None
