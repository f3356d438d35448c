"""Builds replies of /v1/responses out of those of chat: one object, or events that grow it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from octavo.frontend.http.chat import ChatWriter
from octavo.frontend.http.errors import describe, renamed
from octavo.frontend.http.generation import Generation
from octavo.frontend.http.replies import Usage
from octavo.frontend.http.responses.items import Item
from octavo.frontend.http.responses.output import Event, Output, whole_choice
from octavo.frontend.http.responses.request import OUR_NAME, ResponsesRequest
from octavo.frontend.http.sse import named_event
from octavo.protocol.params import SamplingParams


@dataclass(frozen=True)
class ResponsePlan:
    """One response that is going to be made."""

    id: str
    created: int
    model: str
    body: ResponsesRequest
    params: SamplingParams
    conversation: str | None = None
    """Id of the one that it goes on with."""

    def object(self, status: str, output: list[Item]) -> dict[str, Any]:
        """The response as it stands."""
        body = self.body
        text = {"format": {"type": "text"}, **(body.text.model_dump(exclude_none=True) if body.text else {})}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": bool(body.background),
            "conversation": None if self.conversation is None else {"id": self.conversation},
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": body.reasoning.summary if body.reasoning else None,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": self.params.temperature,
            "text": text,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }


class ResponsesWriter:
    """One reply. `whole` or `stream`, once.

    Args:
        on_end: gets the finished response, whatever became of it, before the client does.
    """

    def __init__(self, plan: ResponsePlan, chat: ChatWriter, on_end: Callable[[dict[str, Any]], None]) -> None:
        self._plan = plan
        self._chat = chat
        self._on_end = on_end
        self._output = Output()
        self._sequence = 0

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The finished response. An error is the caller's: it still has a status code to send."""
        completion = await self._chat.whole(generation)
        for _ in (*self._output.add(whole_choice(completion.choices[0])), *self._output.end()):
            pass
        return self._finished()

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The response as it is created, every change to its output, and the response as it ended."""
        yield self._event(("response.created", {"response": self._plan.object("in_progress", [])}))
        yield self._event(("response.in_progress", {"response": self._plan.object("in_progress", [])}))
        async for chunk in self._chat.chunks(generation):
            if chunk.prompt_progress is not UNSET:
                yield self._event(("response.prompt_progress", {"prompt_progress": chunk.prompt_progress}))
                continue
            for choice in chunk.choices:
                for event in self._output.add(choice):
                    yield self._event(event)
        for event in self._output.end():
            yield self._event(event)
        response = self._finished()
        yield self._event((f"response.{'completed' if response['status'] == 'completed' else 'incomplete'}", {"response": response}))

    def failure(self, error: BaseException) -> bytes:
        """The last event of a stream that broke."""
        return self._event(("response.failed", {"response": self.failed(error)}))

    def failed(self, error: BaseException) -> dict[str, Any]:
        """The response that `error` ended."""
        reply = describe(renamed(error, OUR_NAME))
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(reply.status, "server_error")
        response = self._plan.object("failed", self._output.items)
        response["error"] = {"code": code, "message": reply.message}
        self._on_end(response)
        return response

    def _finished(self) -> dict[str, Any]:
        output = self._output
        status = {"length": "incomplete", "abort": "cancelled"}.get(output.finish_reason or "", "completed")
        response = self._plan.object(status, output.items)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["completed_at"] = int(time.time()) if status == "completed" else None
        response["usage"] = usage(self._chat.usage())
        self._on_end(response)
        return response

    def _event(self, event: Event) -> bytes:
        name, fields = event
        number, self._sequence = self._sequence, self._sequence + 1
        return named_event(name, {"type": name, "sequence_number": number, **fields})


def usage(counted: Usage) -> dict[str, Any]:
    """Token counts under the names of this API."""
    details = counted.prompt_tokens_details
    parts = counted.completion_tokens_details
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": details.cached_tokens if details else 0, "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": parts.reasoning_tokens if parts else 0},
        "total_tokens": counted.total_tokens,
    }
