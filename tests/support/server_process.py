"""A whole server as users run it: this process's HTTP, an engine process with the scripted worker, signals and all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]


class ServerProcess:
    """Started at once; `wait_ready` waits until it answers."""

    def __init__(self, engine: dict[str, Any], server: dict[str, Any], log: Path) -> None:
        self.log_path = log
        server = {"host": "127.0.0.1", "port": 0, **server}
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        self._log = log.open("wb")
        command = [sys.executable, "-m", "tests.support.serve_main", json.dumps({"engine": engine, "server": server})]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
        self.url = ""

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            match = re.search(r"Listening on (http[^\s\"]+|unix:[^\s\"]+)", self.log)
            if match:
                self.url = match.group(1)
                transport = httpx.HTTPTransport(uds=self.url.removeprefix("unix:")) if self.url.startswith("unix:") else None
                base = "http://server" if transport else self.url
                self.http = httpx.Client(base_url=base, transport=transport, timeout=30)
                return
            time.sleep(0.02)
        raise AssertionError(f"the server did not start (exit status {self.process.poll()}):\n{self.log}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 20) -> int:
        return self.process.wait(seconds)

    def children(self) -> list[int]:
        """Process ids of the engine (and whatever else it started)."""
        import psutil

        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def metric(self, name: str) -> float:
        match = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.http.get("/metrics").text, re.M)
        assert match, name
        return float(match.group(1))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._log.close()
        if self.url:
            self.http.close()


@contextlib.contextmanager
def server_process(tmp_path: Path, engine: dict[str, Any], **server: Any) -> Iterator[ServerProcess]:
    process = ServerProcess(engine, server, tmp_path / "server.log")
    try:
        yield process
    finally:
        process.close()


def scripted_engine(checkpoint: Path, tmp_path: Path, script: dict[str, Any], **engine: Any) -> dict[str, Any]:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(script))
    return {"model": str(checkpoint), "load_format": "dummy", "device": "cpu", "debug_scripted_model": str(path), "threads": 1, **engine}
