"""Plans over TCP: what the ring is on one host, for a rank on another one. Both ends of one connection.

A host that is cut off closes nothing. So the rank says now and then that it is alive, from a thread of its own, and the kernel asks for
the engine when it has been silent.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from octavo.executor.frames import FrameBuffer, framed
from octavo.protocol.ranks import FromRank, RankAlive, decode_up, encode

ALIVE_SECONDS = 1.0
_CHECK_SECONDS = 0.2
_READ = 1 << 20
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}


def prepare(sock: socket.socket) -> None:
    """Every message leaves at once, and a peer that is gone without a word is noticed within 15 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not everywhere, under these names
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class LinkWriter:
    """The engine's end. One thread may send while another reads."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameBuffer()
        self.sent = 0
        """Messages."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Hand over a message.

        Args:
            check: called while there is no room; what it raises ends the wait.

        Raises:
            BrokenPipeError: the rank is gone.
        """
        view = memoryview(framed(data))
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                check()
                select.select([], [self._socket], [], _CHECK_SECONDS)
            except OSError as e:
                raise BrokenPipeError(str(e)) from None
        self.sent += 1

    def read(self) -> list[FromRank] | None:
        """What the rank has said since; None: it is gone. Does not wait."""
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return [decode_up(message) for message in self._frames.feed(data)] if data else None

    def more(self, seconds: float) -> bool:
        """Wait for more, and throw it away; False when the rank is gone, or nothing came."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return False
        try:
            return bool(self._socket.recv(_READ))
        except OSError:
            return False

    def close(self) -> None:
        self._socket.close()


class LinkReader:
    """The rank's end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._socket = sock
        self._frames = FrameBuffer()
        self._whole: deque[bytes] = deque()
        self._taken = 0
        self._saying = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._tell, name="octavo-link", daemon=True).start()

    def receive(self) -> bytes | None:
        """The next message; waits for it. None: the engine is gone."""
        while not self._whole:
            try:
                data = self._socket.recv(_READ)
            except OSError:
                return None
            if not data:
                return None
            self._whole += self._frames.feed(data)
        self._taken += 1
        return self._whole.popleft()

    def finished(self) -> None:
        """The message taken last has been dealt with."""

    def say(self, message: FromRank) -> None:
        """Send a message up. Whether the engine still is there is seen by `receive`."""
        with self._saying, contextlib.suppress(OSError):
            self._socket.sendall(framed(encode(message)))

    def close(self) -> None:
        self._closed.set()
        self._socket.close()

    def _tell(self) -> None:
        while not self._closed.wait(ALIVE_SECONDS):
            self.say(RankAlive(self._taken))
