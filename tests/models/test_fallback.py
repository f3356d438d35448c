"""Models that only transformers has, with our attention and cache: same logits however the prompt is cut, same greedy tokens."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.config.types import EngineConfig
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.models.fallback import TransformersModel, lets_its_attention_be_swapped
from octavo.models.loader import load_model
from octavo.models.registry import supported_architectures
from octavo.ops.registry import load_ops
from tests.models.contiguous import run
from tests.support.tiny_models import config_for, save_tiny

IDS = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(7)).tolist()
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "HeliumForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
    "SeedOssForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
    "Exaone4ForCausalLM": {"num_key_value_heads": 2, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    # Each layer attends twice, or uses the keys and values of another.
    "DiffLlamaForCausalLM": {"num_key_value_heads": 2},
    "Gemma3nForCausalLM": {
        "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 5, "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "altup_num_inputs": 2,
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
    },
    "Gemma4ForCausalLM": {
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
    },
    # The mask alone tells of chunks, which are longer than the longest sequence here.
    "Llama4ForCausalLM": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 64},
    "Llama4ForCausalLM:tempered": {
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 64,
        "no_rope_layers": [1, 0], "attn_temperature_tuning": True, "floor_scale": 20, "attn_scale": 3.0,
    },
    # Keys are wider than values.
    "MiniCPM3ForCausalLM": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    },
    # Positions begin behind the number of the padding token.
    "RobertaForCausalLM": {"is_decoder": True, "pad_token_id": 1, "bos_token_id": 0},
    "XLMRobertaForCausalLM": {"is_decoder": True, "pad_token_id": 3, "bos_token_id": 0},
    "BertLMHeadModel": {"is_decoder": True},
    # Granite 4 without its state-space layers, with an infinity in its config.
    "GraniteMoeHybridForCausalLM": {
        "num_key_value_heads": 2, "layer_types": ["attention", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48,
        "position_embedding_type": "rope", "mamba_n_heads": 4,
    },
}  # fmt: skip


def through_transformers(folder: Path, **settings: Any) -> EngineConfig:
    """Also what has code of our own."""
    config = config_for(folder, **settings)
    return replace(config, model=replace(config.model, implementation="transformers"))


def save(folder: Path, name: str) -> Any:
    cls = getattr(transformers, name.partition(":")[0])
    config = cls.config_class(**(SIZES | MODELS[name]))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    reference = save(tmp_path, name)
    model = load_model(through_transformers(tmp_path, max_model_len=64), load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    assert isinstance(model, TransformersModel)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.1
    for chunks in (None, [11, 1, 13, 1, 1, 1, 1, 1]):
        torch.testing.assert_close(run(model, IDS, chunks), expected, atol=1e-4, rtol=1e-4)


def test_an_architecture_of_ours_can_be_run_so_too_with_logits_that_are_scaled_behind_the_head(tmp_path: Path) -> None:
    config = transformers.GraniteConfig(**SIZES, num_key_value_heads=2, logits_scaling=3.0, attention_multiplier=0.3)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    reference = transformers.GraniteForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    model = load_model(through_transformers(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    assert isinstance(model, TransformersModel)
    with torch.inference_mode():
        torch.testing.assert_close(run(model, IDS, [20, 10]), reference(torch.tensor([IDS])).logits[0], atol=1e-4, rtol=1e-4)


def test_greedy_tokens_through_the_engine(tmp_path: Path) -> None:
    reference = save(tmp_path, "OPTForCausalLM")
    prompts = [IDS[:5], IDS, IDS[3:20]]
    with LLM(
        str(tmp_path), device="cpu", threads=1, skip_tokenizer_init=True, num_gpu_blocks_override=64, max_num_batched_tokens=16,
        max_num_seqs=4, kv_cache_dtype="float32",
    ) as llm:  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            out = reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output.outputs[0].token_ids == out[0, len(ids) :].tolist()


def refused(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    load_model(config_for(folder, hf_config=config), load_ops("cpu"), torch.device("cpu"), lambda *_: None)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "HeliumForCausalLM")
    with pytest.raises(UnsupportedModel, match="known neither to Octavo nor to the installed transformers"):
        refused(tmp_path, architectures=["NobodyForCausalLM"])
    with pytest.raises(UnsupportedModel, match="never runs code from a checkpoint"):
        refused(tmp_path, architectures=["NobodyForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_nobody.Nobody"})
    with pytest.raises(UnsupportedModel, match="swapped"):
        refused(tmp_path, architectures=["XGLMForCausalLM"])
    with pytest.raises(CheckpointError, match=r"lacks.*layers\.2.*does config\.json belong"):
        refused(tmp_path, num_hidden_layers=3)


def test_what_does_not_fit_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """A config that leaves sizes out, or is damaged, may stand for a model far larger than its files."""
    save(tmp_path, "HeliumForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 65536, "intermediate_size": 262144, "head_dim": 16384}))
    settings = replace(config_for(tmp_path), device=replace(config_for(tmp_path).device, total_bytes=2**34))
    with pytest.raises(ConfigError, match=r"need \d.* but .*has"):
        load_model(settings, load_ops("cpu"), torch.device("cpu"), lambda *_: None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("T5ForConditionalGeneration", "an encoder in front"),
        ("WhisperForConditionalGeneration", "causal language models"),
        ("LlavaForConditionalGeneration", "reads images"),
        ("BertModel", "it is none"),
        ("XGLMForCausalLM", "does not let its attention be swapped.*Take another model.*Octavo's own"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(tmp_path: Path, name: str, says: str) -> None:
    save(tmp_path, "HeliumForCausalLM")
    settings = config_for(tmp_path)
    settings = replace(settings, model=replace(settings.model, architecture=name))
    with pytest.raises(UnsupportedModel, match=says):
        load_model(settings, load_ops("cpu"), torch.device("cpu"), lambda *_: None)


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("DogeForCausalLM", {"num_key_value_heads": 2}, "a mask of the model's own"),
        ("BertLMHeadModel", {}, "not plainly causal"),
        (
            "Lfm2ForCausalLM",
            {"num_key_value_heads": 2, "layer_types": ["full_attention", "conv"]},
            "not all of its layers are attention layers",
        ),
        (
            "Llama4ForCausalLM",
            {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 64},
            "sequences of 256 tokens .*--max-model-len 64",
        ),
    ],
)
def test_attention_that_ours_is_not_is_refused(tmp_path: Path, name: str, more: dict[str, Any], says: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(MODELS, name, more)
    save(tmp_path, name)
    with pytest.raises(UnsupportedModel, match=says) as caught:
        load_model(config_for(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    assert ("Take another model" in str(caught.value)) != ("--max-model-len" in str(caught.value))  # it says what to do


def test_what_keeps_more_than_keys_and_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that looks at the token before, as convolutions do: its results step by step are not its own."""
    save(tmp_path, "HeliumForCausalLM")
    inner = transformers.models.helium.modeling_helium.HeliumMLP.forward

    def mixing(self: Any, x: torch.Tensor) -> torch.Tensor:
        return inner(self, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    monkeypatch.setattr(transformers.models.helium.modeling_helium.HeliumMLP, "forward", mixing)
    with pytest.raises(UnsupportedModel, match=r"step by step .*keeps more from token to token than keys and values"):
        load_model(config_for(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)


@pytest.mark.parametrize("longest", [32, 64])
def test_rotations_that_depend_on_the_length_are_those_of_the_longest_sequence(tmp_path: Path, longest: int) -> None:
    """For short sequences too, where transformers would take others: keys of both would meet in the cache."""
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.0}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
    config = transformers.SeedOssConfig(**SIZES, num_key_value_heads=2, head_dim=8, rope_parameters=rope)
    torch.manual_seed(0)
    transformers.SeedOssForCausalLM(config).save_pretrained(tmp_path)
    if longest == 64:
        factors = rope | {"short_factor": rope["long_factor"]}
    else:
        factors = rope
    reference = transformers.SeedOssForCausalLM.from_pretrained(
        tmp_path, config=transformers.SeedOssConfig(**SIZES, num_key_value_heads=2, head_dim=8, rope_parameters=factors)
    )
    model = load_model(through_transformers(tmp_path, max_model_len=longest), load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(run(model, IDS, [20, 9, 1]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("longest", [32, 64])
def test_rotations_that_depend_on_their_company_are_those_beside_the_last_position(tmp_path: Path, longest: int) -> None:
    """Phi-3.5-MoE's in transformers: of a step with one long sequence, all are scaled as long ones."""
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0], "short_mscale": 1.1, "long_mscale": 1.3}
    config = transformers.PhimoeConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, rope_parameters=rope)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    reference = transformers.PhimoeForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    model = load_model(config_for(tmp_path, max_model_len=longest), load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS + [5] * (longest - len(IDS))])).logits[0, : len(IDS)]
    torch.testing.assert_close(run(model, IDS, [20, 9, 1]), expected, atol=1e-4, rtol=1e-4)


def test_rotations_that_depend_on_more_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "SeedOssForCausalLM")
    rotary = transformers.models.seed_oss.modeling_seed_oss.SeedOssRotaryEmbedding
    inner = rotary.forward

    def by_count(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return tuple(part * position_ids.shape[-1] for part in inner(self, x, position_ids))

    monkeypatch.setattr(rotary, "forward", by_count)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    config = json.loads((tmp_path / "config.json").read_text()) | {"rope_parameters": scaled}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="depend on the longest sequence that is computed at the same time"):
        load_model(through_transformers(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)


def test_surplus_tensors_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "SeedOssForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    load_model(through_transformers(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    assert any("have no place" in r.message and "layers.1" in r.message for r in caplog.records)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, "HeliumForCausalLM")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN"):
        load_model(config_for(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)


class Evil:
    def __reduce__(self) -> object:
        return print, ("run",)


def test_pickles_with_code_are_refused_in_our_own_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path, "HeliumForCausalLM")
    (tmp_path / "model.safetensors").unlink()
    torch.save({**model.state_dict(), "more": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds more than tensors.*nothing of it was run") as caught:
        load_model(config_for(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    assert "trust" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert "run" not in capsys.readouterr().out
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = load_model(config_for(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    with torch.inference_mode():
        torch.testing.assert_close(run(loaded, IDS), model(torch.tensor([IDS])).logits[0], atol=1e-4, rtol=1e-4)


def test_the_checkpoint_of_a_wrapped_model_is_told_as_such(tmp_path: Path) -> None:
    save(tmp_path, "HeliumForCausalLM")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"a wrapped model was saved: names begin with module\."):
        load_model(config_for(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)


@pytest.mark.parametrize(
    ("family", "changes", "may"),
    [
        ("mpt", {"attn_config": {"alibi": False}}, False),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, False),
        ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 100.0}}, True),
    ],
)
def test_transformers_is_offered_only_where_it_may_help(tmp_path: Path, family: str, changes: dict[str, Any], may: bool) -> None:
    save_tiny(tmp_path, family)
    settings = config_for(tmp_path, hf_config=json.loads((tmp_path / "config.json").read_text()) | changes)
    with pytest.raises(UnsupportedModel) as caught:
        load_model(settings, load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    assert ("--model-impl transformers" in str(caught.value)) == may
    if not may:
        with pytest.raises(UnsupportedModel, match="code of its own for it: leave --model-impl at auto"):
            load_model(through_transformers(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)


def test_a_broken_file_is_one_sentence(tmp_path: Path) -> None:
    save(tmp_path, "HeliumForCausalLM")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="transformers cannot load it"):
        load_model(config_for(tmp_path), load_ops("cpu"), torch.device("cpu"), lambda *_: None)


def test_whether_transformers_may_run_it_is_known_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is refused is not sent to transformers where that would send it back."""
    with_it = {name: lets_its_attention_be_swapped(name) for name in supported_architectures()}
    assert not with_it["MptForCausalLM"]
    assert with_it["LlamaForCausalLM"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert {name: lets_its_attention_be_swapped(name) for name in supported_architectures()} == with_it
