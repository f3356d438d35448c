"""What is fetched from the hub, and what its errors become. The hub's client is replaced: no network."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from octavo.checkpoint import hub
from octavo.errors import CheckpointError, ConfigError, ModelNotFound

SAFETENSORS = ["config.json", "model.safetensors", "tokenizer.json", "modeling.py", "consolidated.safetensors", "onnx/x.safetensors"]
GGUFS = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m.gguf"]


class FakeHub:
    """Stands for HfApi and snapshot_download."""

    def __init__(self, folder: Path) -> None:
        self.files: list[str] | Exception = SAFETENSORS
        self.download: Path | Exception = folder
        self.asked: dict[str, Any] = {}

    def model_info(self, repo: str, **options: Any) -> Any:
        if isinstance(self.files, Exception):
            raise self.files
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.asked = {"repo": repo, **options}
        if isinstance(self.download, Exception):
            raise self.download
        return str(self.download)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def fetch(name: str = "owner/name", load_format: str = "auto", revision: str | None = None) -> Path:
    return hub.fetch(name, revision=revision, cache_dir=None, token=None, load_format=load_format)


def http_error(kind: type[Exception], status: int) -> Exception:
    """An error of the hub's client, whatever its constructor wants in the installed version."""
    error = kind.__new__(kind)
    error.args = ("https://huggingface.co/api/... 404 Client Error (Request ID: x)",)
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


def test_weights_and_text_files_are_fetched_but_never_code(fake: FakeHub, tmp_path: Path) -> None:
    assert fetch(revision="v1") == tmp_path
    assert fake.asked["repo"] == "owner/name"
    assert fake.asked["revision"] == "v1"
    patterns = fake.asked["allow_patterns"]
    assert [p for p in patterns if p.endswith("safetensors")] == ["model.safetensors"]
    assert "*.json" in patterns
    assert not any(p.endswith((".py", ".bin", ".pt")) for p in patterns)


def test_dummy_weights_need_no_download_of_weights(fake: FakeHub) -> None:
    fetch(load_format="dummy")
    assert not any(p.endswith("safetensors") for p in fake.asked["allow_patterns"])


def test_one_gguf_is_chosen_by_variant(fake: FakeHub, tmp_path: Path) -> None:
    fake.files = GGUFS
    assert fetch("owner/name:q4_k_m") == tmp_path / "m-Q4_K_M.gguf"
    assert fake.asked["allow_patterns"][0] == "m-Q4_K_M.gguf"
    fake.files = ["only.gguf"]
    assert fetch() == tmp_path / "only.gguf"


@pytest.mark.parametrize(
    ("name", "load_format", "files", "says"),
    [
        ("owner/name", "auto", GGUFS, r"several GGUF files \(m-Q4_K_M\.gguf, m-Q8_0\.gguf\)\. Choose one, as in owner/name:Q4_K_M"),
        ("owner/name:Q2", "auto", GGUFS, r"no GGUF file matching 'Q2'\. It has: m-Q4_K_M\.gguf"),
        ("owner/name", "gguf", SAFETENSORS, "It has: none"),
    ],
)
def test_a_gguf_that_cannot_be_chosen(fake: FakeHub, name: str, load_format: str, files: list[str], says: str) -> None:
    fake.files = files
    with pytest.raises(CheckpointError, match=says):
        fetch(name, load_format)


@pytest.mark.parametrize("failure", [OSError("no route"), errors.OfflineModeIsEnabled("offline"), http_error(errors.HfHubHTTPError, 503)])
def test_without_a_hub_the_local_cache_serves(fake: FakeHub, tmp_path: Path, failure: Exception) -> None:
    fake.files = failure
    assert fetch() == tmp_path
    assert fake.asked["local_files_only"] is True
    (tmp_path / "m-Q4.gguf").touch()
    assert fetch("owner/name:Q4") == tmp_path / "m-Q4.gguf"
    assert hub.fetch_text_files("owner/name", revision=None, cache_dir=None, token=None) == tmp_path


def test_the_clients_own_network_errors_are_known(fake: FakeHub, tmp_path: Path) -> None:
    transport = next(base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    fake.files = transport("no connection")
    assert fetch() == tmp_path
    assert fake.asked["local_files_only"] is True


@pytest.mark.parametrize(
    ("failure", "status", "says"),
    [
        (errors.RepositoryNotFoundError, 404, "no such public repository.*HF_TOKEN"),
        (errors.GatedRepoError, 403, "gated.*licence.*HF_TOKEN"),
        (errors.RevisionNotFoundError, 404, "no revision 'v9'"),
        (errors.HfHubHTTPError, 403, "the hub answered HTTP 403"),
    ],
)
def test_what_the_hub_refuses(fake: FakeHub, failure: type[Exception], status: int, says: str) -> None:
    fake.files = http_error(failure, status)
    with pytest.raises(ModelNotFound, match=says) as caught:
        fetch(revision="v9")
    assert "http" not in str(caught.value).lower().replace("http 403", "")


@pytest.mark.parametrize(
    ("failure", "error", "says"),
    [
        (errors.LocalEntryNotFoundError("x"), ModelNotFound, "not in the local hub cache, and the hub cannot be reached"),
        (errors.HFValidationError("x"), ModelNotFound, "owner/name"),
        (OSError(errno.ENOSPC, "x"), CheckpointError, "disk is full.*--download-dir"),
        (PermissionError(errno.EACCES, "x", "/cache"), ConfigError, "no permission to write /cache"),
        (ConnectionError("reset"), ModelNotFound, "connection to the hub broke"),
        (http_error(errors.HfHubHTTPError, 500), ModelNotFound, "HTTP 500"),
    ],
)
def test_downloads_that_fail(fake: FakeHub, failure: Exception, error: type[Exception], says: str) -> None:
    fake.download = failure
    with pytest.raises(error, match=says):
        fetch()


def test_text_files_alone(fake: FakeHub, tmp_path: Path) -> None:
    assert hub.fetch_text_files("owner/name", revision=None, cache_dir="/c", token="t") == tmp_path
    assert fake.asked["allow_patterns"] == list(hub.TEXT_FILES)
    assert fake.asked["cache_dir"] == "/c"
