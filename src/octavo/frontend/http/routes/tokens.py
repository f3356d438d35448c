"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest
from octavo.frontend.http.context import client_key, context_of, json_response
from octavo.frontend.http.conversation import render
from octavo.frontend.http.limits import LARGE_IDS, off_loop
from octavo.frontend.http.prompts import check_token_ids, check_tokenizable, encode_text
from octavo.frontend.http.schemas import DetokenizeRequest, TokenizeRequest, body_schema

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt (text) or messages (a conversation).", param="prompt")
    if body.prompt is not None:
        check_tokenizable(ctx.llm, body.prompt, "prompt")
        ids = await encode_text(ctx.llm, body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        ids = (await render(ctx, client_key(request), body)).token_ids
    text_of = ctx.llm.tokenizer.token_text
    strings = await off_loop(len(ids) > LARGE_IDS, lambda: [text_of(i) for i in ids]) if body.return_token_strs else None
    return json_response({"count": len(ids), "max_model_len": ctx.llm.ready_report.max_model_len, "tokens": ids, "token_strs": strings})


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, DetokenizeRequest)
    check_token_ids(ctx.llm, body.tokens, "tokens")
    decode = ctx.llm.tokenizer.decode
    text = await off_loop(len(body.tokens) > LARGE_IDS, decode, body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return json_response({"prompt": text})
