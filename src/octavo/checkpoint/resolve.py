"""From what a user calls a model to a `Checkpoint` on this machine.

Order: empty = the bundled model; an existing folder or .gguf file; the name of a model in Octavo's own model folder; a hub
repository. Every way to fail ends in one or two sentences that say what was tried and what is possible.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint import bundled, catalog, hub
from octavo.checkpoint.files import is_there
from octavo.checkpoint.local import open_folder, open_gguf
from octavo.checkpoint.types import Checkpoint, Progress
from octavo.errors import CheckpointError, ModelNotFound

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")


def resolve_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    load_format: str = "auto",
    progress: Progress | None = None,
) -> Checkpoint:
    """Find `model`, downloading it if need be, and read its configuration.

    Args:
        model: "" for the bundled model; a folder; a .gguf file; a name `octavo models list` shows; or a hub repository
            `owner/name`, with `:Q4_K_M` behind it to choose one of several GGUF files.
        revision: branch, tag or commit of a hub repository.
        download_dir: cache folder for hub downloads instead of the hub's own.
        token: for private or gated repositories.
        hf_overrides: entries that replace those of config.json.
        load_format: "dummy" fetches and needs no weights; "gguf" or "safetensors" choose when a folder has both.
        progress: told about the download of the bundled model.

    Raises:
        ModelNotFound: nothing of that name here or on the hub.
        CheckpointError: found, but files are missing or malformed.
        UnsupportedModel: found, but of a kind that cannot run.
    """
    name = model.strip()
    if not name:
        return open_gguf(Path(bundled.ensure_bundled_model(progress)), bundled.NAME, hf_overrides)
    path, is_folder, is_file = _look(name)
    if is_folder:
        return open_folder(path.resolve(), name, hf_overrides, load_format)
    if is_file:
        if path.suffix == ".gguf":
            return open_gguf(path.resolve(), name, hf_overrides)
        raise CheckpointError(f"{path} is a file but not a .gguf one. Give the folder of the model, or a GGUF file.")
    if name.lower() == bundled.NAME:
        return open_gguf(Path(bundled.ensure_bundled_model(progress)), name, hf_overrides)
    if (found := catalog.find_local(name)) is not None:
        return open_gguf(found, name, hf_overrides)
    if not _HUB_NAME.fullmatch(name) or path.suffix == ".gguf":
        raise ModelNotFound(f"No model {name!r}: {_what_it_is_not(path, name)}{_did_you_mean(path, name)}")
    try:
        snapshot = hub.fetch(name, revision=revision, cache_dir=download_dir, token=token, load_format=load_format)
    except ModelNotFound as e:
        raise ModelNotFound(f"{e}{_did_you_mean(path, name)}") from None
    return open_gguf(snapshot, name, hf_overrides) if snapshot.is_file() else open_folder(snapshot, name, hf_overrides, load_format)


def tokenizer_source(name: str, *, download_dir: str | None = None, token: str | None = None) -> Path:
    """Where the tokenizer called `name` is: a folder or .gguf file as given, else a hub repository's text files, fetched.

    Raises:
        ModelNotFound: neither here nor on the hub.
    """
    path, is_folder, is_file = _look(name)
    if is_folder or (is_file and path.suffix == ".gguf"):
        return path.resolve()
    if is_file and path.name == "tokenizer.json":
        return path.resolve().parent
    if (found := catalog.find_local(name)) is not None:
        return found
    if not _HUB_NAME.fullmatch(name):
        raise ModelNotFound(f"No tokenizer {name!r}: give a folder with a tokenizer.json, a .gguf file or a hub name.")
    return hub.fetch_text_files(name, revision=None, cache_dir=download_dir, token=token)


def eos_token_ids(checkpoint: Checkpoint, tokenizer_eos: int | None = None) -> tuple[int, ...]:
    """Tokens that end a sequence: generation_config's, else config's, else the tokenizer's. Empty when none says so.

    Raises:
        CheckpointError: eos_token_id is neither an id nor a list of ids, be it in a file that another one outweighs.
    """
    stated: list[list[int]] = []
    in_file = "the GGUF file's metadata (tokenizer.ggml.eos_token_id)" if checkpoint.format == "gguf" else "config.json"
    text_config = checkpoint.hf_config.get("text_config")
    for where, config in (
        ("generation_config.json", checkpoint.generation_config),
        (in_file, checkpoint.hf_config),
        ("config.json's text_config", text_config if isinstance(text_config, dict) else {}),
    ):
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(f"{checkpoint.path}: eos_token_id in {where} must be a token id or a list of them, got {value!r}.")
        if ids:
            stated.append(ids)
    if stated:
        return tuple(dict.fromkeys(stated[0]))
    return () if tokenizer_eos is None else (tokenizer_eos,)


def _look(name: str) -> tuple[Path, bool, bool]:
    """`name` as a path, whether it is a folder, whether it is a file. Names that no path can have are neither.

    Raises:
        CheckpointError: it is there, and neither.
    """
    try:
        path = Path(name).expanduser()
        is_folder = path.is_dir()
        return path, is_folder, not is_folder and is_there(path)
    except PermissionError:
        raise CheckpointError(f"{name} cannot be looked at: no permission.") from None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL character, an unknown ~user
        return Path(), False, False


def _what_it_is_not(path: Path, name: str) -> str:
    if "/" in name or path.suffix == ".gguf":
        return f"there is no such file or folder{'' if path.is_absolute() else f' in {Path.cwd()}'}."
    return "it is no local folder or .gguf file, no known model, and hub names look like owner/name."


def _did_you_mean(path: Path, name: str) -> str:
    """A sentence with the nearest local names, or what can be given, always starting with a space."""
    parent = path.parent
    try:
        beside = [p.name for p in parent.iterdir() if (p.is_dir() or p.suffix == ".gguf") and not p.name.startswith(".")]
    except OSError:
        beside = []
    near = [str(parent / n) for n in difflib.get_close_matches(path.name, beside, n=2, cutoff=0.6)]
    near += difflib.get_close_matches(name.lower(), [entry.name.lower() for entry in catalog.list_models()], n=1, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(dict.fromkeys(near))}?"
    return " Give a model folder, a .gguf file or a hub name; leave it empty for the bundled model."
