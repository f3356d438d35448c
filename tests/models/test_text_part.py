"""Checkpoints that also read images: their language models are served for text, from tensors of older and of newer names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.checkpoint.text_part import ORIGIN, text_part
from octavo.errors import CheckpointError, UnsupportedModel

TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def gemma3() -> Any:
    windowed = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    text, vision = transformers.Gemma3TextConfig(**TEXT, **windowed), transformers.SiglipVisionConfig(**VISION)
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )


def mistral3() -> Any:
    text, vision = transformers.MistralConfig(**TEXT, sliding_window=None), transformers.PixtralVisionConfig(**VISION)
    return transformers.Mistral3ForConditionalGeneration(transformers.Mistral3Config(text_config=text, vision_config=vision))


def llava() -> Any:
    text, vision = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**VISION, projection_dim=16)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5))


@pytest.mark.parametrize("make", [gemma3, mistral3, llava])
@pytest.mark.parametrize("older", [True, False])
def test_text_equals_transformers(tmp_path: Path, make: Any, older: bool) -> None:
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path, save_original_format=older)
    prompt = torch.randint(6, 128, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_model_len=64, num_gpu_blocks_override=20) as llm:
        found = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids
        assert any("its language model is served" in warning for warning in llm.ready_report.warnings)
    assert list(found) == out[0, len(prompt) :].tolist()


def test_a_tensor_of_the_language_model_that_is_missing_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    gemma3().save_pretrained(tmp_path)
    tensors = load_file(str(tmp_path / "model.safetensors"))
    name = next(n for n in tensors if n.endswith("layers.1.mlp.down_proj.weight"))
    save_file({n: t for n, t in tensors.items() if n != name}, str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=20)


def test_sparse_configs_have_transformers_defaults() -> None:
    """As Gemma 3 4B's is published."""
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "vision_config": {},
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
    }  # fmt: skip
    config = text_part(published)
    assert config is not None
    defaults = transformers.Gemma3TextConfig().to_dict()
    for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        assert config[key] == defaults[key]
    assert (config["hidden_size"], config["eos_token_id"], config[ORIGIN]) == (2560, [1, 106], "Gemma3ForConditionalGeneration")
    for name, theirs in (("mistral", transformers.MistralConfig()), ("llama", transformers.LlamaConfig())):
        alone = text_part({"architectures": ["XForConditionalGeneration"], "vision_config": {}, "text_config": {"model_type": name}})
        assert alone is not None
        for key, value in alone.items():
            if key not in ("architectures", ORIGIN, "model_type") and not (name == "mistral" and key == "max_position_embeddings"):
                assert theirs.to_dict()[key] == value, key


def test_others_are_left_alone_or_refused(tmp_path: Path) -> None:
    assert text_part({"architectures": ["LlamaForCausalLM"]}) is None
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": {},
        "text_config": {"model_type": "qwen2_5_vl_text"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"Qwen2_5_VL.* reads images.*qwen2_5_vl_text.*gemma3_text"):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy", max_model_len=64)
