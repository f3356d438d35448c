"""Anthropic's own client on /v1/messages."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.support.http_server import RunningServer, wait_until

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0, timeout=20) as client:
        yield client


def test_create(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="tiny", max_tokens=20, messages=MESSAGES, system="be short")  # type: ignore[arg-type]
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "hello world"  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 3


def test_stream_events(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(model="tiny", max_tokens=20, messages=MESSAGES, stream=True))  # type: ignore[arg-type]
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta" and e.delta.type == "text_delta")
    assert text == "hello world"


def test_stream_helper(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="tiny", max_tokens=20, messages=MESSAGES, stop_sequences=[" w"]) as stream:  # type: ignore[arg-type]
        assert "".join(stream.text_stream) == "hello"
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " w")
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) > 2


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
    message = client.messages.create(model="tiny", max_tokens=5, messages=MESSAGES)  # type: ignore[arg-type]
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


async def test_async(server: RunningServer) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0, timeout=20) as client:
        message = await client.messages.create(model="tiny", max_tokens=20, messages=MESSAGES)  # type: ignore[arg-type]
        assert message.content[0].text == "hello world"  # type: ignore[union-attr]
        async with client.messages.stream(model="tiny", max_tokens=20, messages=MESSAGES) as stream:  # type: ignore[arg-type]
            assert "".join([text async for text in stream.text_stream]) == "hello world"


def test_leaving_a_stream_ends_the_request(client: anthropic.Anthropic, server: RunningServer) -> None:
    server.script("forever", [30] * 400, delay=0.02)
    with client.messages.stream(model="tiny", max_tokens=400, messages=[{"role": "user", "content": "forever"}]) as stream:
        next(iter(stream.text_stream))
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_errors_become_exceptions(client: anthropic.Anthropic, server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=5, messages=MESSAGES)  # type: ignore[arg-type]
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="tiny", max_tokens=0, messages=MESSAGES)  # type: ignore[arg-type]
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=5, messages=MESSAGES)  # type: ignore[arg-type]
    server.script("breaks", "hello world", fail_at=1, delay=0.01)
    breaks = [{"role": "user", "content": "breaks"}]
    with (
        pytest.raises(anthropic.APIError, match="NaN"),
        client.messages.stream(model="tiny", max_tokens=20, messages=breaks) as stream,  # type: ignore[arg-type]
    ):
        list(stream.text_stream)
