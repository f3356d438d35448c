"""Everything about a chat that can be wrong is found here or by the engine's door, before anything is sent.

Serves every endpoint that is a chat underneath: they translate their body into a `ChatRequest`.
"""

from __future__ import annotations

import dataclasses
import time

from fastapi import Request

from octavo.errors import InvalidRequest
from octavo.frontend.http.chat import ChatOptions
from octavo.frontend.http.context import FINGERPRINT, ServerContext, client_key, fair_key
from octavo.frontend.http.conversation import final_message, render
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.generation import Job
from octavo.frontend.http.limits import LARGE_IDS, check_metadata, off_loop
from octavo.frontend.http.logprobs import TokenNames
from octavo.frontend.http.older_tools import in_older_words, is_older, with_tools
from octavo.frontend.http.prompts import Truncation
from octavo.frontend.http.reply_plan import plan_reply
from octavo.frontend.http.sampling import beam_params, check_common, sampling_params
from octavo.frontend.http.schemas import VERBOSITIES, ChatRequest
from octavo.frontend.http.structured import wish_of
from octavo.frontend.http.tools import tool_use
from octavo.frontend.processor import check_generates


def _top_logprobs(ctx: ServerContext, body: ChatRequest) -> int | None:
    """How many alternatives a token; None for no logprobs at all."""
    top = body.top_logprobs
    if top is not None:
        limit = ctx.llm.config.model.max_logprobs
        if not body.logprobs and top != 0:
            raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
        if top < -1:
            raise InvalidRequest(f"top_logprobs must be non-negative, or -1 for all, got {top}.", param="top_logprobs")
        if limit != -1 and (top > limit or top == -1):
            what = "top_logprobs=-1 (all of them)" if top == -1 else f"top_logprobs={top}"
            raise InvalidRequest(f"{what} is more than this server gives ({limit}, see --max-logprobs).", param="top_logprobs")
    return (top or 0) if body.logprobs else None


def _check_unserved(body: ChatRequest) -> None:
    """OpenAI's fields for what no server of texts has.

    Raises:
        InvalidRequest: one of them asks for something that the reply would have to lack.
    """
    check_metadata(body.metadata)
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidRequest(f'modalities must be ["text"], got {short_repr(body.modalities)}: replies are text only.', param="modalities")
    if body.audio is not None:
        raise InvalidRequest("audio: replies are text only; leave it out.", param="audio")
    if body.web_search_options is not None:
        raise InvalidRequest("web_search_options: this server runs no tools of its own; leave it out.", param="web_search_options")
    if body.verbosity not in (None, *VERBOSITIES):
        raise InvalidRequest(f"verbosity must be one of {', '.join(VERBOSITIES)}, got {short_repr(body.verbosity)}.", param="verbosity")


def _template(ctx: ServerContext, body: ChatRequest) -> str | None:
    """The source of the chat template that the prompt was rendered with."""
    given = body.chat_template or (body.chat_template_kwargs or {}).get("chat_template")
    return ctx.llm.tokenizer.templates.select(given, bool(body.tools))


async def plan_chat(ctx: ServerContext, request: Request, body: ChatRequest, job_id: str) -> tuple[ChatOptions, Job]:
    """What the reply is to look like, and what to ask of the engine.

    Raises:
        InvalidRequest, NotYet: the request cannot be served as asked.
    """
    if not is_older(body):
        return await _plan(ctx, request, body, job_id)
    body = with_tools(body)
    try:
        options, job = await _plan(ctx, request, body, job_id)
    except InvalidRequest as error:
        raise in_older_words(error) from None
    return dataclasses.replace(options, older_calls=True), job


async def _plan(ctx: ServerContext, request: Request, body: ChatRequest, job_id: str) -> tuple[ChatOptions, Job]:
    settings = ctx.settings
    check_generates(ctx.llm.config)
    check_common(body, settings.max_sequences, 1)
    _check_unserved(body)
    use = tool_use(body.tools, body.tool_choice)
    top_logprobs = _top_logprobs(ctx, body)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise InvalidRequest(f"max_completion_tokens must be at least 1, got {body.max_completion_tokens}.", param="max_completion_tokens")
    defaults = ctx.llm.default_sampling_params
    wish = wish_of(body)
    many = len(body.logit_bias or ()) > LARGE_IDS
    params = await off_loop(many, sampling_params, body, defaults, max_tokens=max_tokens, logprobs=top_logprobs)
    truncation = Truncation.asked(ctx.llm, body.truncate_prompt_tokens, body.truncation_side, max_tokens)
    prompt = await render(ctx, client_key(request), body, truncation)
    plan = await plan_reply(
        ctx.llm,
        settings,
        use,
        wish,
        prompt=prompt.text or "",
        template=_template(ctx, body),
        parallel=body.parallel_tool_calls is not False,
        stops=bool(params.stops),
        client=client_key(request),
        continued=final_message(body, "assistant") if body.continue_final_message else "",
        beam=bool(body.use_beam_search),
    )
    params.structured_outputs, params.constraint = plan.wish, plan.marks
    if params.thinking_token_budget is not None and plan.form.closed:
        params.thinking_token_budget = None  # the prompt says not to reason: nothing to limit
    harmony = plan.form.reasoning is not None and plan.form.reasoning.harmony
    if params.thinking_token_budget is not None and harmony and plan.form.guarded:
        raise InvalidRequest(
            "thinking_token_budget cannot be combined with strict tools where calls stand between the reasoning, as this model has them: "
            "leave out one of them.",
            param="thinking_token_budget",
        )
    if plan.keeps_special_tokens:
        params.skip_special_tokens = False
    if truncation is not None:
        prompt = truncation.of(prompt)
    role = settings.response_role
    if body.add_generation_prompt is False and isinstance(body.messages[-1], dict):
        role = str(body.messages[-1].get("role", role))
    include_usage, continuous_usage = ctx.streamed_usage(body)
    options = ChatOptions(
        id=job_id,
        created=int(time.time()),
        model=ctx.model_name,
        fingerprint=FINGERPRINT,
        n=params.n,
        role=role,
        echo_text=final_message(body, role) if body.echo else "",
        prompt_text=prompt.text or "",
        prompt_token_ids=prompt.token_ids,
        top_logprobs=top_logprobs,
        names=TokenNames(ctx.llm, as_ids=ctx.shows_ids(body)),
        prompt_logprobs=body.prompt_logprobs is not None,
        return_token_ids=bool(body.return_token_ids),
        return_prompt_text=bool(body.return_prompt_text),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        usage_details=settings.enable_prompt_tokens_details,
        plan=plan,
        include_reasoning=body.include_reasoning is not False,
    )
    job = Job(
        job_id,
        [prompt],
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        fair_key=fair_key(request, body.user),
        report_progress=bool(body.return_progress and body.stream),
    )
    if body.use_beam_search:
        room = max(1, ctx.llm.ready_report.max_model_len - len(prompt.token_ids))
        job = dataclasses.replace(job, beam=beam_params(body, max_tokens, room))
    return options, job
