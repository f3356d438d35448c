"""gpt-oss as it is published: experts in MXFP4 under the names of openai/gpt-oss-20b, against transformers' own dequantisation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import CheckpointError, UnsupportedModel
from tests.models.contiguous import load, run
from tests.support.tiny_models import save_tiny

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
IDS = list(range(5, 35))


def save_packed(folder: Path, *, shards: int = 1) -> torch.Tensor:
    """A tiny gpt-oss whose experts are packed; the logits that it should give."""
    model = save_tiny(
        folder,
        "gpt_oss",
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    )
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            experts, columns, rows = tensors.pop(key).shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 126, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            with torch.no_grad():
                parameter = model.get_parameter(key)
                parameter.copy_(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [names[i::shards] for i in range(shards)]
    for number, part in enumerate(parts, 1):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number:05}-of-{shards:05}.safetensors")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    assert logits.std() > 0.1
    return logits


@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize("shards", [1, 3])
def test_packed_experts_equal_transformers(tmp_path: Path, shards: int, ops: str) -> None:
    """With three shards blocks and scales lie in different files."""
    expected = save_packed(tmp_path, shards=shards)
    torch.testing.assert_close(run(load(tmp_path, ops=ops), IDS), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run(load(tmp_path, ops=ops), IDS, chunks=[9, 1, 12, 1, 1, 6]), expected, atol=1e-4, rtol=1e-4)


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    save_packed(tmp_path)
    path = tmp_path / "model-00001-of-00001.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks is there without .*down_proj_scales"):
        load(tmp_path)


def test_other_families_do_not_have_this_format(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UnsupportedModel, match="MXFP4"):
        load(tmp_path, hf_config=config)
