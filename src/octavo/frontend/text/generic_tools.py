"""Tools for chat templates that know none: described in the system message, and calls and their results written out as text.

A template that never mentions tools would drop them in silence. What the model is told here is what the parser of calls reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.parsing.formats import CallSyntax

Messages = list[dict[str, Any]]


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has calls in it, or their results."""
    return any(message.get("tool_calls") or message["role"] in ("tool", "function") for message in messages)


def written_out(messages: Messages, syntax: CallSyntax) -> Messages:
    """The conversation with calls as the text that made them, and their results as messages of the user."""
    result: Messages = []
    names: dict[Any, Any] = {}
    for message in messages:
        if calls := message.get("tool_calls"):
            names |= {call.get("id"): _function(call).get("name") for call in calls if isinstance(call, dict)}
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            result.append(_with_text(plain, written(calls, syntax), before=False))
        elif message["role"] in ("tool", "function"):
            name = message.get("name") or names.get(message.get("tool_call_id"))
            said = json.dumps(
                {"tool_response": {**({"name": name} if name else {}), "content": _text(message["content"])}}, ensure_ascii=False
            )
            if result and result[-1].get("tool_response"):
                result[-1] = _with_text(result[-1], said, before=False)
            else:
                content: Any = [{"type": "text", "text": said}] if isinstance(message["content"], list) else said
                result.append({"role": "user", "content": content, "tool_response": True})
        else:
            result.append(message)
    return [{key: value for key, value in message.items() if key != "tool_response"} for message in result]


def described(messages: Messages, tools: Sequence[Any], syntax: CallSyntax, *, in_system: bool) -> Messages:
    """The conversation with a description of `tools` in its system message, or (for templates that refuse one) before its first text."""
    text = description(tools, syntax)
    if not in_system:
        return [_with_text(messages[0], text, before=True), *messages[1:]]
    if messages[0]["role"] in ("system", "developer"):
        return [_with_text(messages[0], text, before=False), *messages[1:]]
    content: Any = [{"type": "text", "text": text}] if isinstance(messages[0]["content"], list) else text
    return [{"role": "system", "content": content}, *messages]


def description(tools: Sequence[Any], syntax: CallSyntax) -> str:
    """What a model is told of its tools."""
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    example = syntax.begin + syntax.before + "NAME" + syntax.between + '{"PARAMETER": VALUE}' + syntax.after + syntax.end
    return (
        f"You can call these functions, described as JSON:\n{lines}\n\n"
        f"To call one, or several, write nothing but this, with the name and the arguments filled in:\n{example}\n"
        "The results come in the next message. When no function is needed, answer in plain text."
    )


def written(calls: Sequence[Any], syntax: CallSyntax) -> str:
    """Calls as a model writes them."""
    texts = []
    for call in calls:
        function = _function(call)
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        texts.append(f"{syntax.before}{function.get('name')}{syntax.between}{text or '{}'}{syntax.after}")
    return syntax.begin + syntax.separator.join(texts) + syntax.end


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _with_text(message: dict[str, Any], text: str, *, before: bool) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        return {**message, "content": [part, *content] if before else [*content, part]}
    parts = [text, content] if before else [content, text]
    return {**message, "content": "\n\n".join(part for part in parts if part)}
