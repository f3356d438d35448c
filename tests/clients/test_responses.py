"""OpenAI's client on /v1/responses: whole, streamed, continued, in the background, with tools and formats."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pydantic
import pytest

from tests.support.http_server import RunningServer, wait_until

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOL = {"type": "function", "name": "weather", "description": "d", "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}  # fmt: skip


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    server.fake.rules.clear()
    server.script("", "hello world")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20) as client:
        yield client
    server.fake.rules.clear()
    server.script("", "hello world", delay=0.002)


def prompt_of(server: RunningServer) -> str:
    return server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids, skip_special_tokens=False)


def test_create(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="tiny", input="hi", instructions="be short", max_output_tokens=20, metadata={"a": "b"})
    assert reply.output_text == "hello world"
    assert reply.status == "completed"
    assert reply.id.startswith("resp_")
    assert reply.metadata == {"a": "b"}
    assert reply.usage is not None
    assert reply.usage.output_tokens == 3
    assert reply.usage.total_tokens == reply.usage.input_tokens + 3


def test_cut_short(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="tiny", input="hi", max_output_tokens=1)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


def test_stream(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("", "hello world", delay=0.002)
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    kinds = [e.type for e in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "hello world"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "hello world"
    with client.responses.stream(model="tiny", input="hi") as stream:
        assert [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "hello world"


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: openai.OpenAI, server: RunningServer, stream: bool) -> None:
    server.script("", "Let me see. " + CALL)
    if stream:
        events = list(client.responses.create(model="tiny", input="hi", tools=[TOOL], stream=True))
        arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        assert arguments == '{"city": "Paris"}'
        output = events[-1].response.output  # type: ignore[union-attr]
    else:
        output = client.responses.create(model="tiny", input="hi", tools=[TOOL]).output
    assert [item.type for item in output] == ["message", "function_call"]
    call = output[1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    server.script("", "It is 20 degrees.")
    items = [{"role": "user", "content": "hi"}, *output, {"type": "function_call_output", "call_id": call.call_id, "output": "20"}]
    assert client.responses.create(model="tiny", input=items, tools=[TOOL]).output_text == "It is 20 degrees."
    assert "<|im_start|>tool\n20<|im_end|>" in prompt_of(server)


def test_a_conversation_goes_on(client: openai.OpenAI, server: RunningServer) -> None:
    first = client.responses.create(model="tiny", input="first question", instructions="only once")
    second = client.responses.create(model="tiny", input="second question", previous_response_id=first.id)
    prompt = prompt_of(server)
    assert prompt.index("first question") < prompt.index("hello world") < prompt.index("second question")
    assert "only once" not in prompt
    client.responses.create(model="tiny", input="third", previous_response_id=second.id)
    assert "first question" in prompt_of(server)
    assert client.responses.retrieve(second.id).output_text == "hello world"
    assert client.responses.input_items.list(second.id).data[0].type == "message"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    unstored = client.responses.create(model="tiny", input="x", store=False)
    with pytest.raises(openai.BadRequestError) as missing:
        client.responses.create(model="tiny", input="x", previous_response_id=unstored.id)
    assert missing.value.param == "previous_response_id"


def test_in_the_background(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("slow", [30] * 400, delay=0.02)
    reply = client.responses.create(model="tiny", input="slow", background=True)
    assert reply.status == "queued"
    assert client.responses.cancel(reply.id).status == "cancelled"
    assert wait_until(lambda: server.fake.stats().running == 0)
    done = client.responses.create(model="tiny", input="hi", background=True)
    assert wait_until(lambda: client.responses.retrieve(done.id).status == "completed")
    assert client.responses.retrieve(done.id).output_text == "hello world"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(client.responses.create(model="tiny", input="hi").id)


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_parse(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("", '{"name": "Ann", "age": 30}')
    parsed = client.responses.parse(model="tiny", input="hi", text_format=Person).output_parsed
    assert parsed == Person(name="Ann", age=30)
    assert "Person" in server.fake.seen[-1].sampling.constraint.grammar  # type: ignore[union-attr]


def test_reasoning_is_an_item(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model="tiny", input="hi", reasoning={"effort": "low"}, top_logprobs=1, include=["message.output_text.logprobs"]
    )
    message = reply.output[0]
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    assert [entry.token for entry in message.content[0].logprobs or []] == ["hello", " world", "<|im_end|>"]


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": 3},
        {"input": [{"type": "image"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"input": "x", "tools": [{"type": "web_search"}]},
        {"input": "x", "tool_choice": "required"},
        {"input": "x", "truncation": "some"},
        {"input": "x", "text": {"format": {"type": "xml"}}},
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}}},
        {"input": "x", "background": True, "stream": True},
        {"input": "x", "temperature": -1},
    ],
)
def test_bad_requests(client: openai.OpenAI, body: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.post("/responses", body={"model": "tiny", **body}, cast_to=object)
    assert (bad.value.param or "").partition(".")[0] in body


def test_a_failure_in_mid_stream_is_an_event(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("breaks", "hello world", fail_at=1, delay=0.01)
    events = list(client.responses.create(model="tiny", input="breaks", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "finite" in events[-1].response.error.message


def test_items_are_referred_to(client: openai.OpenAI, server: RunningServer) -> None:
    """What clients send that keep ids instead of texts."""
    server.script("weather?", CALL)
    first = client.responses.create(model="tiny", input="hi")
    asked = client.responses.create(model="tiny", input="weather?", tools=[TOOL])  # type: ignore[list-item]
    said, call = first.output[0], asked.output[0]
    assert call.type == "function_call" and said.id is not None and call.id is not None
    given: list = [
        {"role": "user", "content": "hi"},
        {"type": "item_reference", "id": said.id},
        {"role": "user", "content": "weather?"},
        {"id": call.id},
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    server.script("sunny", "It is sunny.")
    reply = client.responses.create(model="tiny", input=given)
    assert reply.output_text == "It is sunny."
    prompt = prompt_of(server)
    assert prompt.index("hello world") < prompt.index("weather?") < prompt.index("sunny")
    kept = client.responses.input_items.list(reply.id, order="asc").data
    assert [item.type for item in kept] == ["message", "message", "message", "function_call", "function_call_output"]
    assert client.responses.input_tokens.count(model="tiny", input=given).input_tokens > 20
    conversation = client.conversations.create(items=[{"type": "item_reference", "id": said.id}])  # type: ignore[list-item]
    assert [item.type for item in client.conversations.items.list(conversation.id).data] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: no item .* is kept"):
        client.responses.create(model="tiny", input=given)
