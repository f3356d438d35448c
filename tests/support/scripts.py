"""Engines whose words are written in a script: a tiny checkpoint without weights, the real core, the scripted worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.config.args import EngineArgs
from tests.support.tiny_checkpoint import write_tiny_checkpoint


def token_ids(text: str) -> list[int]:
    """`text` in the tiny checkpoint's byte tokens (no merges): one token a byte."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [3 + alphabet.index(char) for piece, _ in pieces for char in piece]


def scripted_args(
    folder: Path, *, default: str | list[int] = "Hello", rules: list[dict[str, Any]] | None = None, **settings: Any
) -> EngineArgs:
    """`EngineArgs` of an engine that says `default` (text, or ids) unless one of the rules matches.

    `script` in settings adds top-level fields of the script (fail, step_delay_ms).
    """
    write_tiny_checkpoint(folder / "model")
    script = {"default": token_ids(default) if isinstance(default, str) else default, "rules": rules or [], **settings.pop("script", {})}
    (folder / "script.json").write_text(json.dumps(script))
    return EngineArgs(
        model=str(folder / "model"),
        load_format="dummy",
        device="cpu",
        debug_scripted_model=str(folder / "script.json"),
        **settings,
    )
