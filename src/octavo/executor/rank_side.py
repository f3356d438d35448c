"""How a rank's process hears from the engine, and is heard: through the ring and a pipe on one host, through a link from another."""

from __future__ import annotations

import logging
import os
from typing import Protocol

from octavo.errors import OctavoError
from octavo.executor.door import come_in
from octavo.executor.frames import framed
from octavo.executor.ring import RingReader
from octavo.protocol.ranks import FromRank, LinkPlace, RankBoot, RankFailed, RingPlace, encode

logger = logging.getLogger(__name__)


class Channel(Protocol):
    rendezvous: str
    """Where the ranks find each other."""
    defer: bool
    """Leave for `PrepareNow` what can wait."""

    def receive(self) -> bytes | None:
        """The next message; waits for it. None: the engine is gone."""

    def finished(self) -> None:
        """The message taken last has been dealt with."""

    def say(self, message: FromRank) -> None: ...

    def leave(self) -> None:
        """The engine may go now: it has said so."""


class RingChannel:
    """From the engine on this host. Implements `Channel`."""

    def __init__(self, place: RingPlace) -> None:
        self.rendezvous = place.rendezvous
        self.defer = place.defer
        self._ring = RingReader(place.ring, place.reader, place.headers, place.ring_bytes)
        self._status = place.status
        self.receive = self._ring.receive
        self.finished = self._ring.finished

    def say(self, message: FromRank) -> None:
        say(self._status, message)

    def leave(self) -> None:
        """Nothing to do: who started us sees our end."""


class LinkChannel:
    """From the engine on another host. Implements `Channel`.

    Raises:
        OctavoError: the rank is not let in; who started it has been told.
    """

    def __init__(self, boot: RankBoot, place: LinkPlace) -> None:
        try:
            self._link, welcome = come_in(boot.config, boot.rank, patience=place.patience, speaks=place.speaks, lost=_end)
        except OctavoError as e:
            say(place.status, RankFailed(str(e), type(e).__name__))
            raise
        self.rendezvous = welcome.rendezvous
        self.defer = welcome.defer
        self.receive = self._link.receive
        self.finished = self._link.finished
        self.say = self._link.say
        self.leave = self._link.leave


def _end() -> None:
    """Whatever the main thread waits for: nobody waits for it any more."""
    logger.error("The engine is gone")
    os._exit(1)


def open_channel(boot: RankBoot) -> Channel:
    """The rank's way to the engine.

    Raises:
        OctavoError: there is none.
    """
    return RingChannel(boot.place) if isinstance(boot.place, RingPlace) else LinkChannel(boot, boot.place)


def say(descriptor: int, message: FromRank) -> None:
    """Write a message into a pipe."""
    os.write(descriptor, framed(encode(message)))
