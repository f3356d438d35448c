"""OpenAI's own client on /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.support.http_server import RunningServer, wait_until


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def aclient(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20) as client:
        yield client


def test_create_retrieve_delete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="hi", instructions="be short", max_output_tokens=20)
    assert response.output_text == "hello world"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens == 3
    assert client.responses.retrieve(response.id).output_text == "hello world"
    items = list(client.responses.input_items.list(response.id, limit=1))
    assert [item.type for item in items] == ["message"]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_input_items_are_paged(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input=[{"role": "user", "content": c} for c in "abcde"])
    texts = [item.content[0].text for item in client.responses.input_items.list(response.id, limit=2, order="asc")]  # type: ignore[union-attr]
    assert texts == list("abcde")


def test_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "hello world"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "hello world"


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == "hello world"
        assert stream.get_final_response().output_text == "hello world"


def test_conversation(client: openai.OpenAI, server: RunningServer) -> None:
    first = client.responses.create(model="tiny", input="one")
    client.responses.create(model="tiny", input="two", previous_response_id=first.id)
    prompt = server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids, skip_special_tokens=False)
    assert "user\none" in prompt
    assert "assistant\nhello world" in prompt
    # The client may also carry the conversation itself, with the output as it came.
    client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}],  # type: ignore[list-item]
    )
    again = server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids, skip_special_tokens=False)
    assert again == prompt


def test_background(client: openai.OpenAI, server: RunningServer) -> None:
    response = client.responses.create(model="tiny", input="hi", background=True)
    assert response.status == "queued"
    assert wait_until(lambda: client.responses.retrieve(response.id).status == "completed")
    assert client.responses.cancel(response.id).status == "completed"


def test_input_tokens(client: openai.OpenAI) -> None:
    assert client.responses.input_tokens.count(model="tiny", input="hi").input_tokens > 2


async def test_async(aclient: openai.AsyncOpenAI) -> None:
    response = await aclient.responses.create(model="tiny", input="hi")
    assert response.output_text == "hello world"
    async with aclient.responses.stream(model="tiny", input="hi") as stream:
        assert (await stream.get_final_response()).output_text == "hello world"


def test_errors_become_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="tiny", input="hi", previous_response_id="resp_x")
    assert bad.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="hi")
