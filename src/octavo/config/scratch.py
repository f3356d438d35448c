"""Folders for as long as a process lives, in the system's folder for temporary files: sockets, and what several processes share.

Who makes one holds a lock on a file in it. A process that is killed cannot remove its folders, but its locks go with it: the next
process that makes a folder removes those of its user that nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "octavo-"
_LOCK = "lock"
_SETTLED = 10.0
"""Seconds after which a folder without a holder has none."""
_held: dict[Path, int] = {}
"""Folder -> descriptor of its lock."""


def scratch_folder(parent: str | None = None) -> Path:
    """A new empty folder (but for its lock) that only this user can enter.

    Args:
        parent: where, instead of the system's folder for temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    _remove_abandoned(folder.parent)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _held[folder] = lock
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a folder of this process, if it is still there."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _held.pop(folder, None)) is not None:
        os.close(lock)


@functools.cache
def _remove_abandoned(parent: Path) -> None:
    """Once a process: what others have left."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{PREFIX}*"):
            if _abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _abandoned(folder: Path) -> bool:
    """Whether it has a lock that nobody holds. Without one it is being made, or something else."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if time.time() - found.st_mtime < _SETTLED:
            return False  # its maker may be about to lock it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
