"""POST /v1/completions."""

from __future__ import annotations

import dataclasses
import time

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest, NotYet
from octavo.frontend.http.completions import CompletionOptions, CompletionWriter
from octavo.frontend.http.context import FINGERPRINT, ServerContext, client_key, client_of, context_of, fair_key, json_response, request_id
from octavo.frontend.http.generation import Job, answer
from octavo.frontend.http.limits import LARGE_IDS, is_large, off_loop
from octavo.frontend.http.logprobs import TokenNames
from octavo.frontend.http.prompts import Truncation, check_token_ids, encode_prompts, prompt_text, split_prompts
from octavo.frontend.http.sampling import beam_params, check_common, sampling_params
from octavo.frontend.http.schemas import CompletionRequest, body_schema
from octavo.frontend.http.sse import EventStream
from octavo.frontend.http.structured import wish_of
from octavo.frontend.http.tracking import RequestTracker
from octavo.protocol.params import OutputConstraint

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, CompletionRequest)
    job_id = request_id(request, "cmpl", body.request_id)
    tracker = RequestTracker(job_id, "/v1/completions", client_of(request), ctx.settings)
    options, job = await plan_completion(ctx, request, body, job_id)
    tracker.received(job.params, [p.text or str(p.token_ids) for p in job.prompts])
    writer = CompletionWriter(options)
    if options.prompt_only and job.params.prompt_logprobs is None:
        tracker.prompt_tokens = sum(len(p.token_ids) for p in job.prompts)
        tracker.close()
        if body.stream:
            return EventStream(writer.stream_without_engine(), _nothing)
        return json_response(writer.without_engine())
    return await answer(request, ctx, job, tracker, writer, stream=bool(body.stream))


async def _nothing() -> None:
    """There is nothing to end."""


async def plan_completion(ctx: ServerContext, request: Request, body: CompletionRequest, job_id: str) -> tuple[CompletionOptions, Job]:
    """Everything about a request that can be wrong is found here or by the engine's door, before anything is sent."""
    settings = ctx.settings
    if body.suffix:
        raise InvalidRequest("suffix is not supported; leave it out.", param="suffix")
    if body.prompt_embeds is not None:
        raise NotYet("prompt_embeds is not supported yet; send text or token ids.", param="prompt_embeds")
    prompts = await off_loop(is_large(body.prompt), split_prompts, body.prompt)
    check_common(body, settings.max_sequences, len(prompts))
    if body.logprobs is not None and body.logprobs < -1:
        raise InvalidRequest(f"logprobs must be non-negative, got {body.logprobs}.", param="logprobs")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_only = bool(body.echo) and max_tokens == 0
    wish = wish_of(body)
    checked = await wish.check(ctx.llm, client_key(request)) if wish is not None and not prompt_only else None
    params = await off_loop(
        len(body.logit_bias or ()) > LARGE_IDS,
        sampling_params,
        body,
        ctx.llm.default_sampling_params,
        max_tokens=1 if prompt_only else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        structured_outputs=checked,
    )
    if wish is not None:
        params.constraint = OutputConstraint(field=wish.field)
    if prompt_only:
        # The prompt is scored once, for all n choices; the one token made on the way is thrown away.
        params = msgspec.structs.replace(params, n=1, logprobs=None, stop=None)
    truncation = Truncation.asked(ctx.llm, body.truncate_prompt_tokens, body.truncation_side, max_tokens)
    encoded = await encode_prompts(ctx.llm, prompts, add_special_tokens=body.add_special_tokens is not False, truncation=truncation)
    if prompt_only:
        for prompt in encoded:
            check_token_ids(ctx.llm, prompt.token_ids, "prompt")
    include_usage, continuous_usage = ctx.streamed_usage(body)
    options = CompletionOptions(
        id=job_id,
        created=int(time.time()),
        model=ctx.model_name,
        fingerprint=FINGERPRINT,
        n=1 if body.n is None else body.n,
        prompts=tuple(encoded),
        echo_texts=tuple(prompt_text(ctx.llm, p) for p in encoded) if body.echo else None,
        prompt_only=prompt_only,
        logprobs=body.logprobs is not None,
        skip_special_tokens=params.skip_special_tokens,
        names=TokenNames(ctx.llm, as_ids=ctx.shows_ids(body)),
        prompt_logprobs=body.prompt_logprobs is not None,
        return_token_ids=bool(body.return_token_ids),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        usage_details=settings.enable_prompt_tokens_details,
    )
    job = Job(
        job_id,
        encoded,
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        fair_key=fair_key(request, body.user),
        report_progress=bool(body.return_progress and body.stream),
    )
    if body.use_beam_search:
        room = max(1, ctx.llm.ready_report.max_model_len - max(len(p.token_ids) for p in encoded))
        job = dataclasses.replace(job, beam=beam_params(body, max_tokens, room))
    return options, job
