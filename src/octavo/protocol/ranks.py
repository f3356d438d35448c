"""The messages between an executor and the ranks in other processes, and their bytes.

Down go step plans, which are diffs already; up come a report at the end of loading, and failures. Arrays travel as their bytes.
A rank on another host first comes in: `Greeting` down, `ComeIn` up, `Welcome` or `Refused` down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from octavo.config.types import EngineConfig
from octavo.protocol.step import StepPlan


class RunStep(msgspec.Struct, tag="run"):
    plan: StepPlan


class PrepareNow(msgspec.Struct, tag="prepare"):
    """Do the next piece of preparation, whatever the time: rank 0 does it too."""


class StopRank(msgspec.Struct, tag="stop"):
    """End in good order."""


ToRank = RunStep | PrepareNow | StopRank


class RankReady(msgspec.Struct, tag="ready"):
    """The model is loaded."""


class RankFailed(msgspec.Struct, tag="failed"):
    """The rank ends, and with it the engine: the others would wait for it."""

    message: str
    kind: str = ""
    """Name of the OctavoError behind it."""


class RankAlive(msgspec.Struct, tag="alive"):
    """Now and then, from a rank on another host: what shared memory says of one on this host."""

    taken: int
    """Messages taken so far."""


FromRank = RankReady | RankFailed | RankAlive


class Greeting(msgspec.Struct, tag="greeting"):
    nonce: bytes
    """To be part of the answer's proof."""


class ComeIn(msgspec.Struct, tag="come_in"):
    rank: int
    node: int
    settings: dict[str, str]
    """See `executor.agreement`."""
    nonce: bytes
    proof: bytes
    """That the sender has the hosts' secret."""


class Welcome(msgspec.Struct, tag="welcome"):
    rendezvous: str
    """host:port where the ranks find each other."""
    defer: bool
    """Leave for `PrepareNow` what can wait."""
    proof: bytes
    """That the first host has the secret too."""


class Refused(msgspec.Struct, tag="refused"):
    message: str
    again: bool
    """It may work in a moment."""


ToGuest = Greeting | Welcome | Refused


@dataclass(frozen=True)
class RingPlace:
    """How a rank on the engine's host hears from it."""

    ring: int
    """File descriptor of the memory that plans come through."""
    ring_bytes: int
    reader: int
    """Which of the ring's readers it is."""
    headers: int
    """File descriptor it is woken by."""
    status: int
    """File descriptor that `FromRank` messages go to."""
    rendezvous: str
    """host:port where the ranks find each other."""
    defer: bool
    """Leave for `PrepareNow` what can wait."""


@dataclass(frozen=True)
class LinkPlace:
    """How a rank on another host hears from the engine: it comes to the address in `ParallelConfig.nodes`."""

    patience: float
    """Seconds to try for."""
    speaks: bool
    """Of the ranks on its host, it is the one that says what it waits for."""
    status: int
    """File descriptor that goes to who started it: a `RankFailed` when it is not let in."""


@dataclass(frozen=True)
class RankBoot:
    """What a rank's process is handed at birth, pickled through its standard input."""

    config: EngineConfig
    rank: int
    """Among all ranks of the engine."""
    local_rank: int
    """Among those on its host: which GPU it takes."""
    place: RingPlace | LinkPlace
    from_main_thread: bool
    """Its parent's main thread starts the process: it may be killed when that thread ends."""
    log_level: int


def _bytes_of(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).tobytes()
    raise NotImplementedError(f"{type(array)} does not travel")


def _array_of(kind: Any, data: Any) -> Any:
    dtype = np.bool_ if "bool" in str(kind) else np.int32
    return np.frombuffer(bytearray(data), dtype)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
_DOWN = msgspec.msgpack.Decoder(ToRank, dec_hook=_array_of)
_UP = msgspec.msgpack.Decoder(FromRank)
_GUEST = msgspec.msgpack.Decoder(ToGuest)
_COME_IN = msgspec.msgpack.Decoder(ComeIn)


def encode(message: ToRank | FromRank | ToGuest | ComeIn) -> bytes:
    return _ENCODER.encode(message)


def decode_down(data: bytes) -> ToRank:
    message: ToRank = _DOWN.decode(data)
    if isinstance(message, RunStep) and (masks := message.plan.masks) is not None:
        masks.words = masks.words.reshape(len(masks.slots), -1)
    return message


def decode_up(data: bytes) -> FromRank:
    message: FromRank = _UP.decode(data)
    return message


def decode_guest(data: bytes) -> ToGuest:
    message: ToGuest = _GUEST.decode(data)
    return message


def decode_come_in(data: bytes) -> ComeIn:
    message: ComeIn = _COME_IN.decode(data)
    return message
