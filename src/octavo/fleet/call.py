"""`Call`: an HTTP request on its way from a router to a replica, with what the choice of the replica depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

KEY_CHUNK = 256
"""Bytes of a prompt's text that are remembered together: some 64 tokens."""
MAX_KEY = 1 << 20
"""Bytes of a prompt that are looked at: beyond a megabyte every request is one of its kind."""
_BEFORE = ("tools", "functions", "system", "instructions")
"""Fields that templates put before the conversation."""
_PROMPTS = ("messages", "prompt", "input", "query", "text_1")


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None
    key: bytes = b""
    """Alike at the beginning with that of another call as far as their prompts are."""
    extra_key: str = ""
    """Calls with different ones share no cache."""
    sequences: int = 1
    """What it is to a replica that has it."""


@dataclass(frozen=True)
class ReplyHead:
    """The first thing that a replica answers; the bytes of the body follow."""

    status: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


def routing_key(body: Any) -> bytes:
    """The text of a request's prompt, near enough: fields and messages in the order in which templates write them, each as JSON.

    Args:
        body: decoded; anything, since it has not been checked yet.
    """
    if not isinstance(body, dict):
        return b""
    parts = [msgspec.json.encode(body[name]) for name in _BEFORE if body.get(name)]
    prompt = next((body[name] for name in _PROMPTS if body.get(name)), None)
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) for one in prompt):
        prompt = prompt[0]  # several prompts go to one replica all the same
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        # One by one: the end of a list would differ from where a longer one goes on.
        parts += [msgspec.json.encode(one) + b"," for one in prompt[:MAX_KEY]]
    elif isinstance(prompt, str):
        parts.append(prompt.encode("utf-8", "replace"))
    return b"".join(parts)[:MAX_KEY]


def make_call(
    method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]], content: bytes, client: tuple[str, int] | None
) -> Call:
    """A call to be routed. A body that is no JSON has no key: whoever gets it will say what is wrong with it."""
    key, extra_key, sequences = b"", "", 1
    try:
        body = msgspec.json.decode(content) if content else None
        key = routing_key(body)
        if isinstance(body, dict):
            extra_key = str(body.get("cache_salt") or "")
            sequences = _sequences(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        pass
    return Call(method, path, query, tuple(headers), content, client, key, extra_key, sequences)


def _sequences(body: dict[str, Any]) -> int:
    n, prompts = body.get("n"), body.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
    return max(1, several * (n if isinstance(n, int) and 0 < n < 10_000 else 1))
