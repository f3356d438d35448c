"""Checkpoints that also read images: their language models are served for text, from tensors of older and of newer names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.checkpoint.text_part import ORIGIN, WHOLE, text_part
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


def ministral3() -> Any:
    rope = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 32.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    text = transformers.Ministral3Config(**TEXT | {"rope_parameters": rope})
    vision = transformers.PixtralVisionConfig(**VISION)
    return transformers.Mistral3ForConditionalGeneration(transformers.Mistral3Config(text_config=text, vision_config=vision))


def llava() -> Any:
    text, vision = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**VISION, projection_dim=16)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5))


_QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def qwen2_vl(name: str = "Qwen2_5_VL") -> Any:
    text = TEXT | {"tie_word_embeddings": False, "rope_parameters": _QWEN_ROPE}
    text.pop("head_dim")
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = getattr(transformers, name + "Config")(text_config=text, vision_config=vision, image_token_id=3, video_token_id=4)
    return getattr(transformers, name + "ForConditionalGeneration")(config)


def qwen2_older_vl() -> Any:
    return qwen2_vl("Qwen2VL")


def qwen3_vl() -> Any:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    }
    text = TEXT | {"rope_parameters": _QWEN_ROPE}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=3, video_token_id=4)
    return transformers.Qwen3VLForConditionalGeneration(config)


def idefics3() -> Any:
    vision = VISION | {"patch_size": 14}
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **TEXT}, vision_config=vision, image_token_id=5, scale_factor=2
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def internvl() -> Any:
    vision = VISION | {"image_size": [28, 28], "patch_size": [14, 14]}
    text = {"model_type": "qwen2", **TEXT}
    text.pop("head_dim")
    return transformers.InternVLForConditionalGeneration(
        transformers.InternVLConfig(text_config=text, vision_config=vision, image_token_id=5)
    )


def llama4() -> Any:
    """Through transformers, as those below."""
    text = TEXT | {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 64}
    vision = VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "intermediate_size": 64}
    return transformers.Llama4ForConditionalGeneration(transformers.Llama4Config(text_config=text, vision_config=vision))


def gemma4() -> Any:
    text = TEXT | {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "global_head_dim": 8, "final_logit_softcapping": 3.0,
    }  # fmt: skip
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=3,
        video_token_id=4,
        audio_token_id=5,
        boi_token_id=0,
        eoi_token_id=0,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


@pytest.mark.parametrize(
    "make", [gemma3, mistral3, ministral3, llava, qwen2_vl, qwen2_older_vl, qwen3_vl, idefics3, internvl, llama4, gemma4]
)
@pytest.mark.parametrize("older", [True, False])
def test_text_equals_transformers(tmp_path: Path, make: Any, older: bool) -> None:
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path, save_original_format=older)
    prompt = torch.randint(6, 128, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    reference = model.language_model if make is llama4 else model  # the whole of it cannot do without an image in transformers
    with torch.inference_mode():
        out = reference.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_model_len=64, num_gpu_blocks_override=20) as llm:
        found = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids
        assert any("its language model is served" in warning for warning in llm.ready_report.warnings)
    assert list(found) == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("make", [gemma3, qwen3_vl])
def test_the_whole_can_be_built_by_transformers_too(tmp_path: Path, make: Any) -> None:
    """What reads the images is let go of once the language model was compared with the whole."""
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path)
    prompt = list(range(10, 30))
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 20}
    with LLM(str(tmp_path), model_impl="transformers", **settings) as llm:
        found = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        assert llm.ready_report.weights_bytes == 4 * sum(p.numel() for p in model.model.language_model.parameters()) + (
            0 if model.lm_head.weight is model.model.language_model.embed_tokens.weight else 4 * model.lm_head.weight.numel()
        )
    assert list(found[0].outputs[0].token_ids) == out[0, len(prompt) :].tolist()


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
            if key not in ("architectures", ORIGIN, WHOLE, "model_type") and not (name == "mistral" and key == "max_position_embeddings"):
                assert theirs.to_dict()[key] == value, key


def test_the_first_config_of_qwen_had_the_language_model_at_the_top(tmp_path: Path) -> None:
    """With `type: mrope`, and without defaults."""
    torch.manual_seed(0)
    model = qwen2_vl().eval()
    model.save_pretrained(tmp_path, save_original_format=True)
    config = json.loads((tmp_path / "config.json").read_text())
    text = {key: value for key, value in config.pop("text_config").items() if key not in ("model_type", "rope_parameters", "layer_types")}
    flat = {**text, **config, "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    prompt = list(range(10, 30))
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_model_len=64, num_gpu_blocks_override=20) as llm:
        found = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids
    assert list(found) == out[0, len(prompt) :].tolist()


def test_what_transformers_would_have_to_run_and_cannot_is_one_sentence(tmp_path: Path) -> None:
    assert text_part({"architectures": ["LlamaForCausalLM"]}) is None
    config = {
        "architectures": ["NobodyForConditionalGeneration"],
        "vision_config": {},
        "text_config": {"model_type": "nobody_text", "vocab_size": 128},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"^NobodyFor.* is known neither to Octavo nor to the installed transformers"):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy", max_model_len=64)
    reads_encoder = {**config, "architectures": ["T5Gemma2ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(reads_encoder))
    with pytest.raises(UnsupportedModel, match=r"T5Gemma2.*an encoder in front of its decoder"):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy", max_model_len=64)
