"""What /v1/responses accepts, and what it comes to: a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from octavo.errors import InvalidRequest
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.schemas import ChatRequest, Schema, Strings

_IGNORED_TEXT = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(Schema):
    model: str | None = None
    input: Any = Field(None, description="A string, or a list of items.")
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    include: Strings | None = None
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    truncation: str | None = None
    user: str | None = None
    service_tier: str | None = None

    # Extensions
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


_SAME = (
    "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "chat_template_kwargs", "priority", "cache_salt", "user", "stream",
)  # fmt: skip


def chat_request(body: ResponsesRequest, history: Sequence[Mapping[str, Any]]) -> ChatRequest:
    """The chat that a request comes to.

    Args:
        history: the messages of the responses before it.

    Raises:
        InvalidRequest: an item, a tool or a format that cannot be served.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += [dict(message) for message in history]
    messages += input_messages(body.input)
    fields: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    fields["messages"] = messages
    if body.tools:
        fields["tools"] = [_tool(tool, i) for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None and body.tools:
        fields["tool_choice"] = body.tool_choice
    elif body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidRequest(f"truncation must be auto or disabled, got {short_repr(body.truncation)}.", param="truncation")
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if wants_logprobs(body):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise InvalidRequest("reasoning.effort must be a string.", param="reasoning")
        fields["reasoning_effort"] = effort
    response_format = _format((body.text or {}).get("format"))
    if response_format is not None:
        fields["response_format"] = response_format
    return ChatRequest.model_validate(fields)


def wants_logprobs(body: ResponsesRequest) -> bool:
    return _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"tools[{i}] has the type {short_repr(tool.get('type'))}; this server has no built-in tools, only functions.", param="tools"
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") not in ("text", "json_object", "json_schema"):
        raise InvalidRequest("text.format.type must be text, json_object or json_schema.", param="text")
    if given["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
    return {"type": given["type"]}


def input_messages(given: Any) -> list[dict[str, Any]]:
    """The input of a request as chat messages.

    Raises:
        InvalidRequest: names the item.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be a string, or a non-empty list of items.", param="input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        if not isinstance(item, dict):
            raise InvalidRequest(f"input[{i}] must be an object, got {short_repr(item)}.", param="input")
        _add_item(messages, item, f"input[{i}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise InvalidRequest(f"{where}.role must be user, assistant, system or developer.", param="input")
            message = {"role": role, "content": _text(item.get("content"), f"{where}.content")}
            last = messages[-1] if messages else {}
            if role == "assistant" and last.get("role") == "assistant" and not last.get("content") and not last.get("tool_calls"):
                last["content"] = message["content"]  # behind its reasoning
            else:
                messages.append(message)
        case "function_call":
            name, call_id = item.get("name"), item.get("call_id")
            if not isinstance(name, str) or not isinstance(call_id, str):
                raise InvalidRequest(f"{where} needs name and call_id.", param="input")
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": item.get("arguments") or "{}"}}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise InvalidRequest(f"{where} needs call_id.", param="input")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item.get("output"), f"{where}.output")})
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            messages.append({"role": "assistant", "content": "", "reasoning": _text(parts, f"{where}.content")})
        case kind:
            raise InvalidRequest(f"{where} has the type {short_repr(kind)}, which this server cannot take.", param="input")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts.", param="input")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) and part.get("type") in _IGNORED_TEXT else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{i}] is no text; this model reads text only.", param="input")
        texts.append(text)
    return "\n".join(texts)
