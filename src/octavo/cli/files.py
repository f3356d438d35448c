"""What the batch commands ask of an output file before they spend minutes on loading a model."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from octavo.errors import ConfigError


def check_output(output: Path, source: Path) -> None:
    """Refuse an output file that would destroy the input, or cannot be written.

    Raises:
        ConfigError: it is the input itself, a folder, or in a folder that does not exist or is closed to us.
    """
    if output.exists() and source.exists() and output.samefile(source):
        raise ConfigError(f"{output} is the input: writing there would destroy it. Name another output file.")
    created = not output.exists()
    try:
        output.open("a").close()
    except OSError as e:
        raise ConfigError(f"{output}: {e.strerror or e}.") from None
    if created:
        output.unlink()


@contextlib.contextmanager
def claim_output(output: Path) -> Iterator[None]:
    """Make `output` ours alone while the context lasts, so that no two commands do the same work and mix their lines.

    The kernel lets go of it if we die. A file that was made for this and got nothing is removed again.

    Raises:
        ConfigError: another command has it, or it cannot be opened.
    """
    created = not output.exists()
    try:
        file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as e:
        raise ConfigError(f"{output}: {e.strerror or e}.") from None
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):  # /dev/null is anybody's
            _lock(file, output)
        yield
    finally:
        with contextlib.suppress(OSError):
            if created and output.stat().st_size == 0:
                output.unlink()
        os.close(file)


def _lock(file: int, output: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"Another octavo command is writing {output}. Wait for it, or name another output file.") from None
    except OSError:
        return  # a filesystem without locks
