"""`octavo deploy` in a Ray cluster on this machine: one address, requests to where their prompt is cached, updates and losses without
failed requests, and more replicas where there is more work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.scripts import scripted_args, token_ids

pytest.importorskip("ray.serve", reason="needs ray[serve]")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SLOW = {"prompt_contains_ids": token_ids("slow"), "tokens": token_ids("abcde"), "cycle": True, "delay_ms": 20}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Cluster:
    """A Ray cluster, and `octavo deploy` in it as a user calls it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(self, *flags: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "RAY_ADDRESS": self.address}
        command = [sys.executable, "-m", "octavo", "deploy", *flags, "--host", "127.0.0.1", "--port", str(self.port), "--proxies", "head"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node, with room for three replicas of one core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        patch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        node = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
        try:
            yield Cluster(node.address)
        finally:
            node.shutdown()


def flags(folder: Path, says: str) -> list[str]:
    """Of a fleet whose model says that."""
    args = scripted_args(folder, default=says, rules=[SLOW])
    return [
        args.model, "--load-format", "dummy", "--device", "cpu", "--debug-scripted-model", str(args.debug_scripted_model),
        "--served-model-name", "tiny", "--max-num-seqs", "8",
    ]  # fmt: skip


def complete(client: httpx.Client, prompt: str, **more: Any) -> str:
    reply = client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0, **more})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def samples(client: httpx.Client, name: str) -> dict[str, float]:
    """Replica -> value of a metric."""
    found = re.findall(rf'^{re.escape(name)}{{replica="(\w+)"[^}}]*}} (\S+)$', client.get("/metrics").text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def engines() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "octavo.frontend.engine_process" in process.cmdline() or "octavo.engine.process" in process.cmdline():
                found.append(process)
    return found


def test_a_fleet_from_its_start_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    started = cluster.deploy(*flags(tmp_path / "one", "one"), "--min-replicas", "2", "--drain-timeout", "10")
    assert started.returncode == 0, started.stderr
    assert f"2 replicas at {cluster.url}" in started.stdout
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        assert complete(client, "hi") == "one"
