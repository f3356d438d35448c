"""SHA-256 without OpenSSL, which `hashlib` loads: 3.4 MiB of resident memory for an engine process that needs nothing else of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final, Protocol, cast


class Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...


def _interpreters_own() -> Callable[[bytes], Digest]:
    for name in ("_sha2", "_sha256"):  # from Python 3.12 on, and before
        try:
            return cast("Callable[[bytes], Digest]", importlib.import_module(name).sha256)
        except (ImportError, AttributeError):
            continue
    return cast("Callable[[bytes], Digest]", importlib.import_module("hashlib").sha256)


sha256: Final = _interpreters_own()
