"""The one door to the files of a model: weights, configuration, tokenizer.

Whoever opens one asks here first. What bears a file's name need not be a file: a named pipe would be waited for without end, a folder or a
link to nothing fails somewhere inside a library. All of that is a `CheckpointError` that says what is there.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from octavo.checkpoint.stand_in import stand_in
from octavo.errors import CheckpointError

_MAX_JSON_BYTES: Final = 64 << 20
_MAX_NESTING: Final = 100
"""Far more than any file has, and few enough for all that walks through them later."""
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_there(path: str | Path) -> bool:
    """Whether there is a regular file at `path`, or a link to one.

    Raises:
        CheckpointError: something else bears the name, or it cannot be looked at.
    """
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        raise CheckpointError(f"{path} cannot be looked at: no permission.") from None
    except OSError as e:
        if not os.path.islink(path):
            return False
        if e.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a link that leads back to itself. Put the file itself there.") from None
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, which does not exist. Mend the link, or put the file there."
        ) from None
    if stat.S_ISREG(mode):
        return True
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise CheckpointError(f"{path} is {kind}, not a regular file. Put the file itself there.")


def require_file(path: str | Path) -> None:
    """Check that a file can be opened without waiting for anybody.

    Raises:
        CheckpointError: there is none at `path`, or something else.
    """
    if not is_there(path):
        raise CheckpointError(f"{path} cannot be read: No such file or directory.")


def read_text(path: Path) -> str:
    """The text in `path`.

    Raises:
        CheckpointError: unreadable, or no UTF-8.
    """
    require_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not a text file in UTF-8.") from None


def read_json(path: Path) -> Any:
    """The JSON value in `path`.

    Raises:
        CheckpointError: unreadable, not JSON, or nested as no such file is.
    """
    require_file(path)
    try:
        if (size := path.stat().st_size) > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, too many for a configuration file.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}.") from None
    except json.JSONDecodeError as e:
        if (what := stand_in(path)) is not None:
            raise CheckpointError(what) from None
        raise CheckpointError(f"{path} is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not valid JSON text.") from None
    except RecursionError:
        raise CheckpointError(_too_deep(path)) from None
    except ValueError:  # Python turns no more than some thousand digits into a number
        raise CheckpointError(f"{path} is not valid JSON: it holds a number of too many digits.") from None
    if nests_deeper(value, _MAX_NESTING):
        raise CheckpointError(_too_deep(path))
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: unreadable, not JSON, or not an object.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def nests_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects lie inside each other to more than so many levels."""
    inside = [value]
    for _ in range(levels):
        inside = [
            part
            for outer in inside
            if isinstance(outer, (dict, list))
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, (dict, list))
        ]
        if not inside:
            return False
    return True


def _too_deep(path: Path) -> str:
    return f"{path} is not valid JSON text of a model: it is nested too deeply."
