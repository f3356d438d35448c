"""Renders chat templates of requests, in a process of `frontend.jobs`."""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import InvalidRequest
from octavo.frontend.jobs.pool import TOO_MUCH_MEMORY
from octavo.frontend.jobs.worker import Answer
from octavo.frontend.text.chat_template import ChatTemplates
from octavo.frontend.text.conversation_text import Conversation, rendered


def open_room(_setup: bytes) -> Answer:
    return answer


def answer(job: bytes) -> bytes:
    """The reply to one job: {"text"}, or {"error", "param", "code"}."""
    try:
        given: dict[str, Any] = json.loads(job)
        text = rendered(ChatTemplates(**given["templates"]), Conversation(**given["conversation"]))
        return json.dumps({"text": text}).encode()
    except InvalidRequest as e:
        return json.dumps({"error": str(e), "param": e.param, "code": e.code}).encode()
    except MemoryError:
        pass  # answered below, once what filled the memory is gone with its frames
    except RecursionError:
        return json.dumps(
            {"error": "The chat template was stopped: it is nested too deep.", "param": "chat_template", "code": None}
        ).encode()
    return json.dumps({"error": f"The chat template was stopped: {TOO_MUCH_MEMORY}.", "param": "chat_template", "code": None}).encode()
