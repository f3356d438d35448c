"""What can be said about a Ray cluster without one; tests/engine/test_ray.py has one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from octavo.errors import ConfigError
from octavo.executor import ray_cluster
from octavo.protocol.boot import child_environment


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed. pip install 'octavo\[ray\]'"):
        ray_cluster.connect("anybody")


@pytest.mark.parametrize(
    ("address", "words"), [("127.0.0.1:1", "no Ray cluster answers there"), ("ray://head:10001", "run octavo on a host of the cluster")]
)
def test_addresses_that_cannot_be(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ray_cluster._knock(address)


def test_a_cluster_that_does_not_let_us_in_is_no_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Failed to connect\nand much more")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"something listens there.*\(Failed to connect\)\. .*RAY_AUTH_MODE=token"):
            ray_cluster.connect("anybody")


@pytest.mark.parametrize(("visible", "given", "index"), [("", ("3",), 3), ("4,5", ("5",), 1), ("", (), 0), ("GPU-a,GPU-b", ("GPU-b",), 1)])
def test_the_gpu_of_the_first_rank(monkeypatch: pytest.MonkeyPatch, visible: str, given: tuple[str, ...], index: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ray_cluster._device_index(given) == index


NICENESS = """
import os, subprocess, sys, threading
from octavo.executor import ray_cluster

wait = threading.Event()
thread = threading.Thread(target=wait.wait)
thread.start()
ray_cluster.take_usual_priority()
child = subprocess.run([sys.executable, "-c", "import os; print(os.nice(0))"], capture_output=True, text=True, check=True)
print(os.nice(0), os.getpriority(os.PRIO_PROCESS, thread.native_id), int(child.stdout))
wait.set()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or os.nice(0) > 0, reason="only root may take a higher priority; Linux has one a thread"
)
@pytest.mark.parametrize(("given", "taken"), [(15, 0), (5, 5)])
def test_what_ray_starts_takes_the_usual_priority(given: int, taken: int) -> None:
    """One that somebody has chosen stays."""
    command = ["nice", "-n", str(given), sys.executable, "-c", NICENESS]
    run = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=60, check=True)
    assert run.stdout.split() == [str(taken)] * 3
