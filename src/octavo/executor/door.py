"""Where ranks on other hosts come in, and how they knock.

Whoever comes is greeted with a number to prove the hosts' secret with (HMAC over all that is said), and proves it; so does the door. The
secret itself never travels. Then settings are compared: a rank that would compute something else is refused by the setting's name. The
door closes when everybody is in: a rank that comes back looks for the next engine's.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from octavo.config.types import EngineConfig, NodesConfig
from octavo.errors import ConfigError, EngineDead
from octavo.executor.agreement import difference, shared_settings
from octavo.executor.frames import LENGTH, framed
from octavo.executor.link import LinkReader, LinkWriter, prepare
from octavo.protocol.ranks import ComeIn, Greeting, Refused, ToGuest, Welcome, decode_come_in, decode_guest, encode

logger = logging.getLogger(__name__)

KNOCK_SECONDS = 10.0
"""How long a greeting may take from end to end."""
RETRY_SECONDS = 0.2
REMIND_SECONDS = 20.0
NAME_SECONDS = 30.0
"""A cluster may learn the name of its first host only after that has started."""
MAX_KNOCK = 1 << 16
"""Bytes that somebody may send before it is known who it is."""
TOKEN_SETTING = "OCTAVO_NODE_TOKEN or --node-token-file"


def resolve_address(nodes: NodesConfig) -> str:
    """The IP address behind --master-addr.

    Raises:
        ConfigError: it has none, or it takes a secret to use it.
        OSError: the name is not known.
    """
    host = nodes.address
    found = socket.getaddrinfo(host, nodes.port, type=socket.SOCK_STREAM)
    address = str(sorted(found, key=lambda info: info[0] != socket.AF_INET)[0][4][0])
    ip = ipaddress.ip_address(address)
    if ip.is_unspecified or ip.is_multicast:
        raise ConfigError(f"--master-addr {host}: give an address of the first host that the others reach.")
    if not nodes.token and not (ip.is_private or ip.is_link_local):
        raise ConfigError(
            f"--master-addr {host}: {address} is not a private address, and everybody who reaches it could take part. Give all hosts the "
            f"same secret ({TOKEN_SETTING}), and keep others away from the port: what the ranks send each other is not encrypted."
        )
    return address


def _proof(token: str, who: bytes, nonce: bytes, message: ComeIn | Welcome) -> bytes:
    """Of knowing the token, for one conversation and these words."""
    said = encode(msgspec.structs.replace(message, proof=b""))
    return hmac.new(token.encode(), who + nonce + said, hashlib.sha256).digest()


@dataclass(frozen=True)
class Guest:
    """A rank on another host that has come in."""

    rank: int
    node: int
    host: str
    link: LinkWriter


class Door:
    """Open from the start; threads of its own let ranks in.

    Args:
        homes: the ranks that may come -> the node that each is on.
        rendezvous: told to those who come in, and `defer` too.

    Raises:
        ConfigError: the address is not one to listen on.
    """

    def __init__(self, config: EngineConfig, nodes: NodesConfig, homes: Mapping[int, int], *, rendezvous: str, defer: bool) -> None:
        self._settings = shared_settings(config)
        self._nodes = nodes
        self._homes = dict(homes)
        self._rendezvous = rendezvous
        self._defer = defer
        self._in: dict[int, Guest] = {}
        self._new: list[Guest] = []
        self._complaint = ""
        """Why somebody was refused last."""
        self._lock = threading.Lock()
        self._room = threading.Semaphore(2 * len(homes) + 8)
        self._opened = time.monotonic()
        self._reminded = self._opened
        self._listener = _listen(nodes)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._let_in, name="octavo-door", daemon=True).start()

    def arrivals(self) -> list[Guest]:
        """Those who have come since the last call."""
        with self._lock:
            new, self._new = self._new, []
        return new

    def check(self) -> None:
        """Wait no longer than allowed.

        Raises:
            ConfigError: somebody has not come in time.
        """
        missing = [rank for rank in self._homes if rank not in self._in]
        if not missing:
            return
        nodes = sorted({self._homes[rank] for rank in missing})
        who, advice = _ranks(missing), ""
        if self._nodes.count > 1:
            who = f"{' and '.join(f'node {node}' for node in nodes)} ({who})"
            advice = f"Run the same command there with --node-rank {nodes[0]}, and see"
        host, port = self.address
        now = time.monotonic()
        if now - self._opened > self._nodes.timeout:
            raise ConfigError(
                f"{who[0].upper()}{who[1:]} did not come to {host}:{port} within {self._nodes.timeout:g} s. {advice or 'See'} that the port can "
                f"be reached.{self._complaint}"
            )
        if now - self._reminded > REMIND_SECONDS:
            self._reminded = now
            logger.info("Waiting at %s:%d for %s%s", host, port, who, self._complaint)

    def close(self) -> None:
        """Let nobody in any more. Those who are in stay."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()

    def _let_in(self) -> None:
        while len(self._in) < len(self._homes):
            try:
                sock, address = self._listener.accept()
            except OSError:  # closed
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(sock, address[0]), name="octavo-guest", daemon=True).start()
            else:
                sock.close()

    def _meet(self, sock: socket.socket, host: str) -> None:
        try:
            prepare(sock)
            sock.settimeout(KNOCK_SECONDS)
            nonce = secrets.token_bytes(16)
            sock.sendall(framed(encode(Greeting(nonce))))
            guest = decode_come_in(_one_frame(sock))
            refusal = self._judge(guest, nonce)
            if refusal is None and not self._take(guest, sock, host):
                refusal = Refused(f"Rank {guest.rank} is here already.", again=True)
            if refusal is not None:
                if not refusal.again:
                    logger.warning("Refused a rank of %s: %s", host, refusal.message)
                    self._complaint = f" The last that came was refused: {refusal.message}"
                sock.sendall(framed(encode(refusal)))
                sock.close()
        except (OSError, ValueError, msgspec.MsgspecError) as e:
            logger.debug("Somebody at %s came to the door for nothing: %s", host, e)
            sock.close()
        finally:
            self._room.release()

    def _judge(self, guest: ComeIn, nonce: bytes) -> Refused | None:
        """Why it may not come in."""
        if not hmac.compare_digest(guest.proof, _proof(self._nodes.token, b"rank", nonce, guest)):
            return Refused(f"Its secret is not that of the first host ({TOKEN_SETTING}).", again=False)
        if guest.rank not in self._homes or self._homes[guest.rank] != guest.node:
            return Refused(
                f"Rank {guest.rank} is not on node {guest.node}: --nnodes or the parallel sizes differ from the first host's.", False
            )
        if (unlike := difference(self._settings, guest.settings)) is not None:
            return Refused(f"Node {guest.node} does not have the settings of the first host: {unlike}.", again=False)
        return None

    def _take(self, guest: ComeIn, sock: socket.socket, host: str) -> bool:
        """Whether it is in now."""
        welcome = Welcome(self._rendezvous, self._defer, b"")
        welcome.proof = _proof(self._nodes.token, b"first", guest.nonce, welcome)
        with self._lock:
            if guest.rank in self._in:
                return False
            sock.sendall(framed(encode(welcome)))
            self._in[guest.rank] = one = Guest(guest.rank, guest.node, host, LinkWriter(sock))
            self._new.append(one)
            if len(self._in) == len(self._homes):
                self.close()
        logger.info("Rank %d has come from node %d (%s)", guest.rank, guest.node, host)
        return True


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def address_here(nodes: NodesConfig) -> str:
    """The address of this host, the first one, that the others come to.

    Raises:
        ConfigError: it is none of this host's, or not safe to use.
    """
    deadline, said = time.monotonic() + min(NAME_SECONDS, nodes.timeout), False
    while True:
        try:
            address = resolve_address(nodes)
            break
        except OSError as e:
            if time.monotonic() > deadline:
                raise ConfigError(f"--master-addr {nodes.address}: this name is not known here ({e.strerror or e}).") from None
        if not said:
            said = True
            logger.info("Waiting for --master-addr %s to become known (%g s at most)", nodes.address, min(NAME_SECONDS, nodes.timeout))
        time.sleep(RETRY_SECONDS)
    try:
        with _socket_for(address) as sock:
            sock.bind((address, 0))
    except OSError as e:
        if e.errno != errno.EADDRNOTAVAIL:
            raise ConfigError(f"--master-addr {nodes.address}: cannot listen there ({e.strerror or e}).") from None
        raise ConfigError(
            f"--master-addr {nodes.address} is not an address of this host, which is the first one (--node-rank 0). It has "
            f"{', '.join(own_addresses())}."
        ) from None
    return address


def _listen(nodes: NodesConfig) -> socket.socket:
    address = address_here(nodes)
    sock = _socket_for(address)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, nodes.port))
        sock.listen(128)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--master-port {nodes.port} is in use already on {address}. Stop the other program, or give all hosts another port."
            ) from None
        raise ConfigError(f"Cannot listen on {address}:{nodes.port}: {e.strerror or e}. Check --master-addr and --master-port.") from None
    return sock


def _socket_for(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


def own_addresses() -> list[str]:
    """IPv4 addresses of this host's interfaces."""
    import psutil

    return sorted({a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == socket.AF_INET})


def _one_frame(sock: socket.socket) -> bytes:
    """The message that comes next, and no byte of what follows.

    Raises:
        ValueError: it is too long to be one of a greeting.
        OSError: it does not come.
    """
    deadline = time.monotonic() + KNOCK_SECONDS
    (count,) = LENGTH.unpack(_exactly(sock, LENGTH.size, deadline))
    if count > MAX_KNOCK:
        raise ValueError(f"a greeting of {count} bytes")
    return _exactly(sock, count, deadline)


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        if time.monotonic() > deadline:
            raise TimeoutError("a greeting took too long")
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("it went away")
        data += more
    return data


class _NotNow(Exception):
    """Nobody is at the door, or it may work in a moment."""


def come_in(config: EngineConfig, rank: int, *, patience: float, speaks: bool, lost: Callable[[], None]) -> tuple[LinkReader, Welcome]:
    """A rank's way in.

    Args:
        patience: seconds to try for.
        speaks: log what it waits for.
        lost: see `LinkReader`.

    Raises:
        ConfigError: the first host will not have it, or is not who it should be.
        EngineDead: nobody answered in time.
    """
    nodes = config.parallel.nodes
    deadline, told = time.monotonic() + patience, False
    while True:
        try:
            sock, answer = _knock(config, nodes, rank)
            return LinkReader(sock, lost), answer
        except _NotNow as e:
            why = e
        if time.monotonic() > deadline:
            raise EngineDead(
                f"The first host has not answered at {nodes.address}:{nodes.port} for {patience:g} s ({why}). See that octavo runs there "
                f"with --node-rank 0, and that the port can be reached from here."
            )
        if speaks and not told:
            told = True
            logger.info("Waiting for the first host at %s:%d, up to %g s (%s)", nodes.address, nodes.port, patience, why)
        time.sleep(RETRY_SECONDS)


def _knock(config: EngineConfig, nodes: NodesConfig, rank: int) -> tuple[socket.socket, Welcome]:
    try:
        sock = socket.create_connection((resolve_address(nodes), nodes.port), KNOCK_SECONDS)
    except OSError as e:
        raise _NotNow(e.strerror or str(e)) from None
    try:
        prepare(sock)
        greeting = _told(sock)
        if not isinstance(greeting, Greeting):
            raise _NotNow("a strange greeting")
        me = ComeIn(rank, config.parallel.node_of(rank), shared_settings(config), secrets.token_bytes(16), b"")
        me.proof = _proof(nodes.token, b"rank", greeting.nonce, me)
        sock.sendall(framed(encode(me)))
        answer = _told(sock)
        if isinstance(answer, Refused):
            if answer.again:
                raise _NotNow(answer.message)
            raise ConfigError(answer.message)
        if not isinstance(answer, Welcome):
            raise _NotNow("a strange answer")
        if not hmac.compare_digest(answer.proof, _proof(nodes.token, b"first", me.nonce, answer)):
            raise ConfigError(f"Who answers at {nodes.address}:{nodes.port} does not have our secret ({TOKEN_SETTING}).")
    except (OSError, ValueError, msgspec.MsgspecError) as e:
        sock.close()
        if isinstance(e, ConfigError):
            raise
        raise _NotNow(str(e)) from None
    except BaseException:
        sock.close()
        raise
    return sock, answer


def _told(sock: socket.socket) -> ToGuest:
    return decode_guest(_one_frame(sock))
