"""What /v1/messages (Anthropic's shape) accepts, and what it comes to: a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.errors import InvalidRequest
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.schemas import ChatRequest, Items, Objects, Schema, Strings


class CountTokensRequest(Schema):
    model: str | None = None
    messages: Items
    system: Any = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    service_tier: str | None = None


def chat_request(body: CountTokensRequest, *, thinks: bool) -> ChatRequest:
    """The chat that a request comes to.

    Args:
        thinks: the model's reasoning is recognised, so that a budget can be kept.

    Raises:
        InvalidRequest: names the message and the block.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(body.messages):
        _add_message(messages, message, f"messages[{i}]")
    fields: dict[str, Any] = {"messages": messages}
    if body.messages and isinstance(body.messages[-1], dict) and body.messages[-1].get("role") == "assistant":
        # A beginning of the reply, for the model to go on with.
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.tools:
        fields["tools"] = [_tool(tool, i) for i, tool in enumerate(body.tools)]
        _add_choice(fields, body.tool_choice or {"type": "auto"})
    _add_thinking(fields, body.thinking, thinks=thinks)
    if isinstance(body, MessagesRequest):
        _add_sampling(fields, body)
    return ChatRequest.model_validate(fields)


def _add_sampling(fields: dict[str, Any], body: MessagesRequest) -> None:
    fields["max_completion_tokens"] = body.max_tokens
    for name in ("temperature", "top_p", "top_k", "stream"):
        if (value := getattr(body, name)) is not None:
            fields[name] = value
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    if isinstance(user := (body.metadata or {}).get("user_id"), str):
        fields["user"] = user
    form = body.output_format or (body.output_config or {}).get("format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise InvalidRequest('output_format must be {"type": "json_schema", "schema": {...}}.', param="output_format")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": form["schema"]}}


def _add_thinking(fields: dict[str, Any], thinking: Mapping[str, Any] | None, *, thinks: bool) -> None:
    if thinking is None:
        return
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidRequest("thinking.type must be enabled, adaptive or disabled.", param="thinking")
    fields["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"}
    budget = thinking.get("budget_tokens")
    if kind == "enabled" and budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise InvalidRequest(f"thinking.budget_tokens must be at least 1, got {short_repr(budget)}.", param="thinking")
        if thinks:
            fields["thinking_token_budget"] = budget


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"tools[{i}] must have name and input_schema; this server has no built-in tools.", param="tools")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object", "properties": {}}}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _add_choice(fields: dict[str, Any], choice: Mapping[str, Any]) -> None:
    kind = choice.get("type")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        fields["tool_choice"] = {"any": "required"}.get(kind, kind)
    else:
        raise InvalidRequest(f"tool_choice.type must be auto, any, tool or none, got {short_repr(kind)}.", param="tool_choice")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False


def _add_message(messages: list[dict[str, Any]], message: Any, where: str) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role must be user or assistant, got {short_repr(role)}.", param="messages")
    content = message.get("content")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of blocks.", param="messages")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    results: list[dict[str, Any]] = []
    for j, block in enumerate(content):
        place = f"{where}.content[{j}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use" and isinstance(block.get("id"), str) and isinstance(block.get("name"), str):
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append({"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}})
        elif kind == "tool_result" and isinstance(block.get("tool_use_id"), str):
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(block.get("content") or "", place)})
        else:
            raise InvalidRequest(f"{place} (type {short_repr(kind)}) cannot be used; this model reads text, tool_use and tool_result.",
                                 param="messages")  # fmt: skip
    messages += results
    if texts or calls or thoughts or not results:
        rest: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if calls:
            rest["tool_calls"] = calls
        if thoughts:
            rest["reasoning"] = "\n".join(thoughts)
        messages.append(rest)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = [block.get("text") for block in content if isinstance(block, dict)] if isinstance(content, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{where} must be a string or a list of text blocks.", param=where.partition("[")[0])
    return "\n".join(str(text) for text in texts)
