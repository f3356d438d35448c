"""The interpreter's own SHA-256 is SHA-256, and does without OpenSSL."""

from __future__ import annotations

import hashlib
import subprocess
import sys

from octavo.config.digest import sha256
from octavo.protocol.boot import child_environment


def test_it_is_sha256() -> None:
    for data in (b"", b"abc", bytes(range(256)) * 99):
        assert sha256(data).hexdigest() == hashlib.sha256(data).hexdigest()
        assert sha256(data).digest() == hashlib.sha256(data).digest()
    assert sha256(memoryview(b"abc")).hexdigest() == sha256(b"abc").hexdigest()


def test_openssl_is_not_loaded() -> None:
    code = "import sys; from octavo.config.digest import sha256; sha256(b''); print('_hashlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, env=child_environment(), check=True).stdout == b"False\n"
