"""What /v1/messages accepts, and the chat request it stands for."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from octavo.errors import InvalidRequest
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.limits import MAX_MESSAGES, check_count
from octavo.frontend.http.schemas import Bool, ChatRequest, Float, Int, Int32, Items, Objects, Schema, Strings
from octavo.frontend.http.tools import check_number

OUR_NAME = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "json_schema.schema": "schema",
    "function.parameters": "input_schema",
    "function.name": "name",
    "function.strict": "strict",
    "function.description": "description",
    "prompt": "messages",
}
"""Chat field -> the field here that it was made from, for errors."""

EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts beyond what chat templates know."""


class OutputConfig(Schema):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(Schema):
    """What decides how many tokens go in."""

    model: str | None = None
    messages: Items
    system: Any = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Objects | None = Field(None, description="Refused unless empty: this server calls no tools itself.")


class MessagesRequest(CountTokensRequest):
    max_tokens: Int
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: Strings | None = None
    stream: Bool | None = None
    temperature: Float | None = None
    top_k: Int | None = None
    top_p: Float | None = None

    # Beyond Anthropic's
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int32 | None = None
    request_id: str | None = None
    cache_salt: str | None = None


SAME_NAME = ("model", "stream", "temperature", "top_k", "top_p", "chat_template_kwargs", "priority", "request_id", "cache_salt")


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """The chat request that answers `body`.

    Raises:
        InvalidRequest: names the message or the field.
    """
    check_count("messages", body.messages, "messages")
    messages = [*_system(body.system)]
    for number, message in enumerate(body.messages):
        messages += _chat_messages(message, f"messages[{number}]")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"messages[{number}].content: each tool_result in it is a message to the model, and with those before there are "
                f"{len(messages)}; at most {MAX_MESSAGES} are allowed in one request.",
                param="messages",
            )
    if not body.messages:
        raise InvalidRequest("messages must not be empty.", param="messages")
    if body.mcp_servers:
        raise InvalidRequest(
            "mcp_servers: this server runs no tools of its own; give them as tools, and answer their calls.", param="mcp_servers"
        )
    continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    tools = _tools(body.tools)
    choice, parallel = _tool_choice(body.tool_choice, tools)
    fields: dict[str, Any] = {name: value for name in SAME_NAME if (value := getattr(body, name, None)) is not None}
    fields |= {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        # An answer that has been begun is gone on with.
        "continue_final_message": continues or None,
        "add_generation_prompt": False if continues else None,
    }
    fields |= _thinking(body)
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {body.max_tokens}.", param="max_tokens")
        user = (body.metadata or {}).get("user_id")
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "user": user if isinstance(user, str) else None,
        }
    return ChatRequest.model_validate(fields)


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None or system in ("", []):
        return []
    return [{"role": "system", "content": system if isinstance(system, str) else _texts(system, "system")}]


def _chat_messages(message: Any, where: str) -> list[dict[str, Any]]:
    """One message as chat has it: the results of tools are messages of their own, before the rest."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(
            f"{where} must be an object whose role is user, assistant or system, got {short_repr(role)}.", param="messages"
        )
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of blocks, got {short_repr(content)}.", param="messages")
    if role == "assistant":
        return [_assistant(content, where)]
    result: list[dict[str, Any]] = []
    rest = []
    for number, block in enumerate(content):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            result.append(_tool_result(block, f"{where}.content[{number}]"))
        else:
            rest.append((number, block))
    if rest or not result:
        parts = [{"type": "text", "text": _text(block, f"{where}.content[{number}]")} for number, block in rest]
        result.append({"role": role, "content": parts})
    return result


def _assistant(content: list[Any], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    texts: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        at = f"{where}.content[{number}]"
        match kind:
            case "thinking":
                message["reasoning"] = str(block.get("thinking", ""))
            case "redacted_thinking":
                pass
            case "tool_use":
                name, call_id, given = block.get("name"), block.get("id"), block.get("input")
                if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(given, dict):
                    raise InvalidRequest(f"{at} (type tool_use) needs id, name and input, an object.", param="messages")
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
                message.setdefault("tool_calls", []).append(call)
            case _:
                texts.append({"type": "text", "text": _text(block, at)})
    if texts:
        message["content"] = texts
    return message


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise InvalidRequest(f"{where} (type tool_result) needs tool_use_id.", param="messages")
    content = block.get("content")
    given = "" if content is None else content
    return {
        "role": "tool",
        "tool_call_id": block["tool_use_id"],
        "content": given if isinstance(given, str) else _texts(given, f"{where}.content"),
    }


def _texts(blocks: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(blocks, list):
        raise InvalidRequest(f"{where} must be a string or a list of blocks, got {short_repr(blocks)}.", param=where.partition("[")[0])
    return [{"type": "text", "text": _text(block, f"{where}[{number}]")} for number, block in enumerate(blocks)]


def _text(block: Any, where: str) -> str:
    """The text of a block that is nothing but text, a document in plain text too."""
    param = where.partition("[")[0]
    if not isinstance(block, dict):
        raise InvalidRequest(f"{where} must be an object like {{'type': 'text', 'text': '...'}}, got {short_repr(block)}.", param=param)
    kind, text = block.get("type"), block.get("text")
    if kind == "document":
        source = block.get("source")
        if isinstance(source, dict) and source.get("type") == "text":
            text = source.get("data")
            title = block.get("title")
            if isinstance(text, str):
                return f"{title}\n{text}" if isinstance(title, str) else text
        raise InvalidRequest(f"{where}: a document must have a source of type text. This model reads text only.", param=param)
    if kind != "text":
        raise InvalidRequest(f"{where} has the type {short_repr(kind)}. This model reads text only.", param=param)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where} has no text.", param=param)
    return text


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    check_number(tools)
    result = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type", "custom") not in ("custom", None):
            raise InvalidRequest(
                f"tools[{number}] has the type {short_repr(tool.get('type'))}. This server runs no tools of its own; "
                "give tools with name and input_schema, whose calls you answer.",
                param="tools",
            )
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise InvalidRequest(f"tools[{number}] needs name and input_schema.", param="tools")
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        result.append({"type": "function", "function": function})
    return result


def _tool_choice(choice: dict[str, Any] | None, tools: list[dict[str, Any]]) -> tuple[str | dict[str, Any] | None, bool | None]:
    """(tool_choice, parallel_tool_calls) as chat has them."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    kind, name = choice.get("type"), choice.get("name")
    if kind not in ("auto", "any", "tool", "none"):
        raise InvalidRequest(f"tool_choice.type must be auto, any, tool or none, got {short_repr(kind)}.", param="tool_choice")
    if kind in ("any", "tool") and not tools:
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    if kind == "tool":
        if name not in [tool["function"]["name"] for tool in tools]:
            raise InvalidRequest(f"tool_choice names {short_repr(name)}, which is not among tools.", param="tool_choice")
        return {"type": "function", "function": {"name": name}}, parallel
    return ("required" if kind == "any" else kind if tools else None), parallel


def _thinking(body: CountTokensRequest) -> dict[str, Any]:
    """Chat fields for thinking, effort and output format."""
    fields: dict[str, Any] = {}
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise InvalidRequest(f"thinking.type must be enabled, disabled or adaptive, got {short_repr(kind)}.", param="thinking")
        budget = body.thinking.get("budget_tokens")
        if kind == "enabled" and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
            raise InvalidRequest("thinking of type enabled needs budget_tokens, a positive number.", param="thinking")
        given = getattr(body, "chat_template_kwargs", None) or {}
        fields["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", **given}
    if body.output_config is not None:
        effort, wanted = body.output_config.effort, body.output_config.format
        fields["reasoning_effort"] = EFFORTS.get(effort, effort) if effort is not None else None
        if wanted is not None:
            if wanted.get("type") != "json_schema":
                raise InvalidRequest("output_config.format.type must be json_schema.", param="output_config")
            json_schema = {"name": "output", "schema": wanted.get("schema"), "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return fields
