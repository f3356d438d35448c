"""Models that cannot be used, opened as a user opens them: what is said, and that nothing of theirs is run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from octavo import LLM
from octavo.errors import CheckpointError, UnsupportedModel
from tests.support.tiny_models import save_tiny


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def open_model(folder: Path, **settings: Any) -> None:
    with LLM(str(folder), **({"skip_tokenizer_init": True, "num_gpu_blocks_override": 20} | settings)):
        raise AssertionError("it opened")


def test_an_unknown_architecture_is_named_with_what_there_is(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    change_config(tmp_path, architectures=["LlamoForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"LlamoForCausalLM.*Did you mean LlamaForCausalLM.*Octavo's own: .*Qwen3ForCausalLM"):
        open_model(tmp_path)


def test_an_architecture_that_only_transformers_has_is_offered_that_way(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    change_config(tmp_path, architectures=["OPTForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"OPTForCausalLM is not supported\. Supported: .*--model-impl transformers"):
        open_model(tmp_path, model_impl="octavo")


def test_a_config_that_is_not_that_of_the_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    change_config(tmp_path, intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj\.weight has the shape .* config.json asks for"):
        open_model(tmp_path)


@pytest.mark.parametrize("beside", [True, False])
def test_a_tokenizer_of_another_model(tmp_path: Path, beside: bool) -> None:
    """In the model's own folder, or given by --tokenizer."""
    save_tiny(tmp_path / "model", "llama")  # 128 tokens
    other = tmp_path / "other"
    other.mkdir()
    Tokenizer(models.WordLevel({f"word{i}": i for i in range(2000)}, unk_token="word0")).save(str(other / "tokenizer.json"))
    if beside:
        (tmp_path / "model" / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"tokens that .* \(vocab_size 128\) does not have.*--tokenizer"):
        open_model(tmp_path / "model", skip_tokenizer_init=False, tokenizer=None if beside else str(other))


@pytest.mark.parametrize("trusting", [True, False])
def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, trusting: bool) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnForCausalLM: pass\n")
    change_config(tmp_path, architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    with pytest.raises(UnsupportedModel, match=r"OwnForCausalLM.*never runs code from a checkpoint"):
        open_model(tmp_path, trust_remote_code=trusting)
    assert not (tmp_path / "ran").exists()


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_that_hold_code_are_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    save_tiny(tmp_path, "llama")
    tensors: dict[str, Any] = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    tensors["model.norm.weight"] = _Runs(tmp_path / "ran")
    if zipped:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": _Runs(tmp_path / "ran")}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds more than tensors.*nothing of it was run"):
        open_model(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_tensor_too_few_and_one_too_many(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        open_model(tmp_path)
    save_file(
        {**tensors, "model.layers.1.mlp.down_proj.weight": kept, "model.layers.0.extra": kept.clone()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.extra has no place"):
        open_model(tmp_path)
