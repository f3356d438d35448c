"""`Checkpoint`: a model found on this machine, with its configuration read. Plain data; `resolve.py` makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total) while something long goes on; total is 0 while it is unknown."""


@dataclass(frozen=True)
class Checkpoint:
    """A model on local disk. Nothing but the configuration has been read yet."""

    path: str
    """Folder with config.json, or the .gguf file itself."""
    name: str
    """What the user called it."""
    format: Literal["safetensors", "gguf", "config"]
    """How the weights are stored; "config" when there are none that can be read (dummy weights only)."""
    hf_config: dict[str, Any]
    """config.json, or its equivalent made from GGUF metadata, with the user's overrides applied."""
    generation_config: dict[str, Any]
    """generation_config.json (default sampling parameters, EOS ids); empty when there is none."""
    weight_files: tuple[str, ...]
    """Absolute paths, in the order to read them."""
    gguf_metadata: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """All metadata of a GGUF file (it holds the vocabulary too), so that the header is parsed once."""

    @property
    def folder(self) -> Path:
        """Where the files beside the weights (tokenizer, templates) are."""
        path = Path(self.path)
        return path.parent if self.format == "gguf" else path
