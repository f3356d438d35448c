"""Anthropic's client on /v1/messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running_server
from tests.support.tiny_checkpoint import write_tiny_checkpoint

anthropic = pytest.importorskip("anthropic")

THINK: Any = {"type": "enabled", "budget_tokens": 1024}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("anthropic"))
    with running_server(folder, ServerSettings(api_key=["secret"], reasoning_parser="qwen3")) as server:
        yield server


@pytest.fixture
def client(thinking_server: RunningServer) -> Iterator[Any]:
    thinking_server.fake.rules.clear()
    thinking_server.script("", "hello world", delay=0.001)
    with anthropic.Anthropic(base_url=thinking_server.url, api_key="secret", max_retries=0, timeout=20) as client:
        yield client


def prompt_of(server: RunningServer) -> str:
    return server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids, skip_special_tokens=False)


def test_create(client: Any, thinking_server: RunningServer) -> None:
    reply = client.messages.create(model="tiny", max_tokens=20, messages=HI, system="be short", metadata={"user_id": "u"})
    assert [block.text for block in reply.content] == ["hello world"]
    assert (reply.stop_reason, reply.role, reply.type) == ("end_turn", "assistant", "message")
    assert reply.usage.output_tokens == 3
    assert "<|im_start|>system\nbe short" in prompt_of(thinking_server)
    reply = client.messages.create(model="tiny", max_tokens=1, messages=HI)
    assert reply.stop_reason == "max_tokens"
    reply = client.messages.create(model="tiny", max_tokens=20, messages=HI, stop_sequences=[" w"])
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", " w", "hello")


def test_stream(client: Any, thinking_server: RunningServer) -> None:
    thinking_server.script("", f"<think>Hm.</think>Let me see. {CALL}")
    with client.messages.stream(model="tiny", max_tokens=300, messages=HI, tools=[TOOL], thinking=THINK) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Let me see.")
    assert (message.content[2].name, message.content[2].input) == ("weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    whole = client.messages.create(model="tiny", max_tokens=300, messages=HI, tools=[TOOL], thinking=THINK)
    assert whole.model_dump()["usage"]["output_tokens_details"] == {"thinking_tokens": len("Hm.")}  # its tokens are bytes
    assert [b.model_dump(exclude={"id"}) for b in whole.content] == [
        b.model_dump(exclude={"id", "parsed_output"}) if b.type == "text" else b.model_dump(exclude={"id"}) for b in message.content
    ]


def test_a_conversation_with_tools(client: Any, thinking_server: RunningServer) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "ok"}, {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "20"}]},
                                     {"type": "text", "text": "so?"}]},
    ]  # fmt: skip
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}):
        assert client.messages.create(model="tiny", max_tokens=9, messages=messages, tools=[TOOL], tool_choice=choice).content
    prompt = prompt_of(thinking_server)
    assert prompt.index("<|im_start|>tool\n20") < prompt.index("<|im_start|>user\nso?")


def test_the_reply_goes_on_from_its_beginning(client: Any, thinking_server: RunningServer) -> None:
    client.messages.create(model="tiny", max_tokens=9, messages=[*HI, {"role": "assistant", "content": "Well,"}])
    assert prompt_of(thinking_server).rstrip().endswith("<|im_start|>assistant\nWell,")


def test_counting_tokens(client: Any, thinking_server: RunningServer) -> None:
    count = client.messages.count_tokens(model="tiny", messages=HI, system="be short").input_tokens
    client.messages.create(model="tiny", max_tokens=3, messages=HI, system="be short")
    assert count == len(thinking_server.fake.seen[-1].prompt_token_ids)


def test_errors(client: Any, thinking_server: RunningServer) -> None:
    for bad in ({"messages": []}, {"extra_body": {"temperature": -1}}, {"tools": [{"name": 3}]}, {"thinking": {"type": "x"}}, {"tool_choice": {"type": "?"}, "tools": [TOOL]},
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}):  # fmt: skip
        with pytest.raises(anthropic.BadRequestError) as error:
            client.messages.create(**{"model": "tiny", "max_tokens": 5, "messages": HI, **bad})
        assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=5, messages=HI)
    thinking_server.script("breaks", "hello world", fail_at=1, delay=0.01)
    with (
        pytest.raises(anthropic.APIError),
        client.messages.stream(model="tiny", max_tokens=9, messages=[{"role": "user", "content": "breaks"}]) as stream,
    ):
        list(stream)
