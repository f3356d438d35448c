"""The messages between an executor and the ranks in other processes, and their bytes.

Down go step plans, which are diffs already; up come a report at the end of loading, and failures. Arrays travel as their bytes.
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


FromRank = RankReady | RankFailed


@dataclass(frozen=True)
class RankBoot:
    """What a rank's process is handed at birth, pickled through its standard input."""

    config: EngineConfig
    rank: int
    """Among all ranks of the engine."""
    local_rank: int
    """Among those on its host: which GPU it takes."""
    rendezvous: str
    """tcp://host:port where the ranks find each other."""
    ring: int
    """File descriptor of the memory that plans come through."""
    ring_bytes: int
    reader: int
    """Which of the ring's readers it is."""
    headers: int
    """File descriptor it is woken by."""
    status: int
    """File descriptor that `FromRank` messages go to."""
    defer: bool
    """Leave for `PrepareNow` what can wait."""
    from_main_thread: bool
    """The engine's main thread starts the process: it may be killed when that thread ends."""
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


def encode(message: ToRank | FromRank) -> bytes:
    return _ENCODER.encode(message)


def decode_down(data: bytes) -> ToRank:
    message: ToRank = _DOWN.decode(data)
    if isinstance(message, RunStep) and (masks := message.plan.masks) is not None:
        masks.words = masks.words.reshape(len(masks.slots), -1)
    return message


def decode_up(data: bytes) -> FromRank:
    message: FromRank = _UP.decode(data)
    return message
