"""Whether a file system has leases."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def leases_work(folder: Path) -> bool:
    probe = folder / "lease.probe"
    probe.touch()
    handle = os.open(probe, os.O_RDONLY)
    try:
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    finally:
        os.close(handle)
        probe.unlink()
    return True
