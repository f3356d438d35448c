"""How the reply to a chat will be read, and what it is held to: reasoning, tool calls, and the grammar of both."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import InvalidRequest, NotYet
from octavo.frontend.http.structured import Wish
from octavo.frontend.http.tools import ToolUse
from octavo.frontend.parsing.formats import (
    GENERIC,
    HARMONY,
    CallSyntax,
    ReasoningFormat,
    ToolFormat,
    opened_by,
    reasoning_format,
    tool_format,
)
from octavo.frontend.parsing.grammar import MAX_CALLS, answer_or_calls, any_object_but_a_call, required_calls
from octavo.frontend.parsing.guard import CannotGuard, optional_calls
from octavo.frontend.parsing.guard_other import channels_to_answer
from octavo.frontend.parsing.reply import ReplyFormat
from octavo.grammar.json_schema import prepared
from octavo.grammar.lark import inline_json, json_options
from octavo.grammar.source import parsed_schema
from octavo.protocol.params import OutputConstraint, StructuredOutputsParams

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.http.settings import ServerSettings
    from octavo.frontend.text.tokenizer import Tokenizer

BLAME_SECONDS = 5.0
"""How long it is looked for the tool that makes a grammar unusable."""

_OBJECTS = CallSyntax('{"name": "', '", "arguments": ', "}")
"""To try the schema of one tool, in whatever format."""

_ALPHABET = string.ascii_letters + string.digits
_HARMONY_ANSWER = "<|end|><|start|>assistant<|channel|>final<|message|>"
_HARMONY_NEXT = "<|end|><|start|>assistant"


@dataclass(frozen=True)
class ReplyPlan:
    """What the endpoint needs to know to sample a reply and to read it."""

    form: ReplyFormat
    named: bool = False
    """A named tool: its call ends the reply with "stop"."""
    wish: StructuredOutputsParams | None = None
    marks: OutputConstraint | None = None
    """How the reasoning is marked, in tokens, and where the grammar comes from."""
    keeps_special_tokens: bool = False
    """Markers are special tokens: they must stay in the text."""
    new_call_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


async def plan_reply(
    llm: AsyncLLM,
    settings: ServerSettings,
    use: ToolUse,
    wish: Wish | None,
    *,
    prompt: str,
    template: str | None,
    parallel: bool,
    stops: bool,
    client: str,
    continued: str = "",
    beam: bool = False,
) -> ReplyPlan:
    """The plan for one chat.

    Args:
        use: what the reply may do with tools.
        wish: what its text must be like.
        prompt: as rendered: its end may have begun the reasoning.
        template: the source of the chat template.
        parallel: more than one call is allowed.
        stops: the request has stop strings.
        client: who asks.
        continued: the text of the assistant's message that the reply goes on with.
        beam: the reply is searched for, which no grammar can hold.

    Raises:
        InvalidRequest: a schema that cannot be used, with its path.
        NotYet: this server has no grammar engine, and the request needs it.
    """
    tokenizer = llm.tokenizer
    reasoning = reasoning_format(settings.reasoning_parser, template)
    tools = tool_format(settings.tool_call_parser, template) if use.mode != "none" else None
    either = tools is not None and wish is not None and _is_json(wish.params)
    if (use.must_call or either) and (tools is None or tools.syntax is None):
        tools = GENERIC
    opened = opened_by(prompt, reasoning, continued) if reasoning is not None else None
    most = MAX_CALLS if parallel and use.mode != "named" else 1
    form = ReplyFormat(
        tools=tools,
        schemas={function["name"]: function.get("parameters") or {} for function in use.functions},
        reasoning=reasoning,
        opened=reasoning is not None and (reasoning.always if opened is None else opened),
        closed=opened is False,
        max_calls=None if most > 1 else 1,
        whole_calls=stops,
        must_call=use.must_call,
        guarded=use.strict and not use.must_call and (wish is None or (tools is not None and tools.name == HARMONY.name)),
    )
    structured = await _grammar(llm, tokenizer, use, tools, wish, most, client)
    if beam and structured is not None:
        raise InvalidRequest(
            "use_beam_search cannot be combined with strict tools, nor with a tool_choice that demands a call.", param="use_beam_search"
        )
    reasons = _reasoning_marks(tokenizer, reasoning, form, must_call=use.must_call)
    if structured is not None:
        field = wish.field if wish is not None and structured is wish.params else "tools"
        # A form whose calls are part of what comes before the answer may well end there, with one of them.
        calls_first = reasoning is not None and reasoning.harmony and bool(use.functions)
        must_answer = use.must_call or (wish is not None and not calls_first)
        reasons = msgspec.structs.replace(reasons or OutputConstraint(), field=field, must_answer=must_answer)
    marks = [*(tools.marks if tools is not None else ()), *(reasoning.marks if reasoning is not None else ())]
    return ReplyPlan(
        form,
        named=use.mode == "named",
        wish=structured,
        marks=reasons,
        keeps_special_tokens=any(mark in tokenizer.special_tokens for mark in marks),
        new_call_id=_short_id if tools is not None and tools.name.startswith("mistral") else _call_id,
    )


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates refuse ids of any other length."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


async def _grammar(
    llm: AsyncLLM, tokenizer: Tokenizer, use: ToolUse, tools: ToolFormat | None, wish: Wish | None, most: int, client: str
) -> StructuredOutputsParams | None:
    """What the reply is held to; checked."""
    syntax = tools.syntax if tools is not None else None
    if use.functions:
        try:
            await llm.check_tool_parameters(use.functions, client)
        except NotYet:
            if use.must_call or use.strict:
                raise
    if wish is not None:
        _check_combination(use, wish)
        if not use.must_call and (syntax is None or not _is_json(wish.params)):
            return await wish.check(llm, client)
    special = tokenizer.special_tokens
    if use.must_call:
        assert syntax is not None
        return await _checked(llm, required_calls(syntax, use.functions, special, most=most), use, special, client)
    if wish is not None:
        assert syntax is not None
        # An answer of the wished form, or calls instead of it.
        await wish.check(llm, client)
        if use.strict and tools is not None and tools.name == HARMONY.name:
            # Calls come before the answer, in messages of their own.
            try:
                text = channels_to_answer(use.functions, special, _answer(wish.params))
            except CannotGuard as error:
                raise InvalidRequest(str(error), param="tools") from None
            return await _checked(llm, text, use, special, client)
        # Where a call is JSON like the answer, an answer with names of its own choice could be a call whose arguments nothing holds.
        answer = _answer(wish.params, use.functions if use.strict and syntax.is_json else ())
        return await _checked(llm, answer_or_calls(syntax, use.functions, special, answer, most=most), use, special, client)
    if tools is None or not use.strict:
        return None
    try:
        text = optional_calls(tools, use.functions, special)
    except CannotGuard as error:
        raise InvalidRequest(str(error), param="tools") from None
    return await _checked(llm, text, use, special, client)


def _check_combination(use: ToolUse, wish: Wish) -> None:
    """What a wish for the text cannot go with. A response_format says how an answer looks, so it says nothing where calls must be made.

    Raises:
        InvalidRequest: a wish that would have to be dropped.
    """
    if use.must_call and not wish.field.startswith("response_format"):
        raise InvalidRequest(f"{wish.field} cannot be combined with a tool_choice that demands a call.", param=wish.param)
    if use.must_call and not _is_json(wish.params):
        raise InvalidRequest(f"{wish.field} of this type cannot be combined with a tool_choice that demands a call.", param=wish.param)
    if use.strict and not _is_json(wish.params):
        raise InvalidRequest(
            f"{wish.field} cannot be combined with strict tools, unless it asks for JSON: leave out strict, or use a JSON schema.",
            param=wish.param,
        )


def _is_json(params: StructuredOutputsParams) -> bool:
    return params.json is not None or bool(params.json_object)


def _answer(params: StructuredOutputsParams, apart_from: Sequence[Mapping[str, Any]] = ()) -> str:
    """The rule of an answer in JSON.

    Args:
        apart_from: tools of which it must not be a call: it has no names then but those of its schema.
    """
    lenient = params.best_effort
    if apart_from and params.json is None:
        return any_object_but_a_call(apart_from)
    schema = (
        {"type": "object"}
        if params.json is None
        else prepared(
            parsed_schema(params.json, "response_format"), closed=params.disable_additional_properties or bool(apart_from), lenient=lenient
        )
    )
    options = json_options(compact=params.disable_any_whitespace, pattern=params.whitespace_pattern, lenient=lenient)
    return f"answer: {inline_json(schema, options)}"


async def _checked(llm: AsyncLLM, grammar: str, use: ToolUse, special: Mapping[str, int], client: str) -> StructuredOutputsParams:
    """`grammar`, if it can be used; if not, the tool that is to blame is named."""
    params = StructuredOutputsParams(grammar=grammar)
    try:
        await llm.check_structured_outputs(params, client)
    except InvalidRequest as error:
        deadline = time.monotonic() + BLAME_SECONDS
        for i, function in enumerate(use.functions):
            if time.monotonic() > deadline:
                break
            alone = StructuredOutputsParams(grammar=required_calls(_OBJECTS, [function], special, most=1))
            try:
                await llm.check_structured_outputs(alone, client)
            except InvalidRequest as blamed:
                where = f"tools[{i}].function.parameters"
                raise InvalidRequest(str(blamed).replace("structured_outputs.grammar", where, 1), param="tools") from None
        raise InvalidRequest(str(error).replace("structured_outputs.grammar", "The grammar of the tools", 1), param="tools") from None
    return params


def _reasoning_marks(
    tokenizer: Tokenizer, reasoning: ReasoningFormat | None, form: ReplyFormat, *, must_call: bool
) -> OutputConstraint | None:
    """How the end of the reasoning is recognised: by its text, or by control tokens. None where there is no reasoning."""
    if reasoning is None or form.closed or (reasoning.harmony and form.guarded):
        return None  # (there are none, or the grammar has the whole reply: calls may come in any of its messages)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    start = "" if form.opened else reasoning.start
    if reasoning.harmony and must_call:  # the call may also be the first message
        return OutputConstraint(reasoning_start=start, reasoning_end=_HARMONY_NEXT, reasoning_stop_ids=ids(_HARMONY_NEXT))
    if reasoning.harmony:
        return OutputConstraint(reasoning_end_ids=ids(reasoning.end), reasoning_stop_ids=ids(_HARMONY_ANSWER))
    return OutputConstraint(reasoning_start=start, reasoning_end=reasoning.end, reasoning_stop_ids=ids(reasoning.end))
