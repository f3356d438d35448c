"""The process that runs chat templates from requests: one at a time, with bounded memory and time, and nothing to lose.

Run by `template_process` as `python -m`; frames of JSON come in on standard input and go out on standard output, each behind its length.
A template that finds a way around the sandbox's bounds ends this process and no other: memory is limited by the kernel, and so is the time
of one rendering, in case whoever started us is not there to end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from octavo.errors import InvalidRequest
from octavo.frontend.text.chat_template import ChatTemplates
from octavo.frontend.text.conversation_text import Conversation, rendered
from octavo.frontend.text.template_sandbox import MAX_SECONDS
from octavo.protocol.boot import die_with_starter

LENGTH_BYTES = 8
MEMORY = 1 << 30
"""Bytes that renderings may take beyond what an idle process has."""
READY = b"{}"


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = source.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "big")
    data = source.read(size)
    return data if len(data) == size else None


def write_frame(target: BinaryIO, data: bytes) -> None:
    target.write(len(data).to_bytes(LENGTH_BYTES, "big"))
    target.write(data)
    target.flush()


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


TOO_MUCH_MEMORY = "it needed more memory than it may have"


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)


def _limit_time() -> None:
    """The kernel ends us when one rendering takes far too long, whatever holds the interpreter."""
    with contextlib.suppress(OSError, ValueError):
        soft = int(time.process_time() + 4 * MAX_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    die_with_starter()
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the frames
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    write_frame(target, READY)
    while (job := read_frame(source)) is not None:
        _limit_time()
        write_frame(target, answer(job))


if __name__ == "__main__":
    main()
