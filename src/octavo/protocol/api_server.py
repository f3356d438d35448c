"""Messages between the main process and its API servers, when there are several (`--api-server-count`).

The main process owns the engine's client: requests come to it from all API servers, under ids that it makes unique, and tokens go
back to the one that asked. An API server can also put a question to all others (what have you counted, is this request yours).
"""

from __future__ import annotations

import msgspec

from octavo.protocol.engine import (
    AbortRequests,
    EngineReady,
    EngineStats,
    NewRequest,
    Ping,
    Pong,
    ReleaseHeld,
    ResetPrefixCache,
    StepOutputs,
    Vocabulary,
)


class EngineNews(msgspec.Struct, tag="engine"):
    """How the engine is. Sent when that changes, and often enough to know that steps are finished."""

    state: str
    restarts: int
    pid: int | None
    stats: EngineStats
    death: str = ""
    """Why there is no engine and there will be none."""


class RequestEnded(msgspec.Struct, tag="ended"):
    """The request ends here with an error; `kind` is the class name of the OctavoError."""

    request_id: str
    message: str
    kind: str


class CallFailed(msgspec.Struct, tag="call_failed"):
    """Instead of a `Pong`."""

    call_id: int
    message: str


class Question(msgspec.Struct, tag="question"):
    """Asked by one API server, put to all others. With `own`, its own answer, the last answer of each is kept for when it has ended."""

    call_id: int
    topic: str
    body: bytes = b""
    own: bytes = b""


class Answer(msgspec.Struct, tag="answer"):
    """One API server's answer to `Question` number `call_id` of the main process."""

    call_id: int
    body: bytes


class Answers(msgspec.Struct, tag="answers"):
    """To the one that asked."""

    call_id: int
    living: list[bytes]
    """Of the other API servers; the last one known of a server that did not answer in time."""
    gone: list[bytes]
    """The last ones of API servers that have ended."""


class Drain(msgspec.Struct, tag="drain"):
    """Take no more connections, let requests finish for the configured time, then end. The second one: end now."""


class Serving(msgspec.Struct, tag="serving"):
    """This API server answers requests."""


class CannotServe(msgspec.Struct, tag="cannot_serve"):
    message: str
    kind: str = ""


ToApiServer = EngineReady | EngineNews | StepOutputs | RequestEnded | Pong | CallFailed | Question | Answers | Drain
FromApiServer = NewRequest | Vocabulary | AbortRequests | ReleaseHeld | Ping | ResetPrefixCache | Question | Answer | Serving | CannotServe
