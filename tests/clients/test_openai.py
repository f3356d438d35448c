"""OpenAI's own client: every endpoint, sync and async, whole and streamed, and the exceptions that errors become."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pydantic
import pytest

from tests.support.http_server import RunningServer, wait_until

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def aclient(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10, logprobs=True, top_logprobs=1)
    assert reply.choices[0].message.content == "hello world"
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert reply.choices[0].logprobs.content[0].token == "hello"


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello world"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == "hello world"
        assert stream.get_final_completion().choices[0].message.content == "hello world"


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=["a", "b"], n=2, logprobs=2, echo=True, extra_body={"top_k": 5, "min_tokens": 1})
    assert [c.text for c in reply.choices] == ["ahello world"] * 2 + ["bhello world"] * 2
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.token_logprobs is not None
    assert reply.choices[0].logprobs.token_logprobs[0] is None


def test_completions_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="a", stream=True, stop=" w"))
    assert "".join(c.choices[0].text for c in chunks) == "hello"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_async(aclient: openai.AsyncOpenAI) -> None:
    reply = await aclient.chat.completions.create(model="tiny", messages=MESSAGES)
    assert reply.choices[0].message.content == "hello world"
    stream = await aclient.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "hello world"
    text = await aclient.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join([c.choices[0].text async for c in text]) == "hello world"
    assert [m.id async for m in aclient.models.list()] == ["tiny"]


def test_leaving_a_stream_ends_the_request(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("forever", [30] * 400, delay=0.02)
    stream = client.completions.create(model="tiny", prompt="forever", stream=True, max_tokens=400)
    next(iter(stream))
    stream.close()
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_errors_become_exceptions(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="z" * 600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as other:
        client.embeddings.create(model="tiny", input="x")
    assert "--runner pooling" in str(other.value)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError):
        list(client.completions.create(model="tiny", prompt="", stream=True))
    server.script("breaks", "hello world", fail_at=1, delay=0.01)
    with pytest.raises(openai.APIError):
        list(client.completions.create(model="tiny", prompt="breaks", stream=True))


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Person(pydantic.BaseModel):
    name: str
    age: int


class weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str


def test_parse_with_a_pydantic_model(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("person", '{"name": "Ann", "age": 30}')
    reply = client.chat.completions.parse(model="tiny", messages=[{"role": "user", "content": "person"}], response_format=Person)
    assert reply.choices[0].message.parsed == Person(name="Ann", age=30)


def test_tools(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("weather?", CALL)
    messages = [{"role": "user", "content": "weather?"}]
    tools = [openai.pydantic_function_tool(weather)]
    reply = client.chat.completions.parse(model="tiny", messages=messages, tools=tools)
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.tool_calls[0].function.parsed_arguments == weather(city="Paris")  # type: ignore[index]
    with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert [(event.name, event.parsed_arguments) for event in done] == [("weather", weather(city="Paris"))]
        assert stream.get_final_completion().choices[0].finish_reason == "tool_calls"


def test_parse_with_tools_and_a_pydantic_model(client: openai.OpenAI, server: RunningServer) -> None:
    messages, tools = [{"role": "user", "content": "either?"}], [openai.pydantic_function_tool(weather)]
    for answer in ('{"name": "Ann", "age": 30}', CALL):
        server.script("either?", answer)
        reply = client.chat.completions.parse(model="tiny", messages=messages, tools=tools, response_format=Person)
        constraint = server.fake.seen[-1].sampling.constraint
        assert constraint is not None
        assert '"age"' in constraint.grammar
        assert "weather" in constraint.grammar
        message = reply.choices[0].message
        if answer == CALL:
            assert message.tool_calls[0].function.parsed_arguments == weather(city="Paris")  # type: ignore[index]
        else:
            assert message.parsed == Person(name="Ann", age=30)
