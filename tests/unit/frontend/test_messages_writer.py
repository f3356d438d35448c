"""Messages out of chat replies with reasoning and tool calls; whole and streamed are the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octavo.frontend.http.messages.request import MessagesRequest, chat_request
from octavo.frontend.http.messages.writer import MessageOptions, MessagesWriter
from octavo.frontend.http.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    FunctionCall,
    FunctionDelta,
    Message,
    ToolCall,
    ToolCallDelta,
    Usage,
)


class Chat:
    """A chat reply that is written down."""

    def __init__(self, deltas: list[Delta], message: Message, finish: str) -> None:
        self._deltas, self._message, self._finish = deltas, message, finish

    async def whole(self, _generation: Any) -> ChatCompletion:
        choice = ChatChoice(0, self._message, None, self._finish)
        return ChatCompletion("id", 0, "tiny", [choice], self.usage())

    async def chunks(self, _generation: Any) -> AsyncIterator[ChatChunk]:
        for delta in self._deltas:
            yield ChatChunk("id", 0, "tiny", [ChatChunkChoice(0, delta)])
        yield ChatChunk("id", 0, "tiny", [ChatChunkChoice(0, Delta(), finish_reason=self._finish)])

    def usage(self) -> Usage:
        return Usage(5, 8, 3)


def writer(thinking: bool, finish: str = "tool_calls") -> MessagesWriter:
    deltas = [
        Delta("assistant", ""),
        Delta(reasoning="let me "),
        Delta(reasoning="see"),
        Delta(content="Calling."),
        Delta(tool_calls=[ToolCallDelta(0, FunctionDelta("now", ""), id="c0")]),
        Delta(tool_calls=[ToolCallDelta(0, FunctionDelta(arguments='{"tz":'))]),
        Delta(tool_calls=[ToolCallDelta(0, FunctionDelta(arguments='"UTC"}'))]),
        Delta(tool_calls=[ToolCallDelta(1, FunctionDelta("later", ""), id="c1")]),
    ]
    message = Message("assistant", "Calling.", reasoning="let me see")
    message.tool_calls = [ToolCall("c0", FunctionCall("now", '{"tz":"UTC"}')), ToolCall("c1", FunctionCall("later", ""))]
    options = MessageOptions("msg-1", "tiny", (), 100, thinking)
    return MessagesWriter(options, Chat(deltas, message, finish))  # type: ignore[arg-type]


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a client builds from events."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for name in ("text", "thinking"):
                if name in delta:
                    block[name] += delta[name]
            block["json"] += delta.get("partial_json", "")
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return blocks


@pytest.mark.parametrize(("thinking", "finish"), [(True, "tool_calls"), (False, "stop")])
async def test_streamed_and_whole(thinking: bool, finish: str) -> None:
    whole = await writer(thinking, finish).whole(None)  # type: ignore[arg-type]
    raw = [event async for event in writer(thinking, finish).stream(None)]  # type: ignore[arg-type]
    events = [json.loads(event.split(b"data: ", 1)[1]) for event in raw]
    assert joined(events) == whole["content"]
    assert whole["stop_reason"] == "tool_use"
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    thought = [{"type": "thinking", "thinking": "let me see", "signature": ""}] if thinking else []
    assert whole["content"] == [
        *thought,
        {"type": "text", "text": "Calling."},
        {"type": "tool_use", "id": "c0", "name": "now", "input": {"tz": "UTC"}},
        {"type": "tool_use", "id": "c1", "name": "later", "input": {}},
    ]
    started = [e["index"] for e in events if e["type"] == "content_block_start"]
    stopped = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert started == stopped == list(range(len(whole["content"])))


async def test_arguments_that_are_no_object_are_not_lost() -> None:
    message = Message("assistant", "")
    message.tool_calls = [ToolCall("c", FunctionCall("f", '{"cut'))]
    options = MessageOptions("m", "tiny", (), 100, False)
    reply = await MessagesWriter(options, Chat([], message, "length")).whole(None)  # type: ignore[arg-type]
    assert reply["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {"arguments": '{"cut'}}]


def request(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields})


def test_what_chat_is_asked() -> None:
    tool = {"name": "now", "input_schema": {"type": "object"}}
    chat = chat_request(request(tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}))
    assert chat.tools == [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat_request(request(tools=[tool], tool_choice={"type": "tool", "name": "now"})).tool_choice == {
        "type": "function",
        "function": {"name": "now"},
    }
    thinking = chat_request(request(thinking={"type": "adaptive"}, output_config={"effort": "max"}))
    assert thinking.chat_template_kwargs == {"enable_thinking": True}
    assert thinking.reasoning_effort == "high"
    schema = {"type": "object"}
    structured = chat_request(request(output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert structured.response_format is not None
    assert structured.response_format["json_schema"]["schema"] == schema
