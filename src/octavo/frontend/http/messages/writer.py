"""Builds replies of /v1/messages out of those of chat: one message, or the events that grow it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.frontend.http.chat import ChatWriter
from octavo.frontend.http.errors import describe, renamed
from octavo.frontend.http.generation import Generation
from octavo.frontend.http.messages.errors import error_body
from octavo.frontend.http.messages.request import OUR_NAME
from octavo.frontend.http.replies import ChatChunkChoice, ToolCall, ToolCallDelta, Usage
from octavo.frontend.http.sse import StreamStyle, named_event

STYLE = StreamStyle(failure=lambda error: named_event("error", error_body(describe(renamed(error, OUR_NAME)))), end=b"")


@dataclass(frozen=True)
class MessageOptions:
    id: str
    model: str
    stop_sequences: Sequence[str]
    max_tokens: int
    """As asked for: the context may have had less room."""
    thinking: bool
    """Whether the client wants to see the reasoning."""


class MessagesWriter:
    """One reply. `whole` or `stream`, once."""

    def __init__(self, options: MessageOptions, chat: ChatWriter) -> None:
        self._o = options
        self._chat = chat
        self._open = ""
        """Type of the open block; empty when there is none."""
        self._index = -1
        self._call = -1
        """Index of the open call."""
        self._called = False
        self._held = ""
        """Arguments of the open call that are not (yet) known to be a JSON object."""
        self._is_object = False

    async def whole(self, generation: Generation) -> dict[str, Any]:
        choice = (await self._chat.whole(generation)).choices[0]
        message = choice.message
        content: list[dict[str, Any]] = []
        if message.reasoning and self._o.thinking:
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content:
            content.append({"type": "text", "text": message.content})
        content += [_tool_use(call) for call in message.tool_calls or ()]
        self._called = bool(message.tool_calls)
        stop_reason, stop_sequence = self._stop(choice.finish_reason, choice.stop_reason)
        return self._message(content, stop_reason, stop_sequence, usage(self._chat.usage()))

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        finish_reason: str | None = None
        stop_reason: Any = None
        begun = False
        async for chunk in self._chat.chunks(generation):
            if not begun:
                begun = True
                yield _event("message_start", message=self._message([], None, None, {**usage(self._chat.usage()), "output_tokens": 0}))
                yield _event("ping")
            for choice in chunk.choices:
                for event in self._news(choice):
                    yield event
                if choice.finish_reason is not None:
                    finish_reason, stop_reason = choice.finish_reason, choice.stop_reason
        for event in self._close():
            yield event
        reason, sequence = self._stop(finish_reason, stop_reason)
        yield _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage(self._chat.usage()))
        yield _event("message_stop")

    def _news(self, choice: ChatChunkChoice) -> Iterator[bytes]:
        delta = choice.delta
        if delta.reasoning and self._o.thinking:
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls or ():
            yield from self._tool_call(call)

    def _tool_call(self, call: ToolCallDelta) -> Iterator[bytes]:
        self._called = True
        if self._call != call.index:
            yield from self._close()
        block = {"type": "tool_use", "id": call.id or "", "name": call.function.name or "", "input": {}}
        yield from self._switch("tool_use", block)
        self._call = call.index
        self._held += call.function.arguments or ""
        self._is_object |= self._held.lstrip().startswith("{")
        if self._is_object and self._held:
            yield self._arguments(self._held)

    def _arguments(self, text: str) -> bytes:
        self._held = ""
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _switch(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Makes sure that a block of `kind` is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open:
            if self._open == "tool_use" and self._held.strip():  # clients read these as an object, as they have it in a whole reply
                yield self._arguments(msgspec.json.encode({"arguments": self._held}).decode())
            self._held, self._is_object = "", False
            if self._open == "thinking":
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield _event("content_block_stop", index=self._index)
        self._open, self._call = "", -1

    def _stop(self, finish_reason: str | None, stop_reason: Any) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence) of this API."""
        match finish_reason:
            case "length":
                counted = self._chat.usage().completion_tokens
                return ("max_tokens" if counted >= self._o.max_tokens else "model_context_window_exceeded"), None
            case _ if self._called:  # chat says "stop" after a call that the client named
                return "tool_use", None
            case _ if isinstance(stop_reason, str) and stop_reason in self._o.stop_sequences:
                return "stop_sequence", stop_reason
            case _:
                return "end_turn", None

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None, counted: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._o.id,
            "type": "message",
            "role": "assistant",
            "model": self._o.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": counted,
        }


def usage(counted: Usage) -> dict[str, Any]:
    """Token counts under this API's names: `input_tokens` are those that no cache had."""
    details = counted.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    parts = counted.completion_tokens_details
    return {
        "input_tokens": counted.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": None if not parts else {"thinking_tokens": parts.reasoning_tokens},
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """A call as a block. Arguments that are no JSON object (a cut-off call) are kept as they are, under one key."""
    try:
        given = msgspec.json.decode(call.function.arguments or "{}")
    except msgspec.DecodeError:
        given = None
    block_input = given if isinstance(given, dict) else {"arguments": call.function.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.function.name, "input": block_input}


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})
