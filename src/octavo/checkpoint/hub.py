"""Models from the Hugging Face hub: which files to fetch, and what its many errors mean in one sentence.

The hub's own client does the transfer, so its cache, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and proxies work as people know them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from octavo.errors import CheckpointError, ConfigError, ModelNotFound

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "*.txt")
"""Configuration, tokenizer and chat templates: everything but weights. Never *.py: code of a checkpoint does not run here."""
_TIMEOUT = 10.0
"""Seconds to wait for the hub's answer before looking into the local cache."""


def fetch(name: str, *, revision: str | None, cache_dir: str | None, token: str | None, load_format: str = "auto") -> Path:
    """Bring a hub model into the local cache.

    Args:
        name: `owner/name`, or `owner/name:VARIANT` for the GGUF file whose name contains VARIANT.

    Returns:
        The snapshot folder, or the .gguf file.

    Raises:
        ModelNotFound: no such repository or revision, no access, or not reachable and not in the cache.
        CheckpointError: the repository holds no file of the kind asked for, or the disk is full.
    """
    repo, _, variant = name.partition(":")
    with _plain_errors(repo, revision):
        files = _list_files(repo, revision, token)
        if files is None:
            snapshot = _from_cache(repo, revision, cache_dir)
            files = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file()]
            gguf = _choose_gguf(repo, files, variant, load_format)
            return snapshot / gguf if gguf else snapshot
        gguf = _choose_gguf(repo, files, variant, load_format)
        weights = [gguf] if gguf else [] if load_format == "dummy" else _safetensors(files) or _torch_files(files)
        snapshot = _download(repo, revision, cache_dir, token, [*weights, *TEXT_FILES])
        return snapshot / gguf if gguf else snapshot


def fetch_text_files(name: str, *, revision: str | None, cache_dir: str | None, token: str | None) -> Path:
    """Bring only the configuration and tokenizer files of a hub repository here. Returns the folder; raises as `fetch` does."""
    with _plain_errors(name, revision):
        if _list_files(name, revision, token) is None:
            return _from_cache(name, revision, cache_dir)
        return _download(name, revision, cache_dir, token, list(TEXT_FILES))


def _list_files(repo: str, revision: str | None, token: str | None) -> list[str] | None:
    """Names in the repository, or None when the hub cannot be reached (or must not be)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # Not list_repo_files: that retries for half a minute on a machine without network.
        info = HfApi(token=token).model_info(repo, revision=revision, timeout=_TIMEOUT)
        return [file.rfilename for file in info.siblings or ()]
    except HfHubHTTPError as e:
        if e.response is not None and e.response.status_code in (401, 403, 404):
            raise
        return None
    except _network_errors():
        return None


def _download(repo: str, revision: str | None, cache_dir: str | None, token: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo, revision=revision, cache_dir=cache_dir, token=token, allow_patterns=patterns))


def _from_cache(repo: str, revision: str | None, cache_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo, revision=revision, cache_dir=cache_dir, local_files_only=True))


def _safetensors(files: list[str]) -> list[str]:
    """The model's weights. Other folders and consolidated files repeat them under other names, at twice the download."""
    own = [f for f in files if f.endswith(".safetensors") and "/" not in f and not f.startswith(("consolidated", "adapter_"))]
    return own + [f for f in files if own and re.fullmatch(r"\d+_Dense/model\.safetensors", f)]


def _torch_files(files: list[str]) -> list[str]:
    """Weights in PyTorch's own format, for a repository that has no others."""
    return [f for f in files if re.fullmatch(r"pytorch_model(-\d+-of-\d+)?\.bin", f)]


def _choose_gguf(repo: str, files: list[str], variant: str, load_format: str) -> str | None:
    """The GGUF file to take, or None when the repository is to be used as safetensors (or only its config)."""
    ggufs = sorted(f for f in files if f.endswith(".gguf") and not f.rsplit("/", 1)[-1].startswith("mmproj"))
    if not variant and load_format != "gguf" and (not ggufs or any(f.endswith(".safetensors") for f in files)):
        return None
    if not variant and load_format == "dummy" and "config.json" in files:
        return None
    matching = [f for f in ggufs if variant.lower() in f.lower()]
    if len(matching) == 1:
        return matching[0]
    shown = ", ".join(f.rsplit("/", 1)[-1] for f in (matching or ggufs)[:12]) or "none"
    if not matching:
        raise CheckpointError(f"Hub model {repo} has no GGUF file matching {variant!r}. It has: {shown}.")
    raise CheckpointError(f"Hub model {repo} has several GGUF files ({shown}). Choose one, as in {repo}:Q4_K_M.")


@contextlib.contextmanager
def _plain_errors(repo: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        yield
    except errors.GatedRepoError:
        raise ModelNotFound(
            f"Hub model {repo} is gated: accept its licence on its hub page, then give a token (--hf-token or HF_TOKEN)."
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(f"Hub model {repo} has no revision {revision!r}. Give a branch, a tag or a commit.") from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"No model {repo!r}: no local folder of that name, and the hub has no such public repository "
            "(a private one needs --hf-token or HF_TOKEN)."
        ) from None
    except errors.LocalEntryNotFoundError:
        raise ModelNotFound(
            f"No model {repo!r}{at}: no local folder of that name, not in the local hub cache, and the hub cannot be reached."
        ) from None
    except errors.HFValidationError:
        raise ModelNotFound(f"No model {repo!r}: no local folder of that name, and hub names look like owner/name.") from None
    except errors.HfHubHTTPError as e:
        status = f"HTTP {e.response.status_code}" if e.response is not None else "an error"
        raise ModelNotFound(f"Hub model {repo}{at} could not be fetched: the hub answered {status}. Try again later.") from None
    except _network_errors() as e:
        if isinstance(e, PermissionError):
            raise ConfigError(f"Hub model {repo} could not be stored: no permission to write {e.filename}.") from None
        if isinstance(e, OSError) and e.errno == 28:
            raise CheckpointError(f"Hub model {repo} could not be stored: the disk is full. Free space or give --download-dir.") from None
        raise ModelNotFound(f"Hub model {repo}{at} could not be fetched: the connection to the hub broke. Try again.") from None


def _network_errors() -> tuple[type[BaseException], ...]:
    """What comes through when there is no connection. The hub client has moved between HTTP libraries (requests, httpx and
    later ones), so the library's base error is taken from the client's own error class."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"))
