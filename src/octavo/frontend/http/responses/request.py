"""What /v1/responses accepts, and the chat request it stands for."""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidRequest, NotYet
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.limits import check_metadata
from octavo.frontend.http.schemas import VERBOSITIES, Bool, ChatRequest, Float, Int, Int32, Ints, Objects, Schema, Strings
from octavo.frontend.http.tools import check_number

INCLUDABLE = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What OpenAI lets a request include. All but the first belong to items that do not exist here."""

SAME_NAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
    "thinking_token_budget",
    "chat_template_kwargs",
    "structured_outputs",
    "priority",
    "request_id",
    "cache_salt",
    "user",
    "stream",
    "return_progress",
)
"""Fields that are those of chat."""

OUR_NAME = {
    "messages": "input",
    "prompt": "input",
    "json_schema.schema": "schema",
    "function.parameters": "parameters",
    "function.name": "name",
    "function.strict": "strict",
    "function.description": "description",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
}
"""Chat field -> the field here that it was made from, for errors."""


class TextConfig(Schema):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(Schema):
    effort: str | None = None
    summary: str | None = None


class ResponsesStreamOptions(Schema):
    include_obfuscation: Bool | None = None


class InputTokensRequest(Schema):
    """What decides how many tokens go in."""

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    parallel_tool_calls: Bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: Objects | None = None
    truncation: str | None = None


class ResponsesRequest(InputTokensRequest):
    background: Bool | None = None
    include: Strings | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: Bool | None = None
    stream: Bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: Float | None = None
    top_logprobs: Int32 | None = None
    top_p: Float | None = None
    user: str | None = None

    # Beyond OpenAI's
    top_k: Int | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    seed: Int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ints | None = None
    ignore_eos: Bool | None = None
    min_tokens: Int32 | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: Ints | None = None
    bad_words: Strings | None = None
    include_stop_str_in_output: Bool | None = None
    return_progress: Bool | None = None
    skip_special_tokens: Bool | None = None
    spaces_between_special_tokens: Bool | None = None
    stream_interval: Int32 | None = None
    thinking_token_budget: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Int32 | None = None
    request_id: str | None = None
    cache_salt: str | None = None


def check_request(body: InputTokensRequest) -> None:
    """What cannot work, and relations between fields that chat does not know.

    Raises:
        InvalidRequest, NotYet
    """
    if body.prompt is not None:
        raise NotYet("prompt (a stored prompt template) is not supported; send input.", param="prompt")
    if body.conversation is not None and body.previous_response_id is not None:
        raise InvalidRequest("Give either conversation or previous_response_id, not both.", param="conversation")
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidRequest(f"truncation must be auto or disabled, got {short_repr(body.truncation)}.", param="truncation")
    if not isinstance(body, ResponsesRequest):
        return
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise InvalidRequest(f"max_output_tokens must be at least 1, got {body.max_output_tokens}.", param="max_output_tokens")
    if body.max_tool_calls is not None and body.max_tool_calls < 0:
        raise InvalidRequest(f"max_tool_calls must not be negative, got {body.max_tool_calls}.", param="max_tool_calls")
    if (unknown := next((name for name in body.include or () if name not in INCLUDABLE), None)) is not None:
        raise InvalidRequest(f"include: {short_repr(unknown)} is unknown; it may hold {', '.join(INCLUDABLE)}.", param="include")
    if body.text and body.text.verbosity not in (None, *VERBOSITIES):
        raise InvalidRequest(
            f"text.verbosity must be one of {', '.join(VERBOSITIES)}, got {short_repr(body.text.verbosity)}.", param="text"
        )
    if body.background and body.store is False:
        raise InvalidRequest("background needs store: the response is fetched from there.", param="background")
    if body.background and body.stream:
        raise InvalidRequest("background and stream cannot be combined here: poll the response instead.", param="stream")
    check_metadata(body.metadata)


def chat_request(body: InputTokensRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """The chat request that answers `body`, after `check_request`.

    Raises:
        InvalidRequest: tools or a format that chat has no word for.
    """
    tools = chat_tools(body.tools)
    tools, choice = chat_tool_choice(tools, body.tool_choice)
    fields: dict[str, Any] = {name: value for name in SAME_NAME if (value := getattr(body, name, None)) is not None}
    fields |= {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": choice if tools else None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
    }
    if isinstance(body, ResponsesRequest):
        wants_logprobs = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
        fields |= {
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": wants_logprobs or None,
            "top_logprobs": body.top_logprobs if wants_logprobs else None,
        }
    return ChatRequest.model_validate(fields)


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Function tools in chat's shape: name and parameters one level deeper.

    Raises:
        InvalidRequest: a tool that the server would have to run itself.
    """
    check_number(tools)
    result = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise InvalidRequest(
                f"tools[{number}] has the type {short_repr(tool.get('type'))}. This server runs no tools of its own; "
                "give functions (type function), whose calls you answer.",
                param="tools",
            )
        if not isinstance(tool.get("name"), str):
            raise InvalidRequest(f"tools[{number}] has no name.", param="tools")
        function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
        result.append({"type": "function", "function": function})
    return result


def chat_tool_choice(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The tools that may be called, and the choice in chat's shape.

    Raises:
        InvalidRequest: a choice of no known form, or one that names what is not there.
    """
    if not isinstance(choice, dict):
        if choice not in (None, "auto", "none", "required"):
            raise InvalidRequest(f"tool_choice must be none, auto, required or an object, got {short_repr(choice)}.", param="tool_choice")
        if choice == "required" and not tools:
            raise InvalidRequest("tool_choice required needs tools.", param="tool_choice")
        return tools, choice
    known = [tool["function"]["name"] for tool in tools]  # no set: what is looked for in it may be anything
    if choice.get("type") == "function":
        if choice.get("name") not in known:
            raise InvalidRequest(f"tool_choice names {short_repr(choice.get('name'))}, which is not among tools.", param="tool_choice")
        return tools, {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools":
        entries = choice.get("tools")
        names = [entry.get("name") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        allowed = {name for name in names if isinstance(name, str)}
        if not allowed or not allowed <= {*known} or choice.get("mode", "auto") not in ("auto", "required"):
            raise InvalidRequest(
                "tool_choice of type allowed_tools needs mode (auto or required) and tools, a list of functions that are among tools.",
                param="tool_choice",
            )
        return [tool for tool in tools if tool["function"]["name"] in allowed], choice.get("mode", "auto")
    raise InvalidRequest(f"tool_choice has the type {short_repr(choice.get('type'))}; use function or allowed_tools.", param="tool_choice")


def _response_format(text: TextConfig | None) -> dict[str, Any] | None:
    given = text.format if text else None
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
