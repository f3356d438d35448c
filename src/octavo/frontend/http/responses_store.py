"""Responses that can be asked for again, or continued. In memory, bounded, forgotten with the server."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class StoredResponse:
    """A response with its conversation."""

    owner: str
    """Whose key asked for it: nobody else finds it."""
    response: Json
    messages: list[Json]
    """Everything before its own output, instructions aside."""
    input_items: list[Json]
    task: asyncio.Task[None] | None = None
    """While it runs in the background."""
    size: int = field(default=0)


class ResponseStore:
    """Keeps the newest responses, up to a number and a size; those that still run are not dropped."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        self.remove(stored.response["id"])
        stored.size = len(json.dumps([stored.response, stored.messages, stored.input_items]))
        self._stored[stored.response["id"]] = stored
        self._bytes += stored.size
        for name in list(self._stored):
            if len(self._stored) <= self._most and self._bytes <= self._most_bytes:
                break
            if self._stored[name].task is None and name != stored.response["id"]:
                self.remove(name)

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        found = self._stored.get(response_id)
        return found if found is not None and found.owner == owner else None

    def remove(self, response_id: str) -> None:
        found = self._stored.pop(response_id, None)
        if found is not None:
            self._bytes -= found.size
