"""OpenAI's older form of tools, `functions` and `function_call`: taken as tools, of which a reply calls one, and answered in its own form."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from octavo.errors import InvalidRequest
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.replies import Delta, Message
from octavo.frontend.http.schemas import ChatRequest


def is_older(body: ChatRequest) -> bool:
    return body.functions is not None or body.function_call is not None


def with_tools(body: ChatRequest) -> ChatRequest:
    """The same request in today's form.

    Raises:
        InvalidRequest: both forms at once, or a function_call that means nothing.
    """
    for ours, today in (("functions", "tools"), ("function_call", "tool_choice")):
        for field in ("tools", "tool_choice"):
            if getattr(body, ours) is not None and getattr(body, field) is not None:
                raise InvalidRequest(f"{ours} is the older form of {today} and cannot be combined with {field}: use one form.", param=ours)
    choice: str | dict[str, Any] | None = body.function_call
    if isinstance(choice, dict):
        if not isinstance(choice.get("name"), str):
            raise InvalidRequest(f'function_call must be none, auto or {{"name": ...}}, got {short_repr(choice)}.', param="function_call")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    elif choice not in (None, "none", "auto"):
        raise InvalidRequest(f'function_call must be none, auto or {{"name": ...}}, got {short_repr(choice)}.', param="function_call")
    if choice not in (None, "none") and body.functions is None:
        raise InvalidRequest("function_call needs functions.", param="function_call")
    tools = None if body.functions is None else [{"type": "function", "function": function} for function in body.functions]
    changed = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "functions": None, "function_call": None}
    return body.model_copy(update=changed)


def in_older_words(error: InvalidRequest) -> InvalidRequest:
    """An error about tools as one about what the client gave."""
    names = {"tools": "functions", "tool_choice": "function_call"}
    if error.param not in names:
        return error
    message = str(error).replace("tool_choice", "function_call").replace("].function.", "].", 1).replace("tools", "functions")
    return InvalidRequest(message, param=names[error.param], code=error.code)


def older_message(message: Message) -> None:
    """Its call as `function_call`."""
    if message.tool_calls:
        message.function_call = message.tool_calls[0].function
    message.tool_calls = UNSET


def older_delta(delta: Delta) -> None:
    """The same for a piece of a message."""
    if delta.tool_calls:
        delta.function_call = delta.tool_calls[0].function
    delta.tool_calls = UNSET


def older_finish(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason
