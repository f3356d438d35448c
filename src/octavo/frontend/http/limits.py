"""How much one request may hold, and where the work on a large one is done.

Every client of a process shares its event loop. So what a body holds is counted before it is decoded (`json_shape`), and
whatever still takes long is done in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from octavo.errors import InvalidRequest

MAX_MESSAGES = 10_000
"""Messages of a chat, items of an input."""
MAX_METADATA = 16
"""Pairs that may be attached to an object."""
TOKENIZE_CHARS = 1_000_000
"""Characters that /tokenize takes, if the model's context has no room for more."""
LARGE = 64 * 1024
"""Bytes of a body, or characters of a conversation, from which on work on it is done in a thread."""
LARGE_IDS = 10_000
"""The same for token ids."""
COST_OF_AN_ENTRY = 128
"""Characters that an entry of a list takes as long as."""

COST_OF_AN_ID = LARGE // LARGE_IDS

P = ParamSpec("P")
R = TypeVar("R")


async def off_loop(large: bool, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`work`, in a thread if it is `large`. (Handing over costs more than a small one takes.)"""
    return await asyncio.to_thread(work, *args, **kwargs) if large else work(*args, **kwargs)


def check_count(what: str, given: Sequence[Any], param: str) -> None:
    """Raises InvalidRequest when a request has more messages or items than are allowed."""
    if len(given) > MAX_MESSAGES:
        raise InvalidRequest(f"{what} has {len(given)} entries; at most {MAX_MESSAGES} are allowed in one request.", param=param)


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raises InvalidRequest if it is not what may be attached to an object."""
    if metadata and (len(metadata) > MAX_METADATA or not all(isinstance(value, str) for value in metadata.values())):
        raise InvalidRequest(f"metadata must be at most {MAX_METADATA} pairs of strings.", param="metadata")


def is_large(conversation: Any) -> bool:
    """Whether messages or items take long to go through; a quick look, at most as far as that is known."""
    if isinstance(conversation, str):
        return len(conversation) > LARGE
    cost, rest = 0, [conversation]
    while rest and cost <= LARGE:
        node = rest.pop()
        if isinstance(node, str):
            cost += len(node)
        elif isinstance(node, list) and node and isinstance(node[0], int):
            cost += COST_OF_AN_ID * len(node)
        elif isinstance(node, dict | list):
            cost += COST_OF_AN_ENTRY * len(node)
            if cost <= LARGE:
                rest.extend(node.values() if isinstance(node, dict) else node)
    return cost > LARGE
