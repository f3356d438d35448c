"""POST /v1/embeddings, /pooling, /classify, /score and /rerank: what a model that pools is asked for.

Everything about a request is checked before any part of it is queued. All of its texts are one HTTP request but each is one of the
engine's, so that they share batches with those of other clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest
from octavo.frontend.http.context import ServerContext, client_key, client_of, context_of, json_response, request_id
from octavo.frontend.http.conversation import render
from octavo.frontend.http.errors import renamed, short_repr
from octavo.frontend.http.limits import is_large, off_loop
from octavo.frontend.http.prompts import encode_prompts, split_prompts
from octavo.frontend.http.schemas import (
    ClassifyRequest,
    EmbeddingRequest,
    PooledInputRequest,
    PooledRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    body_schema,
)
from octavo.frontend.http.sse import unless_gone
from octavo.frontend.http.tracking import RequestTracker
from octavo.frontend.pooling import (
    PoolingProcessor,
    PoolingState,
    PreparedPooling,
    ordered_by_score,
    pairs,
    similarity,
    wire_format,
)
from octavo.protocol.params import PoolingParams, PoolingTask

router = APIRouter()

MOST_TEXTS = 2048
"""Of a request, as at OpenAI; more where more may wait."""

_WITH_MESSAGES = ("add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs")
"""Fields that say how a conversation is rendered: without one they are as good as unknown."""


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, EmbeddingRequest)
    encoding = _encoding(body.encoding_format)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)

    async def work(tracker: RequestTracker) -> dict[str, Any]:
        states = await _pool_input(request, ctx, body, params, "embed", tracker)
        data = [{"index": i, "object": "embedding", "embedding": wire_format(s.result(), encoding)} for i, s in enumerate(states)]
        return _listing(ctx, tracker, data)

    return await _answer(request, ctx, "embd", body, work)


@router.post("/pooling", openapi_extra=body_schema(PoolingRequest))
async def pooling(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, PoolingRequest)
    encoding = _encoding(body.encoding_format)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize, task=body.task, use_activation=body.use_activation)

    async def work(tracker: RequestTracker) -> dict[str, Any]:
        states = await _pool_input(request, ctx, body, params, None, tracker)
        data = [{"index": i, "object": "pooling", "data": wire_format(s.result(), encoding)} for i, s in enumerate(states)]
        return _listing(ctx, tracker, data)

    return await _answer(request, ctx, "pool", body, work)


@router.post("/classify", openapi_extra=body_schema(ClassifyRequest))
async def classify(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, ClassifyRequest)
    params = PoolingParams(use_activation=body.use_activation)

    async def work(tracker: RequestTracker) -> dict[str, Any]:
        states = await _pool_input(request, ctx, body, params, "classify", tracker)
        labels = (await ctx.llm.pooling_processor()).labels
        data = []
        for i, state in enumerate(states):
            values = state.result()
            data.append({"index": i, "label": labels[int(values.argmax())], "probs": values.tolist(), "num_classes": len(values)})
        return _listing(ctx, tracker, data)

    return await _answer(request, ctx, "classify", body, work)


@router.post("/v1/score", openapi_extra=body_schema(ScoreRequest))
@router.post("/score", openapi_extra=body_schema(ScoreRequest), include_in_schema=False)
async def score(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, ScoreRequest)
    first = body.text_1 if body.text_1 is not None else body.queries
    second = body.text_2 if body.text_2 is not None else body.documents
    if first is None or second is None:
        raise InvalidRequest("Give text_1 and text_2 (or queries and documents).", param="text_1" if first is None else "text_2")
    texts = pairs(first, second)

    async def work(tracker: RequestTracker) -> dict[str, Any]:
        scores = await _score(ctx, body, texts, "text_2", tracker)
        return _listing(ctx, tracker, [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)])

    return await _answer(request, ctx, "score", body, work)


@router.post("/v1/rerank", openapi_extra=body_schema(RerankRequest))
@router.post("/v2/rerank", openapi_extra=body_schema(RerankRequest), include_in_schema=False)
@router.post("/rerank", openapi_extra=body_schema(RerankRequest), include_in_schema=False)
async def rerank(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, RerankRequest)
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest(f"top_n must be non-negative, got {body.top_n}.", param="top_n")
    documents = [_document(item) for item in body.documents]
    if not documents:
        raise InvalidRequest("documents must not be empty.", param="documents")

    async def work(tracker: RequestTracker) -> dict[str, Any]:
        scores = await _score(ctx, body, [(body.query, document) for document in documents], "documents", tracker)
        order = ordered_by_score(scores, body.top_n or None)
        texts = [{} if body.return_documents is False else {"document": {"text": text}} for text in documents]
        results = [{"index": i, **texts[i], "relevance_score": scores[i]} for i in order]
        usage = {"prompt_tokens": tracker.prompt_tokens, "total_tokens": tracker.prompt_tokens}
        return {"id": tracker.request_id, "model": ctx.model_name, "usage": usage, "results": results}

    return await _answer(request, ctx, "rerank", body, work)


def _document(item: Any) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise InvalidRequest(f'documents must hold texts, or objects with a "text"; got {short_repr(item)}.', param="documents")
    return text


def _encoding(given: str | None) -> Any:
    if given not in (None, "float", "base64"):
        raise InvalidRequest(f"encoding_format must be float or base64, got {short_repr(given)}.", param="encoding_format")
    return given or "float"


async def _runs_to_its_end() -> None:
    """What aborting comes to: a pooled request is over after its step, there is nothing to cut short."""


async def _answer(
    request: Request,
    ctx: ServerContext,
    prefix: str,
    body: PooledRequest,
    work: Callable[[RequestTracker], Coroutine[Any, Any, dict[str, Any]]],
) -> Response:
    """Do the work of a request while its client is there, and log it.

    Raises:
        InvalidRequest: the client waits for a stream, and would find an answer that it cannot read.
    """
    if body.stream:
        raise InvalidRequest("stream must be false or left out: what is pooled comes as a whole.", param="stream")
    job_id = request_id(request, prefix, body.request_id)
    tracker = RequestTracker(job_id, request.url.path, client_of(request), ctx.settings)
    ctx.claim(job_id, _runs_to_its_end)
    error: BaseException | None = None
    try:
        return json_response(await unless_gone(request, work(tracker)))
    except BaseException as e:
        error = e
        raise
    finally:
        ctx.release(job_id)
        tracker.close(error)


async def _pool_input(
    request: Request, ctx: ServerContext, body: PooledInputRequest, params: PoolingParams, task: PoolingTask | None, tracker: RequestTracker
) -> list[PoolingState]:
    """The texts of a request, or its conversation, pooled."""
    if body.messages is None:
        ctx.report_unknown([name for name in _WITH_MESSAGES if getattr(body, name) is not None])
        return await _pool_texts(ctx, body, body.input, "input", params, task, tracker)
    if body.input is not None:
        raise InvalidRequest("Give input or messages, not both.", param="input")
    conversation = TokenizeRequest(
        messages=body.messages,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=False if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        documents=body.documents,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    await ctx.llm.pooling_processor()  # which says so if this model does not pool
    prompt = await render(ctx, client_key(request), conversation)
    return await _pool_texts(ctx, body, prompt.token_ids, "messages", params, task, tracker)


async def _pool_texts(
    ctx: ServerContext,
    body: PooledRequest,
    given: Any,
    param: str,
    params: PoolingParams,
    task: PoolingTask | None,
    tracker: RequestTracker,
) -> list[PoolingState]:
    """Each text (or list of token ids) of a request, pooled."""
    try:
        prepared = await _prepare_texts(ctx, body, given, param, params, task, tracker)
    except InvalidRequest as error:
        raise renamed(error, {"prompt": param}) from None
    return await _run(ctx, prepared, tracker)


async def _prepare_texts(
    ctx: ServerContext,
    body: PooledRequest,
    given: Any,
    param: str,
    params: PoolingParams,
    task: PoolingTask | None,
    tracker: RequestTracker,
) -> list[PreparedPooling]:
    processor = await ctx.llm.pooling_processor()
    large = is_large(given)
    prompts = await off_loop(large, split_prompts, given, param)
    _check_count(ctx, len(prompts), param)
    cut, special = body.truncate_prompt_tokens, body.add_special_tokens is not False
    if cut is None:
        encoded = await encode_prompts(ctx.llm, prompts, add_special_tokens=special)
        items: Sequence[Any] = [one.token_ids for one in encoded]
    else:
        items = prompts  # the processor cuts them, and keeps the special tokens at their ends

    def prepared() -> list[PreparedPooling]:
        return [
            processor.prepare(
                item,
                params,
                f"{tracker.request_id}-{i}",
                task=task,
                truncate_prompt_tokens=cut,
                add_special_tokens=special,
                priority=body.priority or 0,
            )
            for i, item in enumerate(items)
        ]

    return await off_loop(large, prepared)


async def _score(ctx: ServerContext, body: PooledRequest, texts: list[tuple[str, str]], param: str, tracker: RequestTracker) -> list[float]:
    """param: the field that says how many there are."""
    processor = await ctx.llm.pooling_processor()
    processor.task("score")
    _check_count(ctx, len(texts), param)
    if processor.labels:
        prepared = await off_loop(is_large([list(pair) for pair in texts]), _prepare_pairs, processor, body, texts, tracker)
        return [float(s.result()[0]) for s in await _run(ctx, prepared, tracker)]
    distinct = list(dict.fromkeys(text for pair in texts for text in pair))  # a query is embedded once, not once a document
    states = await _pool_texts(ctx, body, distinct, "text_1", PoolingParams(), "embed", tracker)
    vectors = {text: state.result() for text, state in zip(distinct, states, strict=True)}
    return [similarity(vectors[first], vectors[second]) for first, second in texts]


def _prepare_pairs(
    processor: PoolingProcessor, body: PooledRequest, texts: list[tuple[str, str]], tracker: RequestTracker
) -> list[PreparedPooling]:
    params = PoolingParams(use_activation=body.use_activation)
    return [
        processor.prepare_pair(
            first,
            second,
            params,
            f"{tracker.request_id}-{i}",
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            priority=body.priority or 0,
        )
        for i, (first, second) in enumerate(texts)
    ]


def _check_count(ctx: ServerContext, count: int, param: str) -> None:
    most = max(MOST_TEXTS, ctx.llm.config.scheduler.max_waiting)
    if count > most:
        raise InvalidRequest(f"{param} has {count} texts; this server takes at most {most} in one request.", param=param)


async def _run(ctx: ServerContext, prepared: list[PreparedPooling], tracker: RequestTracker) -> list[PoolingState]:
    tracker.prompt_tokens = sum(len(one.request.prompt_token_ids) for one in prepared)
    # No more at a time than may wait.
    most, states = max(1, ctx.llm.config.scheduler.max_waiting), list[PoolingState]()
    for start in range(0, len(prepared), most):
        states += await ctx.llm.pool(prepared[start : start + most])
    return states


def _listing(ctx: ServerContext, tracker: RequestTracker, data: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = tracker.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    return {
        "id": tracker.request_id,
        "object": "list",
        "created": int(time.time()),
        "model": ctx.model_name,
        "data": data,
        "usage": usage,
    }
