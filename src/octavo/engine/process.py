"""The engine process: one engine core behind two ZMQ sockets.

Started by a frontend as `python -m octavo.engine.process`, with an `EngineBoot` on standard input. It owns nothing that outlives
it: when the parent dies, when standard input closes or on SIGTERM it ends, and the frontend can always start another one and
send the live requests again. The loop blocks only when the core has nothing to do.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from octavo.config import address_space
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.protocol.boot import EngineBoot, die_with_parent
from octavo.protocol.engine import (
    AbortRequests,
    EngineFailed,
    EngineProgress,
    EngineReady,
    FinishReason,
    FromEngine,
    NewRequest,
    Phase,
    Ping,
    Pong,
    ReleaseHeld,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenDelta,
    Vocabulary,
)

if TYPE_CHECKING:
    from octavo.core.loop import EngineCore
    from octavo.core.pooling import PoolingCore

    Core = EngineCore | PoolingCore

logger = logging.getLogger(__name__)

Builder = Callable[[EngineConfig, Callable[[str, int, int], None], Callable[[str, str], None]], "tuple[Core, EngineReady]"]

LAST_WORDS_SECONDS = 0.2
LINGER_MS = 2000
"""How long the last messages may take to leave when the process ends."""


class _Terminated(BaseException):
    """SIGTERM. Not an Exception, so that no handler inside the loop swallows it."""


class Mailbox:
    """The two sockets, as messages."""

    def __init__(self, boot: EngineBoot) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            # Unbounded: the frontend bounds what is live, and the loop must never block on a slow reader.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self._outbox.setsockopt(zmq.LINGER, LINGER_MS)
        self._inbox.bind(boot.inbox)
        self._outbox.connect(boot.outbox)
        self._inbox.recv()  # the greeting
        self._giving_up = threading.Lock()
        self._alarm = self._context.socket(zmq.PUSH)
        self._alarm.setsockopt(zmq.LINGER, LINGER_MS)
        self._alarm.connect(boot.outbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))

    def give_up(self, message: str, kind: str) -> None:
        """End the process, whatever the main thread waits for: the frontend starts another, and sends the live requests again.

        Never returns, and says only what the first caller says.
        """
        with self._giving_up:
            self._alarm.send(msgspec.msgpack.encode(EngineFailed(message, kind=kind)))
            self._alarm.close()  # sends what is left
            time.sleep(LAST_WORDS_SECONDS)
            os._exit(1)

    def receive(self, *, block: bool) -> ToEngine | None:
        """The next message; None when there is none (or when it could not be read, which is logged)."""
        try:
            raw = self._inbox.recv(0 if block else zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            message: ToEngine = self._decoder.decode(raw)
        except msgspec.DecodeError as e:
            logger.error("Ignoring a message that cannot be read: %s", e)
            self._refuse(raw, str(e))
            return self.receive(block=False)
        return message

    def _refuse(self, raw: bytes, why: str) -> None:
        """If the unreadable message was a request, end it: its sender would wait forever otherwise."""
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError, AttributeError):
            data: dict[str, Any] = msgspec.msgpack.decode(raw)
            if data["type"] == "new":
                n = data["sampling"].get("n", 1)
                self.send(StepOutputs(deltas=_failed(data["request_id"], data.get("index", 0), n, f"Bad request message: {why}")))

    def close(self) -> None:
        self._context.destroy()


def _failed(request_id: str, index: int, n: int, why: str) -> list[TokenDelta]:
    return [TokenDelta(request_id, i, [], finish_reason=FinishReason.ERROR, error=why) for i in range(index, index + n)]


def serve(engine: Core, mailbox: Mailbox) -> None:
    """Turn the loop until `Shutdown`. What the engine left to prepare is done while there is nothing else to do, or now and then."""
    preparing = True
    while True:
        message = mailbox.receive(block=not (engine.has_work() or preparing))
        while message is not None:
            if isinstance(message, Shutdown):
                return
            _handle(engine, mailbox, message)
            message = mailbox.receive(block=False)
        if engine.has_work():
            outputs = engine.step()
            if outputs.stats is None:
                outputs.stats = engine.stats()
            mailbox.send(outputs)
        preparing = preparing and engine.prepare()


def _handle(engine: Core, mailbox: Mailbox, message: ToEngine) -> None:
    if isinstance(message, NewRequest):
        try:
            engine.add(message)
        except Exception as e:
            logger.exception("Request %s could not be added", message.request_id)
            mailbox.send(StepOutputs(deltas=_failed(message.request_id, message.index, message.sampling.n, str(e))))
    elif isinstance(message, Vocabulary):
        engine.set_vocabulary(message)
    elif isinstance(message, AbortRequests):
        engine.abort(message)
    elif isinstance(message, ReleaseHeld):
        engine.release(message)
    elif isinstance(message, ResetPrefixCache):
        mailbox.send(Pong(message.call_id, engine.stats(), result=engine.reset_prefix_cache()))
    elif isinstance(message, Ping):
        mailbox.send(Pong(message.call_id, engine.stats()))


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated


def _load_builder(name: str) -> Builder:
    module, function = name.split(":")
    builder: Builder = getattr(importlib.import_module(module), function)
    return builder


def seconds_alive() -> float:
    """Since the process was started: what imports took before there was a clock to look at."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return float(Path("/proc/uptime").read_bytes().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        import psutil  # not needed on Linux, and not free

        return time.time() - float(psutil.Process().create_time())


def main() -> int:
    """Exit code 0 after `Shutdown` or SIGTERM, 1 after a failure that has been reported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    boot: EngineBoot = pickle.load(sys.stdin.buffer)
    die_with_parent(boot.from_main_thread)
    logging.basicConfig(level=boot.log_level, format=f"%(levelname)s {boot.config.parallel.name or 'engine'}: %(message)s")
    mailbox = Mailbox(boot)
    engine: Core | None = None
    try:
        signal.signal(signal.SIGTERM, _on_sigterm)
        build = _load_builder(boot.builder)
        engine, ready = build(boot.config, lambda phase, done, total: mailbox.send(EngineProgress(phase, done, total)), mailbox.give_up)
        gc.collect()
        gc.freeze()  # what is alive now lives as long as the process: later collections need not walk it
        gc.set_threshold(100_000, 20, 100)  # the loop makes many short-lived structs and hardly any cycles
        phases = [Phase("process", max(0.0, seconds_alive() - sum(p.seconds for p in ready.phases))), *ready.phases]
        mailbox.send(StepOutputs(deltas=[], stats=engine.stats()))  # there are figures as soon as there is an engine
        mailbox.send(msgspec.structs.replace(ready, pid=os.getpid(), phases=phases))
        serve(engine, mailbox)
    except _Terminated:
        pass
    except OctavoError as e:
        mailbox.send(EngineFailed(str(e), kind=type(e).__name__))
        return 1
    except Exception as e:
        if engine is None and address_space.is_refusal(e):
            mailbox.send(EngineFailed(address_space.told(f"to load {boot.config.model.name}"), kind=ConfigError.__name__))
            return 1
        logger.exception("The engine failed")
        mailbox.send(EngineFailed(f"{type(e).__name__}: {e}"))
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if engine is not None:
            engine.shutdown()
        mailbox.close()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # All that is ours is closed. What native libraries do after the interpreter's end takes time, and must not turn a clean end into
    # an abort.
    os._exit(code)
