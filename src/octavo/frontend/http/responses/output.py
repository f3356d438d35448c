"""Output items of a response, as they grow out of chat chunks. One path for both replies: a whole one ignores the events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.frontend.http.replies import ChatChoice, ChatChunkChoice, ChatLogprob, Delta, FunctionDelta, ToolCallDelta
from octavo.frontend.http.responses.items import Item, new_id

Event = tuple[str, dict[str, Any]]
"""Name, and all fields but `type` and `sequence_number`."""


class Output:
    """The items so far. At most one is open, the last one."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.finish_reason: str | None = None
        self._text: list[str] = []
        """Pieces of the open item's text or arguments."""
        self._logprobs: list[dict[str, Any]] = []
        """Of the open message."""
        self._scores: list[dict[str, Any]] = []
        """Logprobs whose text has not come yet: a token may show nothing, or half a character."""
        self._open = ""
        """Type of the open item; empty when there is none."""
        self._call = -1
        """Index of the open call."""

    def add(self, choice: ChatChunkChoice) -> Iterator[Event]:
        """Takes in what is new; yields the events that tell of it."""
        delta = choice.delta
        if choice.logprobs is not None:
            self._scores += [_logprob(entry) for entry in choice.logprobs.content or ()]
        if delta.reasoning:
            yield from self._switch("reasoning")
            yield from self._reasoning(delta.reasoning)
        if delta.content:
            yield from self._switch("message")
            yield from self._message(delta.content)
        for call in delta.tool_calls or ():
            yield from self._function_call(call)
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason

    def end(self) -> Iterator[Event]:
        """Closes the open item. An answer without any item gets an empty message."""
        if not self.items:
            yield from self._switch("message")
        yield from self._close("incomplete" if self.finish_reason == "length" else "completed")

    def _switch(self, kind: str) -> Iterator[Event]:
        """Makes sure that an item of `kind` is open."""
        if self._open == kind:
            return
        yield from self._close("completed")
        self._open = kind
        item: Item
        if kind == "reasoning":
            item = {"id": new_id("rs"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": new_id("msg"), "type": kind, "role": "assistant", "status": "in_progress", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._add(item)
        yield "response.content_part.added", {**self._where(), "part": part}

    def _add(self, item: Item) -> Iterator[Event]:
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _reasoning(self, text: str) -> Iterator[Event]:
        self._text.append(text)
        yield "response.reasoning_text.delta", {**self._where(), "delta": text}

    def _message(self, text: str) -> Iterator[Event]:
        self._text.append(text)
        scores, self._scores = self._scores, []
        self._logprobs += scores
        yield "response.output_text.delta", {**self._where(), "delta": text, "logprobs": scores}

    def _function_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if self._open != "function_call" or self._call != call.index:
            yield from self._close("completed")
            self._open, self._call = "function_call", call.index
            item: Item = {
                "id": new_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": call.id or new_id("call"),
                "name": call.function.name or "",
                "arguments": "",
            }
            yield from self._add(item)
        if arguments := call.function.arguments or "":
            self._text.append(arguments)
            where = self._where()
            del where["content_index"]
            yield "response.function_call_arguments.delta", {**where, "delta": arguments}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        item, where, text = self.items[-1], self._where(), "".join(self._text)
        match self._open:
            case "reasoning":
                part: dict[str, Any] = {"type": "reasoning_text", "text": text}
                item["content"] = [part]
                yield "response.reasoning_text.done", {**where, "text": text}
                yield "response.content_part.done", {**where, "part": part}
            case "message":
                self._logprobs += self._scores
                self._scores = []
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
                item["content"] = [part]
                yield "response.output_text.done", {**where, "text": text, "logprobs": self._logprobs}
                yield "response.content_part.done", {**where, "part": part}
            case _:
                item["arguments"] = text
                del where["content_index"]
                yield "response.function_call_arguments.done", {**where, "name": item["name"], "arguments": text}
        item["status"] = status
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}
        self._open, self._call, self._text, self._logprobs = "", -1, [], []


def whole_choice(choice: ChatChoice) -> ChatChunkChoice:
    """A finished choice as one chunk, so that `Output.add` serves for both."""
    message = choice.message
    delta = Delta(content=message.content or "")
    delta.reasoning = message.reasoning
    if message.tool_calls:
        delta.tool_calls = [
            ToolCallDelta(index, FunctionDelta(call.function.name, call.function.arguments), id=call.id)
            for index, call in enumerate(message.tool_calls)
        ]
    chunk = ChatChunkChoice(choice.index, delta, choice.logprobs, choice.finish_reason)
    chunk.stop_reason = choice.stop_reason if choice.finish_reason is not None else UNSET
    return chunk


def _logprob(entry: ChatLogprob) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(entry)
    for one in (shown, *shown["top_logprobs"]):
        one["bytes"] = one["bytes"] or []
    return shown
