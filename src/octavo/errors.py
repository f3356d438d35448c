"""Every error a user can meet, by whose fault it is. Messages say what was given, what is allowed and what to do.

The HTTP layer maps these to status codes, the CLI prints the message alone and exits non-zero.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_TERMINAL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\^_]|[\x00-\x08\x0b-\x1f\x7f]")


class OctavoError(Exception):
    """Base of everything Octavo raises on purpose."""


class InvalidRequest(OctavoError, ValueError):
    """A request cannot be served as asked (HTTP 400). `param` names the offending field; `code` is machine readable."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFound(OctavoError):
    """The model name matches neither a path, a served name nor a hub repository (HTTP 404 when asked over HTTP)."""


class ConfigError(OctavoError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class CheckpointError(OctavoError):
    """A model file is missing, truncated, corrupt or of the wrong shape. The message names the file and the tensor."""


class UnsupportedModel(OctavoError):
    """The architecture or format is known not to run here."""


class NotYet(OctavoError):
    """Something documented elsewhere that Octavo does not do yet (HTTP 400, with the type NotImplementedError). `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(OctavoError):
    """The bounded queue is full (HTTP 429). `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


NO_MEMORY = (
    "The system gives no more memory for this request. Try again when less is going on, or give the server more memory (ulimit -v, limits of "
    "its container)."
)
"""What a request ends with that the engine finds no room for (HTTP 503)."""


class EngineDead(OctavoError):
    """The engine process is gone and could not be restarted."""


class RequestFailed(OctavoError):
    """One request failed inside the engine (HTTP 500); every other request went on."""


def error_of(kind: str, message: str) -> OctavoError | None:
    """The error that another process raised, by the name of its class; None when that is not one of ours."""
    cls = globals().get(kind)
    return cls(message) if isinstance(cls, type) and issubclass(cls, OctavoError) else None


def debugging(argv: Sequence[str] = ()) -> bool:
    """Whether tracebacks are asked for: OCTAVO_DEBUG, or --debug in a command line."""
    return "--debug" in argv or os.environ.get("OCTAVO_DEBUG", "") not in ("", "0")


def clause(error: Exception | str) -> str:
    """What an error says, or said, to go on with in the same sentence: without its full stop."""
    return str(error).rstrip().removesuffix(".")


def plain_text(message: str) -> str:
    """What another library says, without codes for terminals: it may end in a log, a file or a JSON reply."""
    return _TERMINAL_CODES.sub("", message)
