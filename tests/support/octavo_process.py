"""`octavo serve` as users run it, over a tiny checkpoint and a script in place of a model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with the source tree importable and no keys from outside."""
    kept = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    return {**kept, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'compat' / 'src'}", **more}


def write_script(path: Path, folder: Path, answer: str, *, delay_ms: float = 0.0) -> Path:
    """A script for --debug-scripted-model that answers everything with a text. `folder` is the checkpoint."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(answer, add_special_tokens=False).ids
    path.write_text(json.dumps({"default": ids, "step_delay_ms": delay_ms}))
    return path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that answers /health. Stopped with SIGTERM, and gone, afterwards."""
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", *command, "--port", str(port)], env=environment(), stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            if _answers(port):
                break
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        finally:
            process.kill()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
