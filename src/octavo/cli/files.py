"""What the batch commands ask of an output file before they spend minutes on loading a model."""

from __future__ import annotations

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
