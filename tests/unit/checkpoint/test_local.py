"""Folders and files on local disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint.local import apply_overrides, open_folder, open_gguf, require_weights, safetensors_files
from octavo.checkpoint.types import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModel
from tests.unit.checkpoint.gguf_writer import write_gguf

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}


def model_folder(path: Path, config: Any = LLAMA, files: tuple[str, ...] = ("model.safetensors",)) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in files:
        (path / name).touch()
    return path


def open_it(path: Path, overrides: dict[str, Any] | None = None, load_format: str = "auto") -> Checkpoint:
    return open_folder(path, "m", overrides, load_format)


def test_safetensors_folder(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    checkpoint = open_it(tmp_path)
    assert checkpoint.format == "safetensors"
    assert checkpoint.weight_files == (str(tmp_path / "model.safetensors"),)
    assert checkpoint.hf_config == LLAMA
    assert checkpoint.generation_config == {"temperature": 0.6}
    assert checkpoint.folder == tmp_path
    require_weights(checkpoint)


def test_config_alone_serves_dummy_weights(tmp_path: Path) -> None:
    checkpoint = open_it(model_folder(tmp_path, files=()))
    assert (checkpoint.format, checkpoint.weight_files) == ("config", ())
    with pytest.raises(CheckpointError, match=r"no weights.*pytorch_model\.bin.*--load-format dummy"):
        require_weights(checkpoint)
    (tmp_path / "model.safetensors").touch()
    assert open_it(tmp_path, load_format="dummy").format == "config"


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pickled.*run code.*safetensors"):
        require_weights(open_it(model_folder(tmp_path, files=("pytorch_model.bin",))))


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_weights_are_those_of_the_index(tmp_path: Path) -> None:
    model_folder(tmp_path, files=("b.safetensors", "a.safetensors", "unrelated.safetensors"))
    write_index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"})
    assert [Path(f).name for f in safetensors_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_shards_without_index(tmp_path: Path) -> None:
    model_folder(tmp_path, files=("m-2.safetensors", "m-1.safetensors", "adapter_model.safetensors", "consolidated.safetensors"))
    assert [Path(f).name for f in safetensors_files(tmp_path)] == ["m-1.safetensors", "m-2.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"x": "gone.safetensors", "y": "a.safetensors"}, "1 of 2 weight files are missing: gone.safetensors"),
        ({"x": "../secret.safetensors"}, "only files in the same folder"),
        ({"x": "/etc/passwd"}, "only files in the same folder"),
        ({}, 'no "weight_map"'),
        ([1], 'no "weight_map"'),
        ({"x": 1}, 'no "weight_map"'),
    ],
)
def test_a_bad_index_is_said(tmp_path: Path, weight_map: Any, says: str) -> None:
    model_folder(tmp_path, files=("a.safetensors",))
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=says):
        open_it(tmp_path)


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ('{"a": ,}', CheckpointError, r"config\.json is not valid JSON: .* at line 1, column 7"),
        ("[1]", CheckpointError, r"config\.json must hold a JSON object, not a list"),
        ("[" * 100_000, CheckpointError, "not valid JSON"),
        ({"model_type": "llama"}, UnsupportedModel, r"\(model_type 'llama'\).*architectures.*--hf-overrides"),
        ({}, UnsupportedModel, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, UnsupportedModel, "has 'LlamaForCausalLM'"),
        ({"architectures": []}, UnsupportedModel, r"has \[\]"),
    ],
)
def test_a_bad_config_is_said(tmp_path: Path, config: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        open_it(model_folder(tmp_path, config))


def test_config_that_is_no_text(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="not valid JSON text"):
        open_it(tmp_path)


def test_overrides_repair_a_config(tmp_path: Path) -> None:
    overrides = {"architectures": ["LlamaForCausalLM"]}
    assert open_it(model_folder(tmp_path, {"model_type": "llama"}), overrides).hf_config["architectures"] == ["LlamaForCausalLM"]


def test_overrides_replace_values_and_merge_nested_configs() -> None:
    config = {"a": 1, "rope_scaling": {"rope_type": "llama3", "factor": 8}, "text_config": {"x": 1, "y": 2}}
    merged = apply_overrides(config, {"a": 2, "rope_scaling": {"rope_type": "yarn"}, "text_config": {"y": 3}, "new": None})
    assert merged == {"a": 2, "rope_scaling": {"rope_type": "yarn"}, "text_config": {"x": 1, "y": 3}, "new": None}
    assert config["text_config"] == {"x": 1, "y": 2}


def test_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.sampling.temp": 0.5, "general.sampling.top_k": 40})
    checkpoint = open_gguf(path, "m", {"max_position_embeddings": 32})
    assert checkpoint.format == "gguf"
    assert checkpoint.path == str(path)
    assert checkpoint.folder == tmp_path
    assert checkpoint.weight_files == (str(path),)
    assert checkpoint.hf_config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.hf_config["max_position_embeddings"] == 32
    assert checkpoint.generation_config == {"temperature": 0.5, "top_k": 40}
    assert checkpoint.gguf_metadata["tokenizer.ggml.tokens"] == ["a", "b", "c"]
    assert "tokenizer.ggml" not in repr(checkpoint)


def test_folder_with_one_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "mmproj-m.gguf").touch()
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')
    checkpoint = open_it(tmp_path)
    assert (checkpoint.format, checkpoint.path) == ("gguf", str(tmp_path / "m.gguf"))
    assert checkpoint.generation_config == {"top_p": 0.5}


def test_folder_with_both_kinds(tmp_path: Path) -> None:
    model_folder(tmp_path)
    write_gguf(tmp_path / "m.gguf")
    assert open_it(tmp_path).format == "safetensors"
    assert open_it(tmp_path, load_format="gguf").format == "gguf"
    (tmp_path / "model.safetensors").unlink()
    assert open_it(tmp_path).format == "gguf"


def test_folder_with_several_ggufs(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"2 GGUF models \(a\.gguf, b\.gguf\)\. Give the path"):
        open_it(tmp_path)


def test_a_part_of_a_split_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", {"split.count": 3})
    with pytest.raises(UnsupportedModel, match=r"split in 3.*llama-gguf-split --merge"):
        open_gguf(path, "m", None)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither config\.json nor a \.gguf file\.$"):
        open_it(tmp_path)
    model_folder(tmp_path / "inner")
    with pytest.raises(CheckpointError, match=r"Did you mean .*inner"):
        open_it(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match="adapter"):
        open_it(tmp_path)
    with pytest.raises(CheckpointError, match="--load-format gguf"):
        open_it(tmp_path / "inner", load_format="gguf")
