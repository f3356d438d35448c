"""Plans over TCP: what the ring is on one host, for a rank on another one. Both ends of one connection.

A host that is cut off closes nothing. So the rank says now and then that it is alive, from a thread of its own; when even the kernel gets
no answer to that, the engine is gone, whatever the rank is waiting for in the middle of a step.
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
_OPTIONS = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 12_000}
"""The last, in ms, is for what has been sent and not acknowledged; the others for when there is no such thing."""


def prepare(sock: socket.socket) -> None:
    """Every message leaves at once, and a peer that is gone without a word is noticed within 15 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
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
        self.lost = ""
        """What the kernel says of the end of the connection, if that was not an orderly one."""

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
        except ConnectionResetError:  # it ended with something of ours unread: an end like any other
            return None
        except OSError as e:
            self.lost = e.strerror or str(e)
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

    def hang_up(self) -> None:
        """Let the rank see the end of the connection. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class LinkReader:
    """The rank's end.

    Args:
        lost: called from a thread when the engine is found to be gone, unless `leave` came first. `receive` notices only when somebody
            waits in it.
    """

    def __init__(self, sock: socket.socket, lost: Callable[[], None]) -> None:
        sock.settimeout(None)
        self._socket = sock
        self._lost = lost
        self._frames = FrameBuffer()
        self._whole: deque[bytes] = deque()
        self._taken = 0
        self._saying = threading.Lock()
        self._left = threading.Event()
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
        """Send a message up."""
        with contextlib.suppress(OSError):
            self._say(message)

    def leave(self) -> None:
        """The engine may go now."""
        self._left.set()

    def _say(self, message: FromRank) -> None:
        with self._saying:
            self._socket.sendall(framed(encode(message)))

    def _tell(self) -> None:
        while not self._left.wait(ALIVE_SECONDS):
            try:
                self._say(RankAlive(self._taken))
            except OSError:
                if not self._left.is_set():
                    self._lost()
                return
