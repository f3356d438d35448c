"""From names to checkpoints."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import bundled, catalog, hub
from octavo.checkpoint.resolve import eos_token_ids, resolve_checkpoint, tokenizer_source
from octavo.checkpoint.types import Checkpoint
from octavo.errors import CheckpointError, ModelNotFound
from tests.unit.checkpoint.gguf_writer import write_gguf
from tests.unit.checkpoint.test_local import model_folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, **_: Any) -> Path:
        raise ModelNotFound(f"No model {name!r} on the hub.")

    monkeypatch.setattr(hub, "fetch", unreachable)
    monkeypatch.setattr(hub, "fetch_text_files", unreachable)


def test_folder_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "m")
    file = write_gguf(tmp_path / "x.gguf")
    assert resolve_checkpoint(str(folder)).path == str(folder)
    assert resolve_checkpoint(f" {file} ").path == str(file)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("m").path == str(folder)
    assert resolve_checkpoint("./m", hf_overrides={"hidden_size": 1}).hf_config["hidden_size"] == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint = resolve_checkpoint("~/x.gguf")
    assert (checkpoint.path, checkpoint.name) == (str(file), "~/x.gguf")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"not a .gguf one"):
        resolve_checkpoint(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(("name", "shown"), [("", "smollm2-135m-instruct"), ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct")])
def test_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shown: str) -> None:
    path = write_gguf(tmp_path / "bundled.gguf")
    monkeypatch.setattr(bundled, "ensure_bundled_model", lambda progress: str(path))
    checkpoint = resolve_checkpoint(name)
    assert (checkpoint.path, checkpoint.name, checkpoint.format) == (str(path), shown, "gguf")


def test_files_in_the_model_folder_by_name(no_hub: None) -> None:
    bundled.models_dir().mkdir(parents=True)
    path = write_gguf(bundled.models_dir() / "Tiny-Llama.Q4.gguf")
    assert resolve_checkpoint("tiny-llama.q4").path == resolve_checkpoint("Tiny-Llama.Q4.gguf").path == str(path)
    with pytest.raises(ModelNotFound, match=r"Did you mean tiny-llama\.q4\?"):
        resolve_checkpoint("tinyllama.q4")


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "no local folder or .gguf file, no known model, and hub names look like owner/name"),
        ("/no/such/folder", "no such file or folder. Give a model folder"),
        ("a/b/c", "no such file or folder in "),
        ("gone.gguf", "no such file or folder in "),
        ("a" * 5000, "no known model"),
        ("a\0b", "no known model"),
        ("~nobody-of-that-name/x", "no such file or folder"),
        ("owner/name", "on the hub. Give a model folder"),
        ("smollm2-135m-instuct", r"Did you mean smollm2-135m-instruct\?"),
    ],
)
def test_what_is_not_found_is_one_sentence_and_what_to_do(name: str, says: str) -> None:
    with pytest.raises(ModelNotFound, match=says) as caught:
        resolve_checkpoint(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_hub")
def test_near_misses_among_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "llama-3-8b")
    with pytest.raises(ModelNotFound, match=f"Did you mean {tmp_path}/llama-3-8b\\?"):
        resolve_checkpoint(str(tmp_path / "llama3-8b"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"Did you mean llama-3-8b\?"):
        resolve_checkpoint("lama-3-8b")


def test_hub_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> Path:
        asked.update(options, name=name)
        return write_gguf(tmp_path / "q.gguf") if ":" in name else model_folder(tmp_path / "snapshot")

    monkeypatch.setattr(hub, "fetch", fetch)
    checkpoint = resolve_checkpoint("owner/name", revision="v1", download_dir="/d", token="t", load_format="dummy")
    assert (checkpoint.name, checkpoint.path, checkpoint.format) == ("owner/name", str(tmp_path / "snapshot"), "config")
    assert asked == {"name": "owner/name", "revision": "v1", "cache_dir": "/d", "token": "t", "load_format": "dummy"}
    assert resolve_checkpoint("owner/name:Q4_K_M").format == "gguf"


def checkpoint_with(generation: dict[str, Any], config: dict[str, Any]) -> Checkpoint:
    return Checkpoint("/m", "m", "config", config, generation, ())


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ids"),
    [
        ({"eos_token_id": [2, 7, 2]}, {"eos_token_id": 1}, 9, (2, 7)),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, 9, (0,)),
        ({"eos_token_id": None}, {"eos_token_id": 1}, 9, (1,)),
        ({"eos_token_id": []}, {"eos_token_id": 1}, 9, (1,)),
        ({}, {"text_config": {"eos_token_id": [3]}}, 9, (3,)),
        ({}, {"text_config": "odd"}, 9, (9,)),
        ({}, {}, None, ()),
    ],
)
def test_eos_token_ids(generation: dict[str, Any], config: dict[str, Any], tokenizer: int | None, ids: tuple[int, ...]) -> None:
    assert eos_token_ids(checkpoint_with(generation, config), tokenizer) == ids


@pytest.mark.parametrize("value", ["2", -1, [1, "x"], True, 1.5])
def test_eos_that_is_no_id(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"eos_token_id in generation_config\.json must be a token id"):
        eos_token_ids(checkpoint_with({"eos_token_id": value}, {}))


@pytest.mark.usefixtures("no_hub")
def test_tokenizer_sources(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf")
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_source(str(tmp_path)) == tokenizer_source(str(tmp_path / "tokenizer.json")) == tmp_path
    assert tokenizer_source(str(file)) == file
    for name in ("nothing", "owner/name"):
        with pytest.raises(ModelNotFound):
            tokenizer_source(name)


def test_catalog(tmp_path: Path) -> None:
    assert [(e.name, e.source, e.present) for e in catalog.list_models()] == [("smollm2-135m-instruct", "bundled", False)]
    bundled.models_dir().mkdir(parents=True)
    local = write_gguf(bundled.models_dir() / "mine.gguf")
    snapshot = tmp_path / "hub-cache" / "models--owner--some--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub-cache" / "models--owner--empty" / "snapshots" / "abc").mkdir(parents=True)
    blob = tmp_path / "blob"
    blob.write_bytes(b"{}")
    os.symlink(blob, snapshot / "config.json")
    entries = {e.name: e for e in catalog.list_models()}
    assert set(entries) == {"smollm2-135m-instruct", "mine", "owner/some--name"}
    assert (entries["mine"].path, entries["mine"].size) == (str(local), local.stat().st_size)
    assert (entries["owner/some--name"].path, entries["owner/some--name"].size) == (str(snapshot), 2)


def test_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch", lambda name, **_: model_folder(tmp_path / "snapshot"))
    assert catalog.pull("owner/name") == str(tmp_path / "snapshot")


@pytest.mark.parametrize("value", ["x", -1, 1.5, [2, "x"]])
def test_an_eos_that_is_none_is_said_even_where_another_file_outweighs_it(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"eos_token_id in config\.json must be a token id"):
        eos_token_ids(checkpoint_with({"eos_token_id": 2}, {"eos_token_id": value}))
    in_gguf = dataclasses.replace(checkpoint_with({}, {"eos_token_id": value}), format="gguf")
    with pytest.raises(CheckpointError, match=r"eos_token_id in the GGUF file's metadata \(tokenizer\.ggml\.eos_token_id\) must be"):
        eos_token_ids(in_gguf)
