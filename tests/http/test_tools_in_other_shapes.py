"""Tool calls through /v1/responses and /v1/messages: what the chat path finds, in their shapes, streamed as whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.http_server import RunningServer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
MESSAGES_TOOL: Any = {"name": "weather", "input_schema": PARAMETERS}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=20) as client:
        yield client


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
def test_responses(client: openai.OpenAI, server: RunningServer, choice: Any) -> None:
    server.script("", "Wait. " + CALL + CALL if choice == "auto" else CALL)
    request: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [RESPONSES_TOOL], "tool_choice": choice}
    response = client.responses.create(**request)
    calls = [item for item in response.output if item.type == "function_call"]
    assert len(calls) == (2 if choice == "auto" else 1)
    assert response.output_text == ("Wait." if choice == "auto" else "")
    assert (calls[0].name, json.loads(calls[0].arguments)) == ("weather", {"city": "Paris"})
    with client.responses.stream(**request) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in response.output]
    assert [item.arguments for item in final.output if item.type == "function_call"] == [call.arguments for call in calls]


def test_an_agent_loop_over_previous_responses(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("", CALL)
    first = client.responses.create(model="tiny", input="weather?", tools=[RESPONSES_TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    server.script("", "hello world")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[RESPONSES_TOOL])
    assert second.output_text == "hello world"
    prompt = server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>tool\nsunny" in prompt


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}])
def test_messages(claude: anthropic.Anthropic, server: RunningServer, choice: Any) -> None:
    server.script("", "Wait. " + CALL if choice["type"] == "auto" else CALL)
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": HI, "tools": [MESSAGES_TOOL], "tool_choice": choice}
    message = claude.messages.create(**request)
    assert message.stop_reason == "tool_use"
    use = message.content[-1]
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("weather", {"city": "Paris"})
    with claude.messages.stream(**request) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    without_ids = [block.to_dict() | {"id": ""} for block in message.content]
    assert [block.to_dict() | {"id": ""} for block in final.content] == without_ids
