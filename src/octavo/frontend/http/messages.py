"""Builds the replies of /v1/messages: content blocks, whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from octavo.frontend.http.chat import ChatOptions
from octavo.frontend.http.generation import Generation, UsageCounter
from octavo.frontend.http.reply_stream import reply_pieces
from octavo.frontend.http.sse import named_event
from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.parsing.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text

Json = dict[str, Any]


class MessageWriter:
    """One reply. `whole` or `stream`, once."""

    def __init__(self, options: ChatOptions) -> None:
        self._o = options
        self._usage = UsageCounter(details=True)
        self._blocks: list[Json] = []
        self._arguments = ""
        """Of the block that is a call."""
        self._open = False
        self._last: CompletionOutput | None = None
        self._called = False

    async def whole(self, generation: Generation) -> Json:
        async for _ in self._block_events(generation):
            pass
        return {**self._shell(), "content": self._blocks, **self._end(), "usage": self._counts()}

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        begun = False
        async for event in self._block_events(generation):
            if not begun:
                begun = True
                yield self._start()
            if event is not None:
                yield named_event(event["type"], event)
        if not begun:
            yield self._start()
        yield named_event("message_delta", {"type": "message_delta", "delta": self._end(), "usage": self._counts()})
        yield named_event("message_stop", {"type": "message_stop"})

    def _start(self) -> bytes:
        shell = {
            **self._shell(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._counts(), "output_tokens": 0},
        }
        return named_event("message_start", {"type": "message_start", "message": shell})

    def _shell(self) -> Json:
        return {"id": self._o.id, "type": "message", "role": "assistant", "model": self._o.model}

    def _counts(self) -> Json:
        """Cached tokens are counted apart from the others, as clients of this API expect."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }

    def _end(self) -> Json:
        last = self._last
        reason, stop = (last.finish_reason, last.stop_reason) if last is not None else ("stop", None)
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    async def _block_events(self, generation: Generation) -> AsyncIterator[Json | None]:
        """The events of blocks; None for a piece that has none yet."""
        async for piece in reply_pieces(generation, self._o.plan.form, self._usage):
            self._last = piece.output
            yield None
            for event in piece.events:
                for told in self._take(event):
                    yield told
        for told in self._close():
            yield told

    def _take(self, event: Event) -> list[Json]:
        match event:
            case Text():
                events = self._begin({"type": "text", "text": ""})
                self._blocks[-1]["text"] += event.text
                return [*events, self._delta({"type": "text_delta", "text": event.text})]
            case Reasoning():
                events = self._begin({"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += event.text
                return [*events, self._delta({"type": "thinking_delta", "thinking": event.text})]
            case CallStart():
                self._arguments = ""
                block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": event.name, "input": {}}
                return [*self._close(), *self._begin(block)]
            case CallArguments():
                self._arguments += event.text
                return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
            case CallEnd():
                self._called |= event.complete
                return self._close()

    def _begin(self, block: Json) -> list[Json]:
        """Begin a block, unless the current one is of its kind."""
        if self._open and self._blocks[-1]["type"] == block["type"] != "tool_use":
            return []
        events = self._close()
        self._blocks.append(block)
        self._open = True
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        if not self._open:
            return []
        self._open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _object(arguments: str) -> Json:
    """The arguments as the object that this API has them as; a call that was cut short has none that could be read."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
