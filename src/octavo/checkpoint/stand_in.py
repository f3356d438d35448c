"""What lies in the place of a file that is not there: a pointer of Git LFS, a web page, nothing."""

from __future__ import annotations

import os
from pathlib import Path

_POINTER = b"version https://git-lfs."


def stand_in(path: str | Path) -> str | None:
    """A sentence that says what the file is and what to do; None: it is none of these."""
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            begin = file.read(512)
    except OSError:
        return None
    if not begin:
        return f"{path} is empty. Download it again."
    if begin.startswith(_POINTER):
        return f"{path} is a pointer of Git LFS, not the file itself. Fetch it with git lfs pull, or download it."
    if begin.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html")):
        return f"{path} is a web page, not the file itself: a server answered so when it was downloaded. Download it again."
    return None
