"""The other API servers of this server, as one of them sees them. Usually there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

Handler = Callable[[bytes], bytes]


@dataclass(frozen=True)
class PeerAnswers:
    """What the others said. What an answer holds is a matter of its topic."""

    living: list[bytes] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    """The last answers of API servers that have ended."""


class Peers(Protocol):
    """How the parts of an application that must agree over all API servers reach the others."""

    def report_live(self, live: int) -> None:
        """So many requests are being served here."""

    def total_live(self) -> int:
        """... and so many everywhere."""

    def on(self, topic: str, handler: Handler) -> None:
        """Answer questions of others about `topic`."""

    async def ask(self, topic: str, body: bytes = b"", *, own: bytes = b"") -> PeerAnswers:
        """Put a question to the others. `own`: our own answer, remembered for when we have ended."""


class Alone:
    """No others."""

    def __init__(self) -> None:
        self._live = 0

    def report_live(self, live: int) -> None:
        self._live = live

    def total_live(self) -> int:
        return self._live

    def on(self, topic: str, handler: Handler) -> None:
        pass

    async def ask(self, topic: str, body: bytes = b"", *, own: bytes = b"") -> PeerAnswers:
        return PeerAnswers()
