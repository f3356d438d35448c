"""Routes about requests rather than for them: what a request would send to the model, and ending one that runs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest
from octavo.frontend.http.chat_plan import plan_chat
from octavo.frontend.http.context import ServerContext, context_of, json_response, request_id
from octavo.frontend.http.prompts import EncodedPrompt
from octavo.frontend.http.routes.completions import plan_completion
from octavo.frontend.http.schemas import AbortRequest, ChatRequest, CompletionRequest, body_schema
from octavo.protocol.params import SamplingParams

router = APIRouter()

_OURS = frozenset(
    {
        "output_kind",
        "detokenize",
        "bad_words_token_ids",
        "constraint",
        "extra_args",
        "flat_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "repetition_detection",
        "skip_reading_prefix_cache",
    }
)
"""Sampling parameters that no request names: between our own parts, or not done here."""


@router.post("/v1/chat/completions/render", openapi_extra=body_schema(ChatRequest))
async def render_chat(request: Request) -> Response:
    """What this chat request would send to the model. Nothing is generated."""
    ctx = context_of(request)
    body = await ctx.read(request, ChatRequest)
    options, job = await plan_chat(ctx, request, body, request_id(request, "chatcmpl", body.request_id))
    return json_response(_rendered(ctx, EncodedPrompt(options.prompt_token_ids, options.prompt_text), job.params))


@router.post("/v1/completions/render", openapi_extra=body_schema(CompletionRequest))
async def render_completion(request: Request) -> Response:
    """The same for each prompt of a completions request."""
    ctx = context_of(request)
    body = await ctx.read(request, CompletionRequest)
    options, job = await plan_completion(ctx, request, body, request_id(request, "cmpl", body.request_id))
    return json_response({"data": [_rendered(ctx, prompt, job.params) for prompt in options.prompts]})


def _rendered(ctx: ServerContext, prompt: EncodedPrompt, params: SamplingParams) -> dict[str, Any]:
    limit = ctx.llm.ready_report.max_model_len
    # By hand: the struct leaves out its defaults, and what is in effect is what a client asks for here.
    sampling = {name: msgspec.to_builtins(getattr(params, name)) for name in params.__struct_fields__ if name not in _OURS}
    room = max(0, limit - len(prompt.token_ids))
    sampling["max_tokens"] = room if params.max_tokens is None else min(params.max_tokens, room)
    return {
        "model": ctx.model_name,
        "prompt": prompt.text,
        "prompt_token_ids": prompt.token_ids,
        "prompt_tokens": len(prompt.token_ids),
        "max_model_len": limit,
        "sampling_params": sampling,
    }


@router.post("/abort", openapi_extra=body_schema(AbortRequest))
@router.post("/abort_requests", openapi_extra=body_schema(AbortRequest), include_in_schema=False)
async def abort(request: Request) -> Response:
    """Ends requests by id. Ids of no running request are ignored: they have ended already."""
    ctx = context_of(request)
    body = await ctx.read(request, AbortRequest)
    ids = [*(body.request_ids or ()), *([body.request_id] if isinstance(body.request_id, str) else body.request_id or ())]
    if not ids:
        raise InvalidRequest("Name the requests to end: request_ids, a list of ids as they stand in replies.", param="request_ids")
    return json_response({"aborted": await ctx.abort(list(dict.fromkeys(ids)))})
