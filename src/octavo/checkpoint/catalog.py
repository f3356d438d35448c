"""The models on this machine, for `octavo models`: the bundled one, .gguf files in Octavo's folder, the hub's cache."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.checkpoint import bundled
from octavo.checkpoint.types import Progress


@dataclass(frozen=True)
class CatalogEntry:
    name: str
    """What to pass as the model."""
    source: Literal["bundled", "local", "hub"]
    path: str
    """Where it is, or will be."""
    size: int
    """Bytes on disk; of the download when it is not here yet."""
    present: bool


def list_models() -> list[CatalogEntry]:
    """Every model that starts without a download, and the bundled one in any case. Never raises, never uses the network."""
    folder = bundled.models_dir()
    entries = [CatalogEntry(bundled.NAME, "bundled", str(folder / bundled.FILE), bundled.SIZE, bundled.is_present())]
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.gguf")):
            if path.name != bundled.FILE:
                entries.append(CatalogEntry(path.stem, "local", str(path), path.stat().st_size, True))
    return entries + _cached_hub_models()


def find_local(name: str) -> Path | None:
    """The file in Octavo's model folder that is called `name` (with or without .gguf, any case), if there is one."""
    wanted = name.lower().removesuffix(".gguf")
    with contextlib.suppress(OSError):
        for path in sorted(bundled.models_dir().glob("*.gguf")):
            if path.stem.lower() == wanted:
                return path
    return None


def pull(name: str, *, revision: str | None = None, token: str | None = None, progress: Progress | None = None) -> str:
    """Bring a model here without starting it: "" or the bundled model's name, or a hub repository. Returns its path.

    Raises:
        ModelNotFound, CheckpointError, UnsupportedModel: as `resolve_checkpoint` does.
    """
    from octavo.checkpoint.resolve import resolve_checkpoint  # resolve uses this module to find names

    return resolve_checkpoint(name, revision=revision, token=token, progress=progress).path


def _cached_hub_models() -> list[CatalogEntry]:
    """What the hub's cache holds, told by its layout: models--owner--name/snapshots/<commit>/ with links into blobs/."""
    from huggingface_hub.constants import HF_HUB_CACHE

    entries = []
    with contextlib.suppress(OSError):
        for repo in sorted(Path(HF_HUB_CACHE).glob("models--*")):
            snapshots = sorted((repo / "snapshots").glob("*"), key=lambda p: p.stat().st_mtime)
            usable = [s for s in snapshots if (s / "config.json").is_file() or any(s.rglob("*.gguf"))]
            if usable:
                size = sum(p.stat().st_size for p in usable[-1].rglob("*") if p.is_file())
                name = repo.name.removeprefix("models--").replace("--", "/", 1)
                entries.append(CatalogEntry(name, "hub", str(usable[-1]), size, True))
    return entries
