"""Chat messages as clients send them, made into what templates can read, with everything that cannot be served refused.

Clients differ: content is a string, a list of parts or null; tool arguments are JSON in a string; objects may be pydantic
models. Templates see plain dicts, lists, strings and numbers, always with `role` and `content`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from octavo.errors import InvalidRequest
from octavo.frontend.json_shape import MAX_CONTAINERS, TooMuch, check_shape, json_shape

ContentFormat = Literal["string", "openai", "as given"]
"""string: always a string; openai: always a list of parts; as given: strings stay strings, lists stay lists."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MAX_DEPTH = 64
_FEW = 10
"""Objects and lists in the arguments of one call that need not be counted: a body holds no more than 50,000 calls."""


def normalize_messages(
    messages: Any, content_format: ContentFormat, *, developer_as_system: bool, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Messages as a template reads them: new dicts, the caller's are not touched.

    Args:
        developer_as_system: the template does not know the role "developer".
        arguments_as_text: the template wants the arguments of tool calls as JSON text rather than as objects.

    Raises:
        InvalidRequest: no messages, an unknown role, missing content, or content that is not text; names the message.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages must be a list of messages, got {type(messages).__name__}.", param="messages")
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    if not arguments_as_text:
        _check_arguments(messages)
    prepared = [_message(m, f"messages[{i}]", content_format, arguments_as_text) for i, m in enumerate(messages)]
    _rewrite_older_calls(prepared, arguments_as_text)
    if developer_as_system:
        for message in prepared:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    return prepared


def plain_data(value: Any, where: str, _depth: int = 0) -> Any:
    """`value` rebuilt from JSON types alone, so that a template meets no object with methods of its own.

    Raises:
        InvalidRequest: something that is no JSON, or nested too deep; `where` names it.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if _depth > _MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested more than {_MAX_DEPTH} levels deep.", param=where.partition("[")[0])
    if hasattr(value, "model_dump"):  # pydantic, as in the OpenAI client
        return plain_data(value.model_dump(exclude_none=True), where, _depth + 1)
    if isinstance(value, Mapping):
        return {str(k): plain_data(v, where, _depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(v, where, _depth + 1) for v in value]
    for kind in (bool, str, int, float):  # subclasses, such as enums
        if isinstance(value, kind):
            return kind(value.value if hasattr(value, "value") else value)
    raise InvalidRequest(f"{where} holds a {type(value).__name__}; only JSON values can be given.", param=where.partition("[")[0])


def _message(message: Any, where: str, content_format: ContentFormat, arguments_as_text: bool) -> dict[str, Any]:
    plain = plain_data(message, where)
    if not isinstance(plain, dict):
        raise InvalidRequest(f"{where} must be an object with role and content, got {type(message).__name__}.", param="messages")
    result = {key: value for key, value in plain.items() if value is not None}
    role = result.get("role")
    if role not in ROLES:
        given = "has no role" if role is None else f"has the unknown role {role!r}"
        raise InvalidRequest(f"{where} {given}. Roles are: {', '.join(ROLES)}.", param="messages")
    if "content" not in result and role != "assistant":
        raise InvalidRequest(f"{where} (role {role}) has no content.", param="messages")
    result["content"] = _content(result.get("content", ""), where, content_format)
    if calls := result.get("tool_calls"):
        result["tool_calls"] = _tool_calls(calls, where, arguments_as_text)
    else:
        result.pop("tool_calls", None)
    # The same thing under several names in the wild; a template reads one of them.
    if (reasoning := next((result[name] for name in _REASONING if isinstance(result.get(name), str)), None)) is not None:
        result |= dict.fromkeys(_REASONING, reasoning)
    return result


def _rewrite_older_calls(messages: list[dict[str, Any]], arguments_as_text: bool) -> None:
    """OpenAI's older form of a call (`function_call`, answered by the role "function") as templates know calls, under an id made here."""
    call_id = ""
    for number, message in enumerate(messages):
        older = message.pop("function_call", None)
        if older is not None and message["role"] == "assistant" and "tool_calls" not in message:
            if not isinstance(older, dict) or not isinstance(older.get("name"), str):
                raise InvalidRequest(f"messages[{number}].function_call must be an object with name and arguments.", param="messages")
            call_id = f"call{number:05d}"  # as long as Mistral's templates want it
            call = {"id": call_id, "type": "function", "function": older}
            message["tool_calls"] = _tool_calls([call], f"messages[{number}]", arguments_as_text)
        elif message["role"] == "function" and call_id:
            message |= {"role": "tool", "tool_call_id": call_id}


def _content(content: Any, where: str, content_format: ContentFormat) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content_format == "openai" else content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts, got {type(content).__name__}.", param="messages")
    texts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return "\n".join(texts) if content_format == "string" else [{"type": "text", "text": text} for text in texts]


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object like {{'type': 'text', 'text': '...'}}.", param="messages")
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequest(f"{where} has the type {kind!r}. This model reads text only.", param="messages")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where} has no {_TEXT_PARTS[kind]}.", param="messages")
    return text


def _tool_calls(calls: Any, where: str, arguments_as_text: bool) -> list[Any]:
    """Arguments come as JSON in a string, or as the object; broken JSON (a cut-off reply) stays the string it is."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(f"{where}.tool_calls must be a list of objects.", param="messages")
    result: list[Any] = []
    for call in calls:
        function = call.get("function")
        if "function" in call and not (isinstance(function, dict) and isinstance(function.get("name", ""), str)):
            raise InvalidRequest(f"{where}.tool_calls[{len(result)}].function must be an object with a name.", param="messages")
        if not isinstance(function, dict) or "arguments" not in function:
            result.append(call)
            continue
        convert = _as_text if arguments_as_text else _as_object
        result.append({**call, "function": {**function, "arguments": convert(function["arguments"])}})
    return result


def _check_arguments(messages: Sequence[Any]) -> None:
    """Refuse arguments that together hold more than a request may: as texts nobody has counted what is in them."""
    held = 0
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        calls = message.get("tool_calls")
        functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        for function in (*functions, message.get("function_call")):
            if isinstance(function, Mapping) and isinstance(text := function.get("arguments"), str):
                data = text.encode("utf-8", "replace")
                try:
                    check_shape(data)
                except TooMuch as e:
                    raise InvalidRequest(f"messages: what is in the arguments of a tool call {e}", param="messages") from None
                if data.count(b"[") + data.count(b"{") > _FEW:
                    held += json_shape(data).containers
    if held > MAX_CONTAINERS:
        raise InvalidRequest(
            f"messages: the arguments of tool calls hold {held} objects and lists; at most {MAX_CONTAINERS} are allowed in one request.",
            param="messages",
        )


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (json.JSONDecodeError, RecursionError):
        return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
