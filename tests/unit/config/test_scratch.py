"""Folders of a process that was killed are removed by the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.config import scratch
from octavo.config.scratch import remove_scratch, scratch_folder

MAKE = "import sys; from octavo.config.scratch import scratch_folder; print(scratch_folder(sys.argv[1]), flush=True); sys.stdin.read()"


def someone(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    maker = subprocess.Popen([sys.executable, "-c", MAKE, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    return maker, Path(maker.stdout.readline().strip())


@pytest.fixture(autouse=True)
def first_of_its_process() -> None:
    scratch._remove_abandoned.cache_clear()


def grown_old(folder: Path) -> None:
    os.utime(folder, (time.time() - 60,) * 2)


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    (killed, left), (alive, held) = someone(tmp_path), someone(tmp_path)
    (left / "responses.db").write_text("private")
    other = tmp_path / "octavo-without-a-lock"
    other.mkdir()
    killed.kill()
    killed.wait()
    for folder in (left, held, other):
        grown_old(folder)
    mine = scratch_folder(str(tmp_path))
    assert not left.exists()
    assert held.exists()
    assert other.exists()
    assert mine.stat().st_mode & 0o077 == 0
    alive.communicate("")
    remove_scratch(mine)
    assert not mine.exists()
    remove_scratch(mine)


def test_a_folder_that_may_still_be_locked_by_its_maker_stays(tmp_path: Path) -> None:
    fresh = tmp_path / "octavo-fresh"
    fresh.mkdir()
    (fresh / "lock").touch()
    remove_scratch(scratch_folder(str(tmp_path)))
    assert fresh.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "lock").touch()
    grown_old(target)
    (tmp_path / "octavo-link").symlink_to(target)
    remove_scratch(scratch_folder(str(tmp_path)))
    assert (target / "lock").exists()
