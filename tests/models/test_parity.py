"""Tiny models of every family against transformers: same logits however the prompt is cut, same greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.program import compilable
from octavo.models.registry import model_spec
from tests.models.contiguous import ContiguousAttend, greedy, load, run
from tests.support.tiny_models import SIZES, save_tiny

IDS = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(7)).tolist()

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
}

WINDOWED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

GROWTH = {"rope_theta": 1000.0, **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}

SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 16}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-llama3": ("llama", {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "linear", "factor": 3.0}}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_theta": 1000.0, **YARN}}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": {"rope_theta": 1000.0, **YARN, "mscale": 1.2, "mscale_all_dim": 0.7}}),
    "llama-yarn-betas": ("llama", {"rope_parameters": {"rope_theta": 1e4, **YARN, "beta_fast": 4, "beta_slow": 2, "truncate": False}}),
    "llama-longrope": ("llama", {"rope_parameters": {"rope_theta": 100.0, **LONGROPE}}),
    "llama-dynamic-short": ("llama", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "dynamic", "factor": 2.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**WINDOWED, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3", {**WINDOWED, "query_pre_attn_scalar": 10, "rope_parameters": BY_LAYER}),
    "gemma3-no-cap": ("gemma3", {**WINDOWED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "phi3": ("phi3", {"sliding_window": 6}),
    "phi3-longrope": ("phi3", {"rope_parameters": {"rope_theta": 100.0, **LONGROPE}}),
    "phi4-mini": ("phi3", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.75}}),
    "phi": ("phi", {}),
    "phi-qk-norm": ("phi", {"qk_layernorm": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", WINDOWED),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0, "mlp_bias": True},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "gpt2": ("gpt2", {"n_positions": 256}),
    "gpt2-scale-by-layer": ("gpt2", {"n_positions": 256, "scale_attn_by_inverse_layer_idx": True}),
    "pythia": ("gpt_neox", {}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "falcon-7b": ("falcon", {"multi_query": True}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon-rw": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-rw-1b": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    "falcon-alibi": ("falcon", {"multi_query": True, "alibi": True, "num_attention_heads": 8, "hidden_size": 64}),
    "bloom": ("bloom", {}),
    "bloom-six-heads": ("bloom", {"num_attention_heads": 6, "hidden_size": 48}),
    "mpt": ("mpt", {}),
    "mpt-30b": ("mpt", {"hidden_size": 48, "num_attention_heads": 6, "attn_config": {"clip_qkv": 0.5}}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-12b": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere-plus": ("cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {**WINDOWED, "logit_scale": 0.5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "glm": ("glm", {"attention_bias": True}),
    "glm4": ("glm4", {"attention_bias": True}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "nemotron": ("nemotron", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "ministral3": ("ministral3", {"rope_parameters": GROWTH}),
    "ministral": ("ministral", WINDOWED),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "qwen3-moe-windowed": ("qwen3_moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3}),
    "olmoe-clip": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "clip_qkv": 0.4}),
    "deepseek-v2": ("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek-v3": ("deepseek_v3", LATENT),
    "glm-4.7-flash": ("glm4_moe_lite", {**LATENT, "n_group": 1, "topk_group": 1}),
    "glm-4.7-flash-listed": ("glm4_moe_lite", {**LATENT, "mlp_layer_types": ["sparse", "dense"]}),
    "deepseek-v2-biases": ("deepseek_v2", {**LATENT, "attention_bias": True}),
    "deepseek-v3-biases": ("deepseek_v3", {**LATENT, "attention_bias": True}),
    "deepseek-v3-no-q-rank": ("deepseek_v3", {**LATENT, "attention_bias": True, "q_lora_rank": None}),
    "deepseek-v3-halves": ("deepseek_v3", {**LATENT, "rope_interleave": False}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {**LATENT, "rope_parameters": {"rope_theta": 1000.0, **YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "glm4-moe": ("glm4_moe", {**SIGMOID, "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 1}),
    "glm4-moe-groups": ("glm4_moe", {**SIGMOID, "n_group": 2, "topk_group": 1}),
    "dots1": ("dots1", {**SIGMOID, **WINDOWED, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}),
    "seed-oss": ("seed_oss", {"attention_out_bias": False}),
    "ernie4.5": ("ernie4_5", {"use_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}),
    "exaone4-32b": ("exaone4", {**WINDOWED, "sliding_window_pattern": 2}),
    "gpt-oss": (
        "gpt_oss",
        {
            **WINDOWED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 1000.0, **YARN, "truncate": False},
        },
    ),
    "granite-moe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.3}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    family, overrides = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(folder, family, **overrides), folder


def skip_what_native_repeats(folder: Path, ops: str) -> None:
    """A model that the compiled kernels cannot run takes the operations of `cpu`, which are tested by that name."""
    if ops == "native" and not compilable(model_spec(json.loads((folder / "config.json").read_text()))[0]):
        pytest.skip("not for the compiled kernels")


def expected_logits(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("ops", ["cpu", "reference", "native"])
def test_prefill_equals_transformers(case: tuple[Any, Path], ops: str) -> None:
    reference, folder = case
    skip_what_native_repeats(folder, ops)
    expected = expected_logits(reference, IDS)
    assert expected.std() > 0.1  # lively enough that a wrong weight shows
    torch.testing.assert_close(run(load(folder, ops=ops), IDS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ops", ["cpu", "native"])
def test_chunked_prefill_and_decode_equal_transformers(case: tuple[Any, Path], ops: str) -> None:
    reference, folder = case
    skip_what_native_repeats(folder, ops)
    logits = run(load(folder, ops=ops), IDS, chunks=[11, 1, 16, 7, 1, 1, 1, 1, 1])
    torch.testing.assert_close(logits, expected_logits(reference, IDS), atol=1e-4, rtol=1e-4)


def test_greedy_tokens_equal_generate(case: tuple[Any, Path]) -> None:
    reference, folder = case
    prompt = IDS[:12]
    with torch.inference_mode():
        out = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    model = load(folder, max_model_len=len(prompt) + 16)  # below LongRoPE's original context, as transformers sees it
    assert greedy(model, prompt, 16) == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_rope_beyond_the_original_context(tmp_path: Path, kind: str) -> None:
    """Fixed by the longest length served, it equals transformers on a sequence of that length."""
    rope = LONGROPE if kind == "longrope" else {"rope_type": "dynamic", "factor": 2.0}
    reference = save_tiny(tmp_path, "llama", max_position_embeddings=32, rope_parameters={"rope_theta": 100.0, **rope})
    logits = run(load(tmp_path, max_model_len=len(IDS)), IDS)
    torch.testing.assert_close(logits, expected_logits(reference, IDS), atol=1e-4, rtol=1e-4)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen2", max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(run(load(tmp_path), IDS), expected_logits(reference, IDS), atol=1e-4, rtol=1e-4)


def test_config_in_the_older_format(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama", rope_parameters={"rope_theta": 500.0, **LLAMA3})
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    torch.testing.assert_close(run(load(tmp_path, hf_config=config), IDS), expected_logits(reference, IDS), atol=1e-4, rtol=1e-4)
    rope["type"] = rope.pop("rope_type")
    torch.testing.assert_close(run(load(tmp_path, hf_config=config), IDS), expected_logits(reference, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ops", ["cpu", "native"])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoint_runs_in_float32(tmp_path: Path, stored: torch.dtype, ops: str) -> None:
    save_tiny(tmp_path, "llama").to(stored).save_pretrained(tmp_path)
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(run(load(tmp_path, ops=ops), IDS), expected_logits(reference, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_running_in_half_precision(tmp_path: Path, dtype: Any) -> None:
    expected = expected_logits(save_tiny(tmp_path, "qwen3"), IDS)
    model = load(tmp_path, dtype=dtype)
    logits = run(model, IDS)
    assert logits.dtype == torch.float32
    error = (logits - expected).abs().mean() / expected.abs().mean()
    assert error < (0.01 if dtype == "float16" else 0.06)


def test_sequences_of_one_step_do_not_touch_each_other(tmp_path: Path) -> None:
    """Tokens of two sequences in one step give what each gives alone."""
    save_tiny(tmp_path, "qwen3")
    model = load(tmp_path)
    first, second = IDS[:9], IDS[9:23]

    class Both:
        def __init__(self) -> None:
            self.attends = [ContiguousAttend(model.layer_specs) for _ in range(2)]

        def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            parts = [t.split([len(first), len(second)]) for t in (q, k, v)]
            return torch.cat([attend(layer, *(p[i] for p in parts)) for i, attend in enumerate(self.attends)])

    positions = torch.cat((torch.arange(len(first)), torch.arange(len(second))))
    logits = model.logits(model.forward(torch.tensor(first + second), positions, Both()))
    torch.testing.assert_close(logits, torch.cat((run(model, first), run(model, second))), atol=1e-5, rtol=1e-5)


def test_a_token_does_not_depend_on_its_company(tmp_path: Path) -> None:
    """Bit for bit, in float32 on a CPU: everything but attention works row by row."""
    save_tiny(tmp_path, "qwen3", attention_bias=True)
    model = load(tmp_path)
    ids, positions = torch.tensor(IDS), torch.arange(len(IDS))

    def itself(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + v.repeat_interleave(2, dim=1)

    alone = torch.cat([model.logits(model.forward(ids[i : i + 1], positions[i : i + 1], itself)) for i in range(len(IDS))])
    for count in (2, 3, 7, 16, 33, len(IDS)):
        assert torch.equal(model.logits(model.forward(ids[-count:], positions[-count:], itself)), alone[-count:])


@pytest.mark.parametrize("wanted", [[], [13], [4, 13, 22]])
@pytest.mark.parametrize(("name", "ops"), [("qwen3", "cpu"), ("qwen3", "native"), ("deepseek-v3", "cpu")])
def test_wanted_tokens_are_the_same_as_among_all(tmp_path: Path, name: str, ops: str, wanted: list[int]) -> None:
    """Also what the last layer leaves in the cache: the next tokens see all that came before."""
    family, overrides = CASES[name]
    save_tiny(tmp_path, family, **overrides)
    model = load(tmp_path, ops=ops)
    ids, positions = torch.tensor(IDS[:23]), torch.arange(23)
    some, whole = ContiguousAttend(model.layer_specs), ContiguousAttend(model.layer_specs)
    chosen = model.forward(ids, positions, some, torch.tensor(wanted, dtype=torch.int32))
    assert chosen.shape == (len(wanted), model.spec.hidden_size)
    torch.testing.assert_close(chosen, model.forward(ids, positions, whole)[wanted], atol=1e-5, rtol=1e-5)
    for layer in range(model.spec.num_layers):
        for mine, theirs in zip(some.cache[layer], whole.cache[layer], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path, name: str) -> None:
    """Published checkpoints of DeepSeek-V3 and GLM-4.5 have one behind the last."""
    from safetensors.torch import load_file, save_file

    family, overrides = CASES[name]
    reference = save_tiny(tmp_path, family, **overrides)
    tensors = load_file(str(tmp_path / "model.safetensors"))
    guessing = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if n.startswith("model.layers.1.")}
    guessing |= {f"model.layers.2.{n}.weight": torch.ones(32) for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
    save_file(tensors | guessing, str(tmp_path / "model.safetensors"))
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    torch.testing.assert_close(run(load(tmp_path, hf_config=config), IDS), expected_logits(reference, IDS), atol=1e-4, rtol=1e-4)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* has no place"):
        load(tmp_path, hf_config=config | {"num_nextn_predict_layers": 0})


@pytest.mark.parametrize("name", ["falcon-rw-1b", "mpt-30b", "gpt2-scale-by-layer", "phi-qk-norm", "olmoe-clip"])
def test_greedy_tokens_through_the_engine(tmp_path: Path, name: str) -> None:
    """Over the paged cache of the device's own attention, in chunks, beside others."""
    family, overrides = CASES[name]
    reference = save_tiny(tmp_path, family, **overrides)
    prompts = [IDS[:5], IDS, IDS[3:20]]
    with LLM(
        str(tmp_path), device="cpu", threads=1, skip_tokenizer_init=True, num_gpu_blocks_override=64, max_num_batched_tokens=16,
        max_num_seqs=4, kv_cache_dtype="float32", cpu_activations="float32",
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        )
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            out = reference.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output.outputs[0].token_ids == out[0, len(ids) :].tolist()


def save_alias(folder: Path, model_type: str, **more: Any) -> Any:
    """A model whose config class has another class of model, as transformers saves it."""
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | more))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("exaone", {}),
        ("internlm3", {}),
        ("iquestcoder", {}),
        ("gpt-sw3", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("sarvam_mla", LATENT),
    ],
)
def test_models_that_transformers_saves_under_the_name_of_another(tmp_path: Path, model_type: str, more: dict[str, Any]) -> None:
    if model_type == "sarvam_mla":
        more = more | {"head_dim": 4}
    reference = save_alias(tmp_path, model_type, **more)
    torch.testing.assert_close(run(load(tmp_path), IDS), expected_logits(reference, IDS), atol=1e-4, rtol=1e-4)


def test_exaone_as_it_is_published(tmp_path: Path) -> None:
    """With its own class and its own names of sizes."""
    reference = save_alias(tmp_path, "exaone")
    config = json.loads((tmp_path / "config.json").read_text())
    for ours, theirs in (
        ("num_hidden_layers", "num_layers"),
        ("hidden_act", "activation_function"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ):
        config[theirs] = config.pop(ours)
    config["architectures"] = ["ExaoneForCausalLM"]
    torch.testing.assert_close(run(load(tmp_path, hf_config=config), IDS), expected_logits(reference, IDS), atol=1e-4, rtol=1e-4)


def test_what_our_code_does_not_do_may_run_through_transformers(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama", hidden_act="tanh")
    with pytest.raises(UnsupportedModel, match=r"hidden_act 'tanh' is not supported.*--model-impl transformers"):
        load(tmp_path)
    with LLM(str(tmp_path), device="cpu", model_impl="transformers", skip_tokenizer_init=True, num_gpu_blocks_override=16) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        found = llm.generate({"prompt_token_ids": IDS[:20]}, params)[0].outputs[0].token_ids
    with torch.inference_mode():
        out = reference.generate(torch.tensor([IDS[:20]]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(found) == out[0, 20:].tolist()


def test_what_a_short_sequence_does_not_notice_is_left_out(tmp_path: Path) -> None:
    """Ministral 3's queries grow from a length on: up to it, kernels run that know nothing of that."""
    save_tiny(tmp_path, "ministral3", rope_parameters=GROWTH)
    spec, _ = model_spec(json.loads((tmp_path / "config.json").read_text()))
    length = GROWTH["original_max_position_embeddings"]
    assert not compilable(spec.up_to(length + 1))
    assert compilable(spec.up_to(length))
    ids = IDS[:length]
    torch.testing.assert_close(run(load(tmp_path, max_model_len=length), ids), run(load(tmp_path), ids), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(run(load(tmp_path, max_model_len=length, ops="native"), ids), run(load(tmp_path), ids), atol=1e-3, rtol=1e-3)
