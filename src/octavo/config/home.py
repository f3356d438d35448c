"""Where Octavo keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def octavo_home() -> Path:
    """$OCTAVO_HOME, else ~/.cache/octavo."""
    home = os.environ.get("OCTAVO_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "octavo"


def packed_dir() -> Path:
    """Where weights are kept as the compiled CPU kernels read them."""
    return octavo_home() / "packed"
