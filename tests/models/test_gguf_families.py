"""Every architecture of llama.cpp's that runs here: a tiny model written as its converter would, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file as load_safetensors

from octavo.checkpoint.gguf_architectures import ARCHITECTURES
from octavo.checkpoint.gguf_config import gguf_hf_config
from octavo.checkpoint.gguf_file import read_gguf
from octavo.errors import CheckpointError, UnsupportedModel
from tests.models.contiguous import load, run
from tests.models.test_parity import EXPERTS, GROWTH, LATENT, LONGROPE, SIGMOID, WINDOWED, YARN
from tests.support.gguf_models import sizes, tensors_of, write_model
from tests.support.tiny_models import tiny_model
from tests.support.tiny_pooling import save_pooling, write_tokenizer

IDS = list(range(5, 35))

PATTERN = {"sliding_window": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
SIGMOID_METADATA = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 16,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
}

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, {"expert_count": 4, "expert_used_count": 2}),
    "qwen2-moe": (
        "qwen2moe",
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 24},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16, "expert_shared_feed_forward_length": 24},
    ),
    "qwen2-moe-older": (
        "qwen2moe",
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 24},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen3-moe": (
        "qwen3moe",
        "qwen3_moe",
        {**EXPERTS, "norm_topk_prob": True, "head_dim": 16},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16},
    ),
    "olmoe": ("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 3}, {"expert_count": 4, "expert_used_count": 3}),
    "phi2": ("phi2", "phi", {}, {"rope.dimension_count": 4}),
    "phi3": ("phi3", "phi3", {"sliding_window": 6}, {"rope.dimension_count": 8, "attention.sliding_window": 6}),
    "phi4-mini": (
        "phi3",
        "phi3",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.75}},
        {"rope.dimension_count": 6},
    ),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None}, {}),
    "gpt2": ("gpt2", "gpt2", {"n_positions": 256}, {}),
    "pythia": ("gptneox", "gpt_neox", {}, {"rope.dimension_count": 2, "use_parallel_residual": True}),
    "gptneox-sequential": (
        "gptneox",
        "gpt_neox",
        {"use_parallel_residual": False},
        {"rope.dimension_count": 2, "use_parallel_residual": False},
    ),
    "falcon-7b": ("falcon", "falcon", {"multi_query": True}, {"attention.head_count_kv": 1}),
    "falcon-40b": ("falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, {"attention.head_count_kv": 2}),
    "falcon-11b": (
        "falcon",
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"attention.head_count_kv": 2},
    ),
    "stablelm": ("stablelm", "stablelm", {"use_qkv_bias": True}, {"rope.dimension_count": 2, "use_parallel_residual": False}),
    "command-r": ("command-r", "cohere", {"logit_scale": 0.5}, {"logit_scale": 0.5}),
    "command-r-plus": ("command-r", "cohere", {"use_qk_norm": True, "logit_scale": 0.5}, {"logit_scale": 0.5}),
    "command-r7b": (
        "cohere2",
        "cohere2",
        {"num_hidden_layers": 4, "sliding_window": 6, "logit_scale": 0.5},
        {"logit_scale": 0.5, "attention.sliding_window": 6},
    ),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo3": ("olmo2", "olmo3", {"num_hidden_layers": 4, "sliding_window": 6}, {"attention.sliding_window": 6}),
    "granite": (
        "granite",
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
        {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.2, "logit_scale": 2.0},
    ),
    "granite-moe": (
        "granitemoe",
        "granitemoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.3},
        {"expert_count": 4, "expert_used_count": 2, "attention.scale": 0.3},
    ),
    "deepseek-v2-lite": (
        "deepseek2",
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "n_group": None, "topk_group": None},
        {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_gating_func": 1},
    ),
    "deepseek-v2": (
        "deepseek2",
        "deepseek_v2",
        {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "attention.q_lora_rank": 12,
            "expert_weights_scale": 1.5,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
        },
    ),
    "deepseek-v3": (
        "deepseek2",
        "deepseek_v3",
        {**LATENT, "rope_parameters": {"rope_theta": 1000.0, **YARN, "mscale": 0.8, "mscale_all_dim": 0.8}},
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "attention.q_lora_rank": 12,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "rope.scaling.yarn_log_multiplier": 0.08,
        },
    ),
    "glm-4.7-flash": (
        "deepseek2",
        "glm4_moe_lite",
        {**LATENT, "routed_scaling_factor": 1.8},
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "attention.q_lora_rank": 12,
            "expert_weights_scale": 1.8,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {
            **WINDOWED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 1000.0, **YARN, "truncate": False},
        },
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48, "attention.sliding_window": 6},
    ),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4}, {}),
    "ministral-3": (
        "mistral3",
        "ministral3",
        {"rope_parameters": GROWTH},
        {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.7},
    ),
    "arcee": ("arcee", "arcee", {}, {}),
    "nemotron": ("nemotron", "nemotron", {}, {"rope.dimension_count": 4}),
    "glm4": ("glm4", "glm4", {"attention_bias": True}, {"rope.dimension_count": 4}),
    "glm-4.5": (
        "glm4moe",
        "glm4_moe",
        {**SIGMOID, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
        {**SIGMOID_METADATA, "rope.dimension_count": 4, "expert_weights_scale": 2.5},
    ),
    "glm-4.5-air": (
        "glm4moe",
        "glm4_moe",
        {**SIGMOID, "num_attention_heads": 8, "n_group": 2},
        {
            **SIGMOID_METADATA,
            "rope.dimension_count": 4,
            "expert_group_count": 2,
        },
    ),
    "dots": (
        "dots1",
        "dots1",
        {**SIGMOID, "num_hidden_layers": 3, "routed_scaling_factor": 1.5, "sliding_window": None},
        {
            **SIGMOID_METADATA,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": False,
            "leading_dense_block_count": 1,
        },
    ),
    "minimax-m2": (
        "minimax-m2",
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4, "intermediate_size": 24},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24, "rope.dimension_count": 4, "expert_gating_func": 2},
    ),
    "qwen2-vl": ("qwen2vl", "qwen2", {}, {"rope.dimension_sections": [2, 1, 1, 0]}),
    "qwen3-vl": ("qwen3vl", "qwen3", {}, {"rope.dimension_sections": [2, 1, 1, 0], "n_deepstack_layers": 3}),
    "qwen3-vl-moe": (
        "qwen3vlmoe",
        "qwen3_moe",
        {**EXPERTS, "norm_topk_prob": True, "head_dim": 16},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16, "rope.dimension_sections": [4, 2, 2, 0]},
    ),
    "exaone": ("exaone", "llama", {"tie_word_embeddings": True}, {"rope.dimension_count": 8}),
    "exaone4-1.2b": (
        "exaone4",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
        {},
    ),
    "exaone4-32b": (
        "exaone4",
        "exaone4",
        {"num_hidden_layers": 4, **PATTERN},
        {"attention.sliding_window": 6, "attention.sliding_window_pattern": [True, True, False, True]},
    ),
    "hunyuan": (
        "hunyuan-dense",
        "hunyuan_v1_dense",
        {"tie_word_embeddings": True},
        {"rope.scaling.type": "none", "rope.scaling.factor": 1.0},
    ),
    "seed-oss": ("seed_oss", "seed_oss", {"attention_bias": True, "head_dim": 16}, {}),
    "ernie4.5": ("ernie4_5", "ernie4_5", {"tie_word_embeddings": True}, {}),
    "ernie4.5-biases": ("ernie4_5", "ernie4_5", {"use_bias": True, "tie_word_embeddings": False}, {}),
    "bloom": ("bloom", "bloom", {}, {"feed_forward_length": 128}),
    "bloom-six-heads": ("bloom", "bloom", {"num_attention_heads": 6, "hidden_size": 48}, {"feed_forward_length": 192}),
    "mpt": ("mpt", "mpt", {}, {"feed_forward_length": 128, "attention.max_alibi_bias": 8.0}),
    "mpt-30b": (
        "mpt",
        "mpt",
        {"hidden_size": 48, "num_attention_heads": 6, "attn_config": {"clip_qkv": 0.5}},
        {"feed_forward_length": 192, "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.5},
    ),
}
"""Architecture of the file, family, what its config has, what the metadata have."""
LATENT_METADATA = {
    "attention.kv_lora_rank": 16,
    "attention.key_length": 20,
    "attention.value_length": 16,
    "attention.key_length_mla": 12,
    "attention.value_length_mla": 6,
    "attention.head_count_kv": 1,
    "rope.dimension_count": 4,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 16,
}


def logits_of(model: Any, ids: list[int] = IDS) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def load_file(path: Path, **options: Any) -> Any:
    parsed = read_gguf(str(path))
    return load(path, hf_config=gguf_hf_config(parsed.metadata, parsed.tensors), **options)


@pytest.mark.parametrize("name", ["glm-4.5", "minimax-m2", "exaone4-32b", "seed-oss", "ernie4.5", "bloom", "mpt-30b"])
def test_greedy_tokens_through_the_engine(tmp_path: Path, name: str) -> None:
    """Past windows and blocks, three prompts at once, with whatever kernels the engine chooses."""
    from octavo import LLM, SamplingParams

    arch, family, overrides, more = CASES[name]
    model = tiny_model(family, **overrides)
    write_model(tmp_path / "m.gguf", arch, metadata_of(model, arch, more), tensors_of(model, arch))
    prompts = [IDS[:5], IDS, IDS[3:20]]
    with LLM(
        str(tmp_path / "m.gguf"), device="cpu", threads=1, skip_tokenizer_init=True, num_gpu_blocks_override=64, max_num_batched_tokens=16,
        max_num_seqs=4, dtype="float32", max_model_len=128,
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        )
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output.outputs[0].token_ids == out[0, len(ids) :].tolist()


def metadata_of(model: Any, arch: str, more: dict[str, Any]) -> dict[str, Any]:
    return {**sizes(model.config), **(LATENT_METADATA if arch == "deepseek2" else {}), **more}


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm-4.7-flash"])
@pytest.mark.parametrize("stated", [{}, {"expert_gating_func": 0}])
def test_files_that_do_not_say_how_experts_are_chosen(tmp_path: Path, name: str, stated: dict[str, int]) -> None:
    """A tensor that corrects the choice is the sign of sigmoids."""
    arch, family, overrides, more = CASES[name]
    model = tiny_model(family, **overrides)
    metadata = {key: value for key, value in metadata_of(model, arch, more).items() if key != "expert_gating_func"}
    write_model(tmp_path / "m.gguf", arch, {**metadata, **stated}, tensors_of(model, arch))
    torch.testing.assert_close(run(load_file(tmp_path / "m.gguf"), IDS), logits_of(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    arch, family, overrides, more = CASES[name]
    model = tiny_model(family, **overrides)
    write_model(tmp_path / "m.gguf", arch, metadata_of(model, arch, more), tensors_of(model, arch))
    expected = logits_of(model)
    assert expected.std() > 0.1
    torch.testing.assert_close(run(load_file(tmp_path / "m.gguf"), IDS), expected, atol=1e-4, rtol=1e-4)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """GLM-4.5's files count them among their layers."""
    arch, family, overrides, more = CASES["glm-4.5"]
    model = tiny_model(family, **overrides)
    tensors, metadata = tensors_of(model, arch), metadata_of(model, arch, more)
    guessing = {name.replace("blk.1.", "blk.2."): value for name, value in tensors.items() if name.startswith("blk.1.")}
    guessing["blk.2.nextn.eh_proj.weight"] = tensors["token_embd.weight"]
    write_model(tmp_path / "m.gguf", arch, {**metadata, "block_count": 3, "nextn_predict_layers": 1}, tensors | guessing)
    torch.testing.assert_close(run(load_file(tmp_path / "m.gguf"), IDS), logits_of(model), atol=1e-4, rtol=1e-4)
    write_model(tmp_path / "none.gguf", arch, {**metadata, "block_count": 2, "nextn_predict_layers": 2}, tensors)
    with pytest.raises(CheckpointError, match="nextn_predict_layers"):
        load_file(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [({"attention.max_alibi_bias": 0.0}, "alibi false is not supported"), ({"feed_forward_length": 100}, "multiple of embedding_length")],
)
def test_mpt_files_that_do_not_run(tmp_path: Path, metadata: dict[str, Any], says: str) -> None:
    model = tiny_model("mpt")
    sound = metadata_of(model, "mpt", {"feed_forward_length": 128, "attention.max_alibi_bias": 8.0})
    write_model(tmp_path / "m.gguf", "mpt", sound | metadata, tensors_of(model, "mpt"))
    with pytest.raises((CheckpointError, UnsupportedModel), match=says) as caught:
        load_file(tmp_path / "m.gguf")
    assert "transformers" not in str(caught.value)


def test_a_pattern_of_windows_that_is_too_short_is_refused(tmp_path: Path) -> None:
    arch, family, overrides, more = CASES["exaone4-32b"]
    model = tiny_model(family, **overrides)
    metadata = metadata_of(model, arch, {**more, "attention.sliding_window_pattern": [True, True]})
    write_model(tmp_path / "m.gguf", arch, metadata, tensors_of(model, arch))
    with pytest.raises(CheckpointError, match="sliding_window_pattern must have 4 entries"):
        load_file(tmp_path / "m.gguf")


def test_every_architecture_has_a_case() -> None:
    elsewhere = {"llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "bert", "nomic-bert", "gemma-embedding"}
    assert {arch for arch, *_ in CASES.values()} | elsewhere == set(ARCHITECTURES)


@pytest.mark.parametrize("old", [True, False])
def test_experts_one_by_one_and_merged(tmp_path: Path, old: bool) -> None:
    arch, family, overrides, more = CASES["mixtral"]
    model = tiny_model(family, **overrides)
    tensors = tensors_of(model, arch, old_experts=old)
    assert ("blk.0.ffn_up.3.weight" in tensors) == old
    assert ("blk.0.ffn_up_exps.weight" in tensors) != old
    write_model(tmp_path / "m.gguf", arch, metadata_of(model, arch, more), tensors)
    torch.testing.assert_close(run(load_file(tmp_path / "m.gguf"), IDS), logits_of(model), atol=1e-4, rtol=1e-4)


def test_latent_attention_of_older_files(tmp_path: Path) -> None:
    """One matrix for keys and values, and the sizes of heads under the plain names."""
    arch, family, overrides, more = CASES["deepseek-v2-lite"]
    model = tiny_model(family, **overrides)
    metadata = metadata_of(model, arch, {**more, "attention.key_length": 12, "attention.value_length": 6})
    del metadata["attention.key_length_mla"], metadata["attention.value_length_mla"]
    tensors = tensors_of(model, arch, split_kv_b=False)
    assert "blk.0.attn_kv_b.weight" in tensors
    write_model(tmp_path / "m.gguf", arch, metadata, tensors)
    torch.testing.assert_close(run(load_file(tmp_path / "m.gguf"), IDS), logits_of(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("longest", [32, 64])
def test_longrope_comes_as_two_tensors(tmp_path: Path, longest: int) -> None:
    model = tiny_model(
        "phi3",
        sliding_window=None,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters={"rope_theta": 100.0, **LONGROPE},
    )
    tensors = tensors_of(model, "phi3")
    for kind in ("short", "long"):
        tensors[f"rope_factors_{kind}.weight"] = torch.tensor(LONGROPE[f"{kind}_factor"]).numpy()
    metadata = metadata_of(model, "phi3", {"rope.dimension_count": 8, "rope.scaling.original_context_length": 32})
    write_model(tmp_path / "m.gguf", "phi3", metadata, tensors)
    ids = list(range(5, 5 + longest - 2))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run(load_file(tmp_path / "m.gguf", max_model_len=longest), ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packed", ["MXFP4", "Q8_0", "Q4_0"])
def test_packed_experts(tmp_path: Path, packed: str) -> None:
    """What is packed is what transformers gets, unpacked by the gguf package."""
    import gguf

    arch, family, overrides, more = CASES["gpt-oss"]
    model = tiny_model(family, **overrides | {"intermediate_size": 64})
    tensors = tensors_of(model, arch)
    kind = gguf.GGMLQuantizationType[packed]
    try:
        gguf.quants.quantize(tensors["token_embd.weight"], kind)
    except NotImplementedError:
        pytest.skip(f"the gguf package cannot write {packed}")
    metadata = metadata_of(model, arch, {**more, "expert_feed_forward_length": 64})
    write_model(tmp_path / "packed.gguf", arch, metadata, tensors, packed)
    for name, value in tensors.items():
        if value.ndim > 1 and not name.endswith("bias"):
            tensors[name] = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    write_model(tmp_path / "plain.gguf", arch, metadata, tensors)
    expected = run(load_file(tmp_path / "plain.gguf"), IDS)
    torch.testing.assert_close(run(load_file(tmp_path / "packed.gguf"), IDS), expected, atol=1e-5, rtol=1e-5)


def test_missing_and_surplus_tensors_are_named_as_the_file_does(tmp_path: Path) -> None:
    arch, family, overrides, more = CASES["qwen3-moe"]
    model = tiny_model(family, **overrides)
    tensors, metadata = tensors_of(model, arch), metadata_of(model, arch, more)
    lacking = {name: value for name, value in tensors.items() if name != "blk.1.ffn_down_exps.weight"}
    write_model(tmp_path / "lacking.gguf", arch, metadata, lacking)
    with pytest.raises(CheckpointError, match=r"lacks blk\.1\.ffn_down.*does the file's metadata belong"):
        load_file(tmp_path / "lacking.gguf")
    write_model(tmp_path / "surplus.gguf", arch, metadata, {**tensors, "blk.0.ffn_up.weight": tensors["blk.0.attn_k.weight"]})
    with pytest.raises(CheckpointError, match=r"surplus\.gguf: tensor blk\.0\.ffn_up\.weight has no place"):
        load_file(tmp_path / "surplus.gguf")


@pytest.mark.parametrize(("pooling", "pick"), [(1, "mean"), (2, "cls")])
def test_an_encoder_embeds_as_its_file_says(tmp_path: Path, pooling: int, pick: str) -> None:
    from octavo import LLM

    model = save_pooling(tmp_path / "hf", "BertModel")
    words = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [w if w.startswith("[") else "▁" + w for w in words]
    metadata = {
        **sizes(model.config),
        "pooling_type": pooling,
        ".tokenizer.ggml.model": "bert",
        ".tokenizer.ggml.tokens": tokens,
        ".tokenizer.ggml.token_type": [3 if w.startswith("[") else 1 for w in words],
    }
    write_model(tmp_path / "m.gguf", "bert", metadata, tensors_of(model, "bert"))
    with LLM(str(tmp_path / "m.gguf"), device="cpu", threads=1) as llm:
        output = llm.embed(["A man is eating food"])[0]
    assert output.prompt_token_ids == [2, *(words[w] for w in ("a", "man", "is", "eating", "food")), 3]
    with torch.inference_mode():
        hidden = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
    expected = torch.nn.functional.normalize(hidden.mean(0) if pick == "mean" else hidden[0], dim=0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-4, rtol=1e-4)


def word_pieces(folder: Path) -> dict[str, Any]:
    """A BERT vocabulary as converters write it, of the words of a folder's tokenizer."""
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {
        ".tokenizer.ggml.model": "bert",
        ".tokenizer.ggml.tokens": [w if w.startswith("[") else "▁" + w for w in words],
        ".tokenizer.ggml.token_type": [3 if w.startswith("[") else 1 for w in words],
    }


def test_nomics_encoder_out_of_its_file(tmp_path: Path) -> None:
    from octavo import LLM

    model = save_pooling(tmp_path / "hf", "NomicBertModel")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NOMIC_BERT, 2)
    stored = load_safetensors(str(tmp_path / "hf" / "model.safetensors"))
    tensors = {f"{table.get_name(name.rpartition('.')[0])}.{name.rpartition('.')[2]}": t.numpy() for name, t in stored.items()}
    assert "blk.1.ffn_gate.weight" in tensors
    metadata = {**sizes(model.config), "pooling_type": 1, "rope.freq_base": 1000.0, **word_pieces(tmp_path / "hf")}
    write_model(tmp_path / "m.gguf", "nomic-bert", metadata, tensors)
    with LLM(str(tmp_path / "m.gguf"), device="cpu", threads=1) as llm:
        output = llm.embed(["A man is eating food"])[0]
    with torch.inference_mode():
        hidden = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
    expected = torch.nn.functional.normalize(hidden.mean(0), dim=0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-4, rtol=1e-4)


UNIGRAMS = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁man", "▁is", "▁eat", "ing", "▁food", "▁", "n", "t"]


def roberta_file(folder: Path, architecture: str, **more: Any) -> tuple[Any, Path]:
    """An XLM-RoBERTa as converters write it: a BERT with unigrams, whose table of positions has lost its first rows."""
    model = save_pooling(folder / "hf", architecture, pad_token_id=1, type_vocab_size=1, vocab_size=len(UNIGRAMS), num_labels=1)
    tensors = {}
    for name, tensor in model.state_dict().items():
        bare = name.removeprefix("roberta.")
        if "position_ids" in name or bare.startswith("pooler."):
            continue
        value = tensor[2:] if bare == "embeddings.position_embeddings.weight" else tensor
        stem, _, kind = bare.rpartition(".")
        found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2).get_name(stem)
        assert found is not None, name
        tensors[f"{found}.{kind}"] = value.numpy()
    metadata = {
        **sizes(model.config),
        "context_length": model.config.max_position_embeddings - 2,
        ".tokenizer.ggml.model": "t5",
        ".tokenizer.ggml.tokens": UNIGRAMS,
        ".tokenizer.ggml.scores": [0.0] * 4 + [-float(i) for i in range(1, len(UNIGRAMS) - 3)],
        ".tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * (len(UNIGRAMS) - 4)],
        ".tokenizer.ggml.bos_token_id": 0,
        ".tokenizer.ggml.eos_token_id": 2,
        ".tokenizer.ggml.seperator_token_id": 2,
        ".tokenizer.ggml.padding_token_id": 1,
        ".tokenizer.ggml.unknown_token_id": 3,
        **more,
    }
    write_model(folder / "m.gguf", "bert", metadata, tensors)
    return model, folder / "m.gguf"


def test_an_xlm_roberta_with_unigrams_embeds(tmp_path: Path) -> None:
    """As the files of bge-m3 and multilingual-e5 are."""
    from octavo import LLM

    model, path = roberta_file(tmp_path, "XLMRobertaModel", pooling_type=2)
    with LLM(str(path), device="cpu", threads=1) as llm:
        output = llm.embed(["a man  is eating food"])[0]
        assert llm.ready_report.max_model_len == 62
    assert output.prompt_token_ids == [0, 4, 5, 6, 7, 8, 9, 2]
    with torch.inference_mode():
        hidden = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
    expected = torch.nn.functional.normalize(hidden[0], dim=0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-4, rtol=1e-4)


def test_a_ranking_file_scores_pairs(tmp_path: Path) -> None:
    """As the files of bge-reranker are."""
    from octavo import LLM

    model, path = roberta_file(tmp_path, "XLMRobertaForSequenceClassification", pooling_type=4)
    with LLM(str(path), device="cpu", threads=1) as llm:
        output = llm.score("a man", "is eating")[0]
    assert output.prompt_token_ids == [0, 4, 5, 2, 2, 6, 7, 8, 2]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0, 0].sigmoid()
    assert output.outputs.score == pytest.approx(float(expected), abs=1e-4)
    _, path = roberta_file(tmp_path / "headless", "XLMRobertaModel", pooling_type=4)
    with pytest.raises(UnsupportedModel, match=r"cls\.output\.weight"):
        LLM(str(path), device="cpu", threads=1)


def test_embedding_gemma_out_of_its_file(tmp_path: Path) -> None:
    """It sees to both sides, through windows in five layers of six."""
    from octavo import LLM

    sizes_of = {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
    model = save_pooling(tmp_path / "hf", "Gemma3TextModel", use_bidirectional_attention=True, **sizes_of)
    tensors = {name: value for name, value in tensors_of(model, "gemma-embedding").items() if name != "output.weight"}
    metadata = {
        **sizes(model.config), "pooling_type": 1, "attention.sliding_window": 6, "rope.freq_base": 1e6, **word_pieces(tmp_path / "hf"),
    }  # fmt: skip
    write_model(tmp_path / "m.gguf", "gemma-embedding", metadata, tensors)
    with LLM(str(tmp_path / "m.gguf"), device="cpu", threads=1) as llm:
        output = llm.embed(["the stock market fell today the dog is slow a man runs fast"])[0]
    with torch.inference_mode():
        hidden = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
    expected = torch.nn.functional.normalize(hidden.mean(0), dim=0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-4, rtol=1e-4)
    write_model(tmp_path / "d.gguf", "gemma-embedding", metadata, tensors | {"dense_2.weight": tensors["token_embd.weight"]})
    with pytest.raises(UnsupportedModel, match="dense_2"):
        LLM(str(tmp_path / "d.gguf"), device="cpu", threads=1)


def test_a_reranker_that_answers_yes_or_no(tmp_path: Path) -> None:
    """As the files of Qwen3-Reranker are: two rows of the head beside the model; the score is how likely yes is of the two."""
    from octavo import LLM

    model = tiny_model("qwen3", tie_word_embeddings=True)
    tensors = tensors_of(model, "qwen3")
    no, yes = 7, 9
    tensors["cls.output.weight"] = tensors["token_embd.weight"][[yes, no]]
    write_tokenizer(tmp_path / "words")
    metadata = {
        **sizes(model.config), "pooling_type": 4, "classifier.output_labels": ["yes", "no"], **word_pieces(tmp_path / "words"),
    }  # fmt: skip
    write_model(tmp_path / "m.gguf", "qwen3", metadata, tensors)
    with LLM(str(tmp_path / "m.gguf"), device="cpu", threads=1) as llm:
        output = llm.score("a man", "is eating")[0]
    expected = logits_of(model, output.prompt_token_ids)[-1]
    assert output.outputs.score == pytest.approx(float(expected[[no, yes]].softmax(0)[1]), abs=1e-4)
    del tensors["cls.output.weight"]
    write_model(tmp_path / "none.gguf", "qwen3", metadata, tensors)
    with pytest.raises(UnsupportedModel, match=r"answers yes and no \(cls\.output\.weight\)"):
        LLM(str(tmp_path / "none.gguf"), device="cpu", threads=1)
