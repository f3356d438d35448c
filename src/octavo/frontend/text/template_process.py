"""Chat templates from requests, run where they can be killed.

The sandbox bounds what a template usually does. It cannot bound everything that a program may make of small steps: lists nested in
themselves sixty times, sums of lists, numbers of a million digits; inside one call of the interpreter no clock is looked at and no other
thread runs. So a template that comes with a request never runs in the server: a process renders it, and is ended when it is late (see
`frontend.jobs`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from octavo.errors import InvalidRequest
from octavo.frontend.jobs.pool import STOPPED, JobPool
from octavo.frontend.jobs.process import Room
from octavo.frontend.text.chat_template import ChatTemplates
from octavo.frontend.text.conversation_text import Conversation
from octavo.frontend.text.template_sandbox import MAX_CHARS, MAX_SECONDS

GRACE = 2.0
"""Seconds beyond the sandbox's own limit, after which a process is ended."""
ROOM = Room(
    name="chat templates of requests",
    module="octavo.frontend.text.template_worker",
    seconds=MAX_SECONDS + GRACE,
    memory=1 << 30,
    longest_reply=16 * MAX_CHARS,
)


class TemplateProcesses:
    """Renders conversations by templates that nobody vouches for. Safe to use from any thread."""

    def __init__(self) -> None:
        self.pool = JobPool(ROOM)

    async def render(self, templates: ChatTemplates, conversation: Conversation, client: str = "") -> str:
        """The text of `conversation`.

        Args:
            client: whose it is; clients take turns.

        Raises:
            InvalidRequest: see `ChatTemplates.render`; or the template took too long, or too much memory.
            Overloaded: too many wait.
        """
        job = json.dumps({"templates": _fields(replace(templates, named={})), "conversation": _fields(conversation)}, default=str).encode()
        try:
            reply: dict[str, Any] = json.loads(await self.pool.ask(client, job))
        except InvalidRequest as error:
            if error.code != STOPPED:
                raise
            raise InvalidRequest(f"The chat template was stopped: {error}.", param="chat_template") from None
        if isinstance(text := reply.get("text"), str):
            return text
        raise InvalidRequest(str(reply.get("error")), param=reply.get("param"), code=reply.get("code"))

    def close(self) -> None:
        """End the processes; a rendering that is going on ends with an error."""
        self.pool.close()


def _fields(data: Any) -> dict[str, Any]:
    """Without the deep copy of `asdict`: a conversation may be megabytes."""
    values = {field.name: getattr(data, field.name) for field in fields(data)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
