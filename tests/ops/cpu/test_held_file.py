"""Bytes of a file that stay what they are: shared while they can be, a copy once somebody changes the file, and never SIGBUS."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.ops.cpu.held_file import Region, hold
from tests.support.leases import leases_work

SIZE = 300_000
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT.tobytes())
    return path


def kind_of(region: Region) -> str:
    """What the system says of its memory: the name of the mapped file, or nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *rest = line.split(maxsplit=5)
        if int(span.split("-")[0], 16) <= region.address < int(span.split("-")[1], 16):
            assert "w" not in rights
            return rest[3].strip() if len(rest) > 3 else ""
    raise AssertionError("not mapped")


def watchers() -> int:
    gc.collect()
    return sum(thread.name == "packed weights" for thread in threading.enumerate())


def falls_to(count: Callable[[], int], most: int) -> None:
    """Threads of tests before this one may still be ending: there can only be fewer."""
    for _ in range(1000):
        if count() <= most:
            return
        time.sleep(0.01)
    raise AssertionError(f"{count()} instead of {most}")


CHANGES = {
    "truncate": "import os, sys; os.truncate(sys.argv[1], 100)",
    "write over": "import sys; open(sys.argv[1], 'r+b').write(bytes(200_000))",
    "empty": "import sys; open(sys.argv[1], 'wb')",
    "remove": "import os, sys; os.unlink(sys.argv[1])",
    "replace": "import os, sys; open(sys.argv[1] + '.new', 'wb').write(b'other'); os.replace(sys.argv[1] + '.new', sys.argv[1])",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("drafted", [False, True])
def test_another_process_changes_the_file(path: Path, change: str, drafted: bool) -> None:
    if not leases_work(path.parent):
        pytest.skip("this file system has no leases")
    before = watchers()
    if drafted:  # as the process that wrote it has it
        handle = os.open(path, os.O_RDWR)
        draft = Region.draft(handle, SIZE + 100_000)
        os.close(handle)
        region = hold(str(path), SIZE, draft)
        assert region is draft
    else:
        region = hold(str(path), SIZE)
    other = hold(str(path), SIZE)
    assert kind_of(region) == kind_of(other) == str(path), "shared"
    array = region.array()[:SIZE]
    subprocess.run([sys.executable, "-c", CHANGES[change], path], check=True, timeout=60)
    assert np.array_equal(array, CONTENT) and np.array_equal(other.array(), CONTENT)
    in_place = change in ("truncate", "write over", "empty")
    assert (kind_of(region) == "") == in_place
    del region, other
    if drafted:
        del draft
    assert np.array_equal(array, CONTENT), "an array keeps its pages"
    del array
    falls_to(watchers, before)


def test_what_cannot_be_leased_is_private_from_the_start(path: Path) -> None:
    """As another user's file, a file system without leases, or a file that somebody is writing."""
    with path.open("r+b") as writer:
        region = hold(str(path), SIZE)
        assert kind_of(region) == ""
        writer.write(bytes(SIZE))
        writer.truncate(10)
        writer.flush()
        assert np.array_equal(region.array(), CONTENT)


def test_readers_see_no_moment_without_the_bytes(path: Path) -> None:
    """Threads read all the time, while the mapped file gives way to the copy."""
    region = hold(str(path), SIZE)
    array, wrong, done = region.array(), [], threading.Event()

    def read() -> None:
        while not done.is_set():
            if not np.array_equal(array, CONTENT):
                wrong.append(True)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    os.truncate(path, 5)
    time.sleep(0.05)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, SIZE + 100_000])
def test_another_size_than_it_should_have(path: Path, size: int) -> None:
    before, handles = watchers(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="not as long"):
        hold(str(path), size)
    with path.open("r+b"), pytest.raises(ValueError, match="not as long"):
        hold(str(path), size)
    falls_to(watchers, before)
    falls_to(lambda: len(os.listdir("/proc/self/fd")), handles)


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hold(str(path) + "x", SIZE)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A pipe that nobody writes into would hold its reader for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in (tmp_path / "pipe", tmp_path / "link", tmp_path, "/dev/zero"):
        with pytest.raises(ValueError, match="no regular file"):
            hold(str(name), SIZE)


LATE = """
import logging, sys
from octavo.ops.cpu import held_file

logging.basicConfig()
path, change, expected = sys.argv[1], int(sys.argv[2]), open(sys.argv[1], "rb").read()
region = held_file.hold(path, len(expected))
handle = held_file.os.open(path, held_file.os.O_RDONLY)  # without a lease: as if the kernel had taken it away
if change:
    with open(path + ".late", "wb") as file:
        file.write(expected)
    handle = held_file.os.open(path + ".late", held_file.os.O_RDONLY)
before = held_file._state(handle)
if change:
    with open(path + ".late", "r+b") as file:
        if change == 1:
            file.write(bytes(100_000))
        else:
            file.truncate(1000)
if sys.argv[3] == "later":  # nothing could be seen yet when it looked
    before = held_file._state(handle)
held_file._let_go(region, handle, len(expected), before, lambda found: bytes(found) == expected)
assert bytes(region.array()) == expected
print("goes on")
"""


@pytest.mark.parametrize("seen", ["at once", "later"])
@pytest.mark.parametrize("change", ["nothing", "written over", "cut short"])
def test_who_comes_too_late_for_a_copy_does_not_go_on_with_damaged_bytes(path: Path, change: str, seen: str) -> None:
    number = ["nothing", "written over", "cut short"].index(change)
    ended = subprocess.run(
        [sys.executable, "-c", LATE, str(path), str(number), seen], capture_output=True, text=True, timeout=60, check=False
    )
    if change == "nothing":
        assert ended.stdout == "goes on\n", ended.stderr
    else:
        assert (ended.returncode, ended.stdout) == (1, "")
        assert f"{path}.late was changed" in ended.stderr and "the process ends" in ended.stderr
