"""What the files of a model looked like when the server started.

An engine that crashes is started again and reads them again. The tokenizer, the templates and the tokens already delivered are those of
the first read: other weights would go on with them and answer nonsense, so a model whose files have changed is not loaded again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from octavo.config.types import EngineConfig

_Status = tuple[int, int, int, int]

_LOADED = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")
"""Endings of what an engine reads from a model's folder."""


@dataclass(frozen=True)
class ModelFiles:
    """Paths, with size, time and inode: to be compared, at no cost whatever the files' size."""

    seen: dict[str, _Status]

    @classmethod
    def of(cls, config: EngineConfig) -> ModelFiles:
        """Those that are there now."""
        path, pooling = config.model.path, config.model.pooling
        paths = [path] if os.path.isfile(path) else []
        if os.path.isdir(path):
            paths = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(_LOADED)]
        if pooling is not None:
            paths += [layer.file for layer in pooling.dense]
        return cls({path: status for path in paths if (status := _status(path)) is not None})

    def changed(self) -> str | None:
        """What has happened to the first one that is no longer what it was, for people."""
        for path, before in self.seen.items():
            if (now := _status(path)) != before:
                return f"{path} was {'removed' if now is None else 'changed'} while the server ran"
        return None


def _status(path: str) -> _Status | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino
