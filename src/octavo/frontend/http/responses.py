"""Builds the replies of /v1/responses: items, and the events that tell how they come to be."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.http.chat import ChatOptions
from octavo.frontend.http.generation import Generation, UsageCounter
from octavo.frontend.http.logprobs import chat_logprobs
from octavo.frontend.http.reply_stream import Piece, reply_pieces
from octavo.frontend.http.responses_schema import ResponsesRequest
from octavo.frontend.http.sse import encode, named_event
from octavo.frontend.parsing.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text

Json = dict[str, Any]


def new_response(body: ResponsesRequest, options: ChatOptions, response_id: str) -> Json:
    """A response object before anything has been generated."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": options.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


@dataclass
class ResponseWriter:
    """One reply. `whole` or `stream`, once; `finished` is called with the response and the messages that it adds to the conversation."""

    options: ChatOptions
    response: Json
    count_tokens: Callable[[str], int]
    finished: Callable[[Json], None] = lambda response: None
    _sequence: int = 0
    _item: Json | None = None
    """The item being written."""
    _scores: list[Any] = field(default_factory=list)
    """Logprobs of the current text."""
    _reasoning: list[str] = field(default_factory=list)

    async def whole(self, generation: Generation) -> Json:
        async for _ in self._events(generation):
            pass
        return self.response

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        try:
            async for event in self._events(generation):
                yield named_event(event["type"], event)
        except Exception:
            self.response["status"] = "failed"
            self.response["error"] = {"code": "server_error", "message": "The reply could not be finished."}
            self.finished(self.response)
            raise

    async def _events(self, generation: Generation) -> AsyncIterator[Json]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=_copy(self.response))
        usage = UsageCounter(details=True)
        last: Piece | None = None
        async for piece in reply_pieces(generation, self.options.plan.form, usage):
            last = piece
            if self.options.top_logprobs is not None and piece.logprobs:
                scored = chat_logprobs(self.options.names, piece.token_ids, piece.logprobs, self.options.top_logprobs)
                self._scores += scored.content or []
            for event in piece.events:
                for told in self._take(event):
                    yield told
        for told in self._close_item(complete=last is None or last.output.finish_reason != "length"):
            yield told
        self._finish(usage, last)
        self.finished(self.response)
        yield self._event(f"response.{self.response['status']}", response=_copy(self.response))

    def _finish(self, usage: UsageCounter, last: Piece | None) -> None:
        response = self.response
        cut = last is not None and last.output.finish_reason == "length"
        response["status"] = "incomplete" if cut else "completed"
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        reasoning = "".join(self._reasoning)
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(usage.completion_tokens, self.count_tokens(reasoning)) if reasoning else 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _take(self, event: Event) -> list[Json]:
        match event:
            case Text():
                return [*self._open("message"), self._delta("response.output_text.delta", event.text, logprobs=self._take_scores())]
            case Reasoning():
                self._reasoning.append(event.text)
                return [*self._open("reasoning"), self._delta("response.reasoning_text.delta", event.text)]
            case CallStart():
                return [*self._close_item(), *self._open("function_call", event.name)]
            case CallArguments():
                assert self._item is not None
                self._item["arguments"] += event.text
                return [self._event("response.function_call_arguments.delta", **self._place(), delta=event.text)]
            case CallEnd():
                return self._close_item(complete=event.complete)

    def _open(self, kind: str, name: str = "") -> list[Json]:
        """Begin an item of a kind, unless the current one is of it."""
        if self._item is not None and self._item["type"] == kind and kind != "function_call":
            return []
        events = self._close_item()
        prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
        item: Json = {"type": kind, "id": f"{prefixes[kind]}_{secrets.token_hex(16)}", "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"call_id": self.options.plan.new_call_id(), "name": name, "arguments": ""}
        self._item = item
        self.response["output"].append(item)
        events.append(self._event("response.output_item.added", output_index=self._index, item=_copy(item)))
        if kind == "message":
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
        else:
            return events
        item["content"].append(part)
        events.append(self._event("response.content_part.added", **self._place(), content_index=0, part=_copy(part)))
        return events

    def _delta(self, kind: str, text: str, **more: Any) -> Json:
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += text
        if more.get("logprobs"):
            part["logprobs"] += more["logprobs"]
        return self._event(kind, **self._place(), content_index=0, delta=text, **more)

    def _close_item(self, *, complete: bool = True) -> list[Json]:
        item = self._item
        if item is None:
            return []
        item["status"] = "completed" if complete else "incomplete"
        events = []
        if item["type"] == "function_call":
            events.append(
                self._event("response.function_call_arguments.done", **self._place(), name=item["name"], arguments=item["arguments"])
            )
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._take_scores()
                more = {"logprobs": part["logprobs"]}
                kind = "response.output_text.done"
            else:
                more, kind = {}, "response.reasoning_text.done"
            events.append(self._event(kind, **self._place(), content_index=0, text=part["text"], **more))
            events.append(self._event("response.content_part.done", **self._place(), content_index=0, part=_copy(part)))
        events.append(self._event("response.output_item.done", output_index=self._index, item=_copy(item)))
        self._item = None
        return events

    def _take_scores(self) -> list[Json]:
        scores, self._scores = self._scores, []
        return [_decoded(score) for score in scores]

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _place(self) -> Json:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self._index}

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _copy(value: Any) -> Any:
    """A snapshot: what has been announced must not change behind the reader."""
    return _decoded(value)


def _decoded(value: Any) -> Any:
    import msgspec

    return msgspec.json.decode(encode(value))


def output_messages(response: Json) -> list[Json]:
    """What a response adds to its conversation."""
    messages: list[Json] = []
    for item in response["output"]:
        kind = item["type"]
        if kind == "reasoning":
            messages.append({"role": "assistant", "content": "", "reasoning": item["content"][0]["text"]})
            continue
        if not messages or (kind == "message" and messages[-1]["content"]):
            messages.append({"role": "assistant", "content": ""})
        if kind == "message":
            messages[-1]["content"] = item["content"][0]["text"]
        else:
            call = {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"] or "{}"}}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages
