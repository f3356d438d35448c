"""Two hosts on one: network namespaces with a cable between them. What runs in one reaches the other's address only, and no loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.octavo_process import environment

ORPHAN_SECONDS = 10.0
ADDRESSES = ("10.231.0.1", "10.231.0.2")


@dataclass
class Host:
    namespace: str
    address: str
    folder: Path
    processes: list[Program] = field(default_factory=list)

    def octavo(self, name: str, arguments: Sequence[str], **more: str) -> Program:
        """`octavo` with these arguments, here; `more` are environment variables."""
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-m", "octavo", *arguments]
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment(**more))
        program = Program(process, log)
        self.processes.append(program)
        return program


@dataclass
class Program:
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float = 60) -> None:
        """Until its log has the words."""
        deadline = time.monotonic() + seconds
        while words not in self.log:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"{words!r} is not in the log:\n{self.log}"
            time.sleep(0.05)


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Both are gone afterwards; what ran in them has to have ended with its parent. Skips the test where namespaces cannot be made."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    names = [f"octavo-{os.getpid()}-{i}" for i in range(2)]
    hosts = [Host(name, address, folder) for name, address in zip(names, ADDRESSES, strict=True)]
    try:
        made = [_ip("netns", "add", name) for name in names]
        made.append(_ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable0", "netns", names[1]))
        if failed := next((one for one in made if one.returncode != 0), None):
            pytest.skip(f"no network namespaces here: {failed.stderr.strip()}")
        for host in hosts:
            for what in (
                ["addr", "add", f"{host.address}/24", "dev", "cable0"],
                ["link", "set", "lo", "up"],
                ["link", "set", "cable0", "up"],
            ):
                done = _ip("-n", host.namespace, *what)
                assert done.returncode == 0, done.stderr
        yield hosts[0], hosts[1]
        for program in (program for host in hosts for program in host.processes):
            program.process.kill()
            program.process.wait(10)
        deadline = time.monotonic() + ORPHAN_SECONDS
        while orphans := [pid for host in hosts for pid in _ip("netns", "pids", host.namespace).stdout.split()]:
            assert time.monotonic() < deadline, f"processes {orphans} outlive what started them"
            time.sleep(0.1)
    finally:
        for host in hosts:
            for program in host.processes:
                program.process.kill()
                program.process.wait(10)
            _ip("netns", "del", host.namespace)


def unplug(host: Host) -> None:
    """Pull the cable: nothing arrives any more, and nobody is told."""
    assert _ip("-n", host.namespace, "link", "set", "cable0", "down").returncode == 0
