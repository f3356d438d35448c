"""Models that pool against transformers: hidden states pooled by hand, classes and scores, batches of mixed lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import octavo
from octavo import LLM, PoolingParams, SamplingParams
from octavo.errors import CheckpointError, InvalidRequest, OctavoError, UnsupportedModel
from octavo.models.encoder import relative_buckets
from octavo.weights.safetensors import open_safetensors
from tests.support.tiny_models import save_tiny
from tests.support.tiny_pooling import save_pooling, write_modules, write_tokenizer

TEXTS = ["a man is eating food", "the cat runs", "the stock market fell today the dog is slow a man runs fast", "bread"]

ENCODERS: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "RobertaModel": {"pad_token_id": 1},
    "XLMRobertaModel": {"pad_token_id": 1, "type_vocab_size": 1},
    "DistilBertModel": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "ElectraModel": {"embedding_size": 16},
    "MPNetModel": {"pad_token_id": 1},
    "ModernBertModel": {"num_hidden_layers": 4, "local_attention": 6, "global_attn_every_n_layers": 2, "norm_bias": True},
    "NomicBertModel": {},
    "GteModel": {"type_vocab_size": 2, "pad_token_id": 0},
}
DECODERS: dict[str, dict[str, Any]] = {
    "LlamaModel": {"num_key_value_heads": 2},
    "Qwen3Model": {"num_key_value_heads": 2, "head_dim": 8},
    "MistralModel": {"num_key_value_heads": 2, "sliding_window": 5},
    "Gemma2Model": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attn_logit_softcapping": 2.0,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GPT2Model": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), device="cpu", threads=1, **settings)


def hidden_states(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0]


def pooled(states: torch.Tensor, kind: str) -> torch.Tensor:
    match kind:
        case "cls_token":
            return states[0]
        case "lasttoken":
            return states[-1]
        case "max_tokens":
            return states.max(0).values
        case "mean_sqrt_len_tokens":
            return states.sum(0) / len(states) ** 0.5
        case "weightedmean_tokens":
            weights = torch.arange(1.0, len(states) + 1)
            return (states * weights[:, None]).sum(0) / weights.sum()
    return states.mean(0)


@pytest.mark.parametrize("architecture", [*ENCODERS, *DECODERS])
def test_embeddings_equal_transformers(tmp_path: Path, architecture: str) -> None:
    model = save_pooling(tmp_path, architecture, **(ENCODERS | DECODERS)[architecture])
    kind = "mean_tokens" if architecture in ENCODERS else "lasttoken"
    with open_llm(tmp_path) as llm:
        outputs = llm.embed(TEXTS)
        for output in outputs:
            expected = pooled(hidden_states(model, output.prompt_token_ids), kind)
            assert expected.std() > 0.1
            torch.testing.assert_close(
                torch.tensor(output.outputs.embedding), torch.nn.functional.normalize(expected, dim=0), atol=1e-5, rtol=1e-4
            )
        # Alone or with others, a text's embedding is the same.
        alone = llm.embed(TEXTS[1])[0].outputs.embedding
        np.testing.assert_allclose(alone, outputs[1].outputs.embedding, atol=1e-6)


@pytest.mark.parametrize("kind", ["cls_token", "mean_tokens", "max_tokens", "lasttoken", "mean_sqrt_len_tokens", "weightedmean_tokens"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_as_the_files_beside_the_model_say(tmp_path: Path, kind: str, normalize: bool) -> None:
    model = save_pooling(tmp_path, "BertModel")
    write_modules(tmp_path, kind, normalize=normalize)
    with open_llm(tmp_path) as llm:
        output = llm.embed(TEXTS[0])[0]
        expected = pooled(hidden_states(model, output.prompt_token_ids), kind)
        if normalize:
            expected = torch.nn.functional.normalize(expected, dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        {
            "pooling_mode_lasttoken": True,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_cls_token": True,
            "pooling_mode_max_tokens": False,
        },
        {"pooling_mode": ["cls", "mean", "lasttoken"]},
        {"pooling_mode": ["lasttoken", "cls", "mean"]},
    ],
)
def test_several_kinds_of_pooling_are_put_one_behind_the_other(tmp_path: Path, config: dict[str, Any]) -> None:
    model = save_pooling(tmp_path, "BertModel")
    write_modules(tmp_path, "mean_tokens", normalize=True)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **config}))
    with open_llm(tmp_path) as llm:
        assert llm.ready_report.embedding_size == 96
        output = llm.embed(TEXTS[0])[0]
        states = hidden_states(model, output.prompt_token_ids)
        # Flags have an order of their own, a list keeps its.
        order = config.get("pooling_mode", ["cls", "mean", "lasttoken"])
        parts = [pooled(states, {"cls": "cls_token", "mean": "mean_tokens"}.get(kind, kind)) for kind in order]
        expected = torch.nn.functional.normalize(torch.cat(parts), dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=1e-4)
        assert llm.encode(TEXTS[0], pooling_task="token_embed")[0].outputs.data.shape == (len(states), 32)


def test_parameters_of_a_request(tmp_path: Path) -> None:
    model = save_pooling(tmp_path, "BertModel")
    write_modules(tmp_path, "mean_tokens", normalize=True, max_length=8)
    with open_llm(tmp_path) as llm:
        assert llm.ready_report.max_model_len == 8
        short = llm.embed(TEXTS[1], pooling_params=PoolingParams(dimensions=5))[0].outputs.embedding
        whole = np.array(llm.embed(TEXTS[1], pooling_params=PoolingParams(normalize=False))[0].outputs.embedding)
        np.testing.assert_allclose(short, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)
        tokens = llm.encode(TEXTS[1], PoolingParams(normalize=False), pooling_task="token_embed")[0]
        expected = hidden_states(model, tokens.prompt_token_ids)
        torch.testing.assert_close(torch.tensor(tokens.outputs.data), expected, atol=1e-5, rtol=1e-4)
        with pytest.raises(InvalidRequest, match="at most 8 tokens"):
            llm.embed(TEXTS[2])
        cut = llm.embed(TEXTS[2], truncate_prompt_tokens=-1)[0].prompt_token_ids
        assert len(cut) == 8
        assert (cut[0], cut[-1]) == (2, 3)  # [CLS] and [SEP] stay
        with pytest.raises(InvalidRequest, match="dimensions=33"):
            llm.embed("a", pooling_params=PoolingParams(dimensions=33))
        with pytest.raises(InvalidRequest, match="cannot do 'classify'"):
            llm.classify("a")
        with pytest.raises(InvalidRequest, match="runs for pooling"):
            llm.generate("a")
        with pytest.raises(InvalidRequest, match="empty"):
            llm.embed([[]])


def test_a_dense_layer_behind_the_pooling(tmp_path: Path) -> None:
    model = save_pooling(tmp_path, "BertModel")
    write_modules(tmp_path, "mean_tokens", normalize=False)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    dense = tmp_path / "2_Dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps({"activation_function": "torch.nn.modules.activation.Tanh"}))
    weight, bias = torch.randn(6, 32), torch.randn(6)
    save_file({"linear.weight": weight, "linear.bias": bias}, str(dense / "model.safetensors"))
    with open_llm(tmp_path) as llm:
        assert llm.ready_report.embedding_size == 6
        output = llm.embed(TEXTS[0])[0]
        expected = torch.tanh(weight @ hidden_states(model, output.prompt_token_ids).mean(0) + bias)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=1e-4)


CLASSIFIERS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {},
    "RobertaForSequenceClassification": {"pad_token_id": 1},
    "DistilBertForSequenceClassification": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "MPNetForSequenceClassification": {"pad_token_id": 1},
    "ModernBertForSequenceClassification": {
        "classifier_pooling": "mean",
        "classifier_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "NomicBertForSequenceClassification": {},
    "GteForSequenceClassification": {"type_vocab_size": 0},
    "LlamaForSequenceClassification": {"num_key_value_heads": 2},
    "Qwen2ForSequenceClassification": {"num_key_value_heads": 2},
}


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_classes_equal_transformers(tmp_path: Path, architecture: str) -> None:
    model = save_pooling(tmp_path, architecture, num_labels=3, **CLASSIFIERS[architecture])
    with open_llm(tmp_path) as llm:
        for output in llm.classify(TEXTS):
            with torch.inference_mode():
                expected = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0].softmax(-1)
            assert output.outputs.num_classes == 3
            torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, atol=1e-5, rtol=1e-4)
        with pytest.raises(InvalidRequest, match="has 3 classes"):
            llm.score("a", "man")


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_scores_of_pairs_equal_transformers(tmp_path: Path, activation: str | None) -> None:
    model = save_pooling(tmp_path, "BertForSequenceClassification", num_labels=1)
    if activation is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "sentence_transformers": {"activation_fn": activation}}))
    with open_llm(tmp_path) as llm:
        for output in llm.score(TEXTS[0], TEXTS[1:]):
            ids = torch.tensor([output.prompt_token_ids])
            second = (ids[0] == 3).nonzero()[0].item() + 1
            types = (torch.arange(ids.shape[1]) >= second).long()[None]
            with torch.inference_mode():
                expected = model(input_ids=ids, token_type_ids=types).logits[0, 0]
            assert output.outputs.score == pytest.approx(float(expected if activation else expected.sigmoid()), abs=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pickled", [True, False])
def test_a_language_model_scores_by_its_answers(tmp_path: Path, tied: bool, pickled: bool) -> None:
    """As Qwen3's rerankers are published: sigmoid(yes - no) of the next token."""
    write_tokenizer(tmp_path)
    model = save_tiny(tmp_path, "qwen3", vocab_size=21, tie_word_embeddings=tied)
    if pickled:
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["slow", "fast"]}
    no, yes = (json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"][word] for word in ("slow", "fast"))
    for more in ({"is_original_qwen3_reranker": True}, {"method": "from_2_way_softmax"}, {}):
        with open_llm(tmp_path, hf_overrides=overrides | more) as llm:
            output = llm.score("a man", "is eating")[0]
        with torch.inference_mode():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        assert output.outputs.score == pytest.approx(float(logits[[no, yes]].softmax(0)[1]), abs=1e-5)
    with open_llm(tmp_path, hf_overrides=overrides | {"classifier_from_token": ["cat", "dog", "fast"]}) as llm:
        output = llm.classify("a man")[0]
        ids = torch.tensor([output.prompt_token_ids])
    with torch.inference_mode():
        logits = model(ids).logits[0, -1, [16, 17, 19]]
    assert output.outputs.probs == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"classifier_from_token": "yes"}, "must be a list of tokens"),
        ({"classifier_from_token": ["yes"]}, "has no token 'yes'"),
        ({"classifier_from_token": ["a", "man", "is"], "method": "from_2_way_softmax"}, "takes two tokens"),
        ({"classifier_from_token": ["a", "man"], "method": "guess"}, "'guess' is not supported"),
    ],
)
def test_answers_that_there_are_not(tmp_path: Path, entries: dict[str, Any], says: str) -> None:
    write_tokenizer(tmp_path)
    save_tiny(tmp_path, "qwen3", vocab_size=21)
    with pytest.raises(OctavoError, match=says):
        open_llm(tmp_path, hf_overrides={"architectures": ["Qwen3ForSequenceClassification"], **entries})


def test_scores_of_embeddings_are_cosines(tmp_path: Path) -> None:
    save_pooling(tmp_path, "BertModel")
    with open_llm(tmp_path) as llm:
        vectors = [np.array(o.outputs.embedding) for o in llm.embed(TEXTS[:3])]
        scores = [o.outputs.score for o in llm.score(TEXTS[0], TEXTS[1:3])]
        assert scores == pytest.approx([vectors[0] @ vectors[1], vectors[0] @ vectors[2]], abs=1e-6)
        assert llm.score("cat", "cat")[0].outputs.score == pytest.approx(1.0)
        with pytest.raises(InvalidRequest, match="text_1 has 2"):
            llm.score(["a", "man"], ["a", "man", "is"])


def test_a_model_that_generates_can_be_run_for_pooling(tmp_path: Path) -> None:
    save_pooling(tmp_path, "LlamaForCausalLM", num_key_value_heads=2)
    with open_llm(tmp_path) as llm, pytest.raises(InvalidRequest, match="--runner pooling"):
        llm.embed("a")
    with open_llm(tmp_path, runner="pooling") as llm:
        assert len(llm.embed("a man")[0].outputs.embedding) == 32


def test_prompts_that_a_model_was_trained_with_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_pooling(tmp_path, "BertModel")
    write_modules(tmp_path, "mean_tokens", normalize=True)
    prompts = {"query": "search_query: ", "document": ""}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    with caplog.at_level("INFO", logger="octavo"), open_llm(tmp_path) as llm:
        assert llm.embed("food")[0].prompt_token_ids == [2, 9, 3]
    (told,) = [r.getMessage() for r in caplog.records if "in front of a text" in r.getMessage()]
    assert "query 'search_query: '." in told
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": [1], "version": 3}))
    with open_llm(tmp_path) as llm:
        assert llm.embed("food")


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    save_pooling(tmp_path, "BertModel")
    with pytest.raises(UnsupportedModel, match="encoder"):
        open_llm(tmp_path, runner="generate")
    write_modules(tmp_path, "mean_tokens", normalize=False)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_median_tokens": True}))
    with pytest.raises(UnsupportedModel, match=r"must choose of .*weightedmean.*it chooses pooling_mode_median_tokens"):
        open_llm(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "median"}))
    with pytest.raises(UnsupportedModel, match=r"'median' is not supported.*weightedmean"):
        open_llm(tmp_path)
    none = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": False, "pooling_mode_max_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **none}))
    with pytest.raises(UnsupportedModel, match="chooses no pooling"):
        open_llm(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "../.."}]))
    with pytest.raises(CheckpointError, match="only folders inside"):
        open_llm(tmp_path)


@pytest.mark.parametrize(("rows", "warns"), [(128, False), (277, False), (278, True), (4096, True)])
def test_a_tokenizer_that_is_much_smaller_than_the_vocabulary_is_told_of(
    tmp_path: Path, rows: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    save_pooling(tmp_path, "LlamaForCausalLM", num_key_value_heads=2, vocab_size=rows)
    with open_llm(tmp_path, num_gpu_blocks_override=20) as llm:
        llm.generate("a man", SamplingParams(max_tokens=2))
    told = [r.getMessage() for r in caplog.records if "The tokenizer has" in r.getMessage()]
    assert bool(told) == warns
    assert not warns or f"The tokenizer has 21 tokens and {tmp_path} {rows} (vocab_size)" in told[0]


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save_pooling(tmp_path, "LlamaForCausalLM", num_key_value_heads=2)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["surplus"] = 500
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with open_llm(tmp_path) as llm:
        assert llm.generate("a man", SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequest, match="belong together"):
            llm.generate("a surplus", SamplingParams(max_tokens=1))
    vocab |= {f"more{i}": 600 + i for i in range(300)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="301 tokens that"):
        open_llm(tmp_path)


def test_parameters_are_checked_where_they_are_made() -> None:
    for bad in ({"dimensions": 0}, {"dimensions": 1.5}, {"task": "sing"}, {"normalize": "yes"}):
        with pytest.raises(InvalidRequest) as caught:
            octavo.PoolingParams(**bad)
        assert caught.value.param == next(iter(bad))


@pytest.mark.parametrize("architecture", ["BertModel", "LlamaModel"])
def test_weights_rounded_while_loading(tmp_path: Path, architecture: str) -> None:
    save_pooling(tmp_path, architecture, **(ENCODERS | DECODERS)[architecture])
    with open_llm(tmp_path) as llm:
        expected = np.array([o.outputs.embedding for o in llm.embed(TEXTS, use_tqdm=False)])
    with open_llm(tmp_path, quantization="int8") as llm:
        rounded = np.array([o.outputs.embedding for o in llm.embed(TEXTS, use_tqdm=False)])
    assert 1e-6 < np.abs(rounded - expected).max() < 0.1


def rewrite(folder: Path, config: dict[str, Any], drop: tuple[str, ...] = ()) -> None:
    """Change a folder's config.json."""
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in old.items() if k not in drop} | config))


def embeddings_equal(folder: Path, model: Any, **settings: Any) -> None:
    with open_llm(folder, **settings) as llm:
        for output in llm.embed(TEXTS):
            expected = torch.nn.functional.normalize(hidden_states(model, output.prompt_token_ids).mean(0), dim=0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["NomicBertModel", "GteModel"])
def test_names_of_newer_checkpoints(tmp_path: Path, architecture: str) -> None:
    model = save_pooling(tmp_path, architecture, type_vocab_size=2)
    model.save_pretrained(tmp_path, save_original_format=False)
    names = {t.name for t in open_safetensors(str(tmp_path / "model.safetensors"))}
    assert "layers.0.self_attn.q_proj.weight" in names
    embeddings_equal(tmp_path, model)


@pytest.mark.parametrize("gate", ["swiglu", "geglu"])
def test_nomics_own_config(tmp_path: Path, gate: str) -> None:
    """It names sizes as GPT-2's does; code beside the model is neither needed nor run."""
    model = save_pooling(tmp_path, "NomicBertModel", hidden_act="silu" if gate == "swiglu" else "gelu")
    own = {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64, "layer_norm_epsilon": 1e-12, "activation_function": gate,
        "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False,
        "use_rms_norm": False, "parallel_block": False, "auto_map": {"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"},
    }  # fmt: skip
    usual = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps", "rope_parameters",
        "max_position_embeddings", "head_dim",
    )  # fmt: skip
    rewrite(tmp_path, own, drop=usual)
    (tmp_path / "modeling_hf_nomic_bert.py").write_text("raise RuntimeError('run')")
    embeddings_equal(tmp_path, model)
    with open_llm(tmp_path) as llm:
        assert llm.ready_report.max_model_len == 64
    rewrite(tmp_path, {"rotary_scaling_factor": 2, "max_trained_positions": 40})
    with open_llm(tmp_path) as llm:
        assert llm.ready_report.max_model_len == 40, "farther off, what a text gets depends on how long it is"
    for bad in ({"prenorm": True}, {"moe_every_n_layers": 2, "num_experts": 8}, {"rotary_emb_fraction": 0}, {"activation_function": "glu"}):
        kept = (tmp_path / "config.json").read_text()
        rewrite(tmp_path, bad)
        with pytest.raises(UnsupportedModel, match=next(iter(bad))):
            open_llm(tmp_path)
        (tmp_path / "config.json").write_text(kept)


def test_gtes_own_config_and_its_scaling(tmp_path: Path) -> None:
    """ "ntk" with a factor f is a base f times as large, and positions divided by f ** (2 / head_dim)."""
    factor, head_dim = 4.0, 8
    rope = {"rope_type": "linear", "rope_theta": 20000.0 * factor, "factor": factor ** (2 / head_dim)}
    model = save_pooling(tmp_path, "GteModel", type_vocab_size=1, pad_token_id=0, rope_parameters=rope)
    own = {
        "architectures": ["NewModel"], "model_type": "new", "rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": factor},
        "position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True,
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    }  # fmt: skip
    rewrite(tmp_path, own, drop=("rope_parameters",))
    embeddings_equal(tmp_path, model)
    for bad in ({"position_embedding_type": "absolute"}, {"layer_norm_type": "rms_norm"}):
        kept = (tmp_path / "config.json").read_text()
        rewrite(tmp_path, bad)
        with pytest.raises(UnsupportedModel, match=next(iter(bad))):
            open_llm(tmp_path)
        (tmp_path / "config.json").write_text(kept)


def test_scores_by_a_gte_reranker(tmp_path: Path) -> None:
    """Its weights have a prefix of their own, `new.`."""
    model = save_pooling(tmp_path, "GteForSequenceClassification", type_vocab_size=1, num_labels=1)
    rewrite(tmp_path, {"architectures": ["NewForSequenceClassification"], "model_type": "new"})
    tensors = load_file(str(tmp_path / "model.safetensors"))
    save_file({name.replace("gte.", "new.", 1): t for name, t in tensors.items()}, str(tmp_path / "model.safetensors"))
    assert any(name.startswith("gte.") for name in tensors)
    with open_llm(tmp_path) as llm:
        for output in llm.score(TEXTS[0], TEXTS[1:]):
            with torch.inference_mode():
                expected = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0, 0].sigmoid()
            assert output.outputs.score == pytest.approx(float(expected), abs=1e-5)


def test_modern_berts_older_config(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "local_attention": 6, "global_attn_every_n_layers": 3, "max_position_embeddings": 64}
    model = save_pooling(tmp_path, "ModernBertModel", global_rope_theta=50000.0, local_rope_theta=300.0, **sizes)
    older = {**sizes, "global_rope_theta": 50000.0, "local_rope_theta": 300.0, "layer_norm_eps": 1e-5}
    rewrite(tmp_path, older, drop=("layer_types", "rope_parameters"))
    embeddings_equal(tmp_path, model)


def test_relative_buckets_equal_mpnets() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distance = torch.arange(-600, 601)
    for buckets in (32, 16):
        assert torch.equal(relative_buckets(distance, buckets), MPNetEncoder.relative_position_bucket(distance, buckets))


def test_embedding_gemma_with_its_layers_behind_the_pooling(tmp_path: Path) -> None:
    """Mean, a wide layer, a narrow one, length 1; windows to both sides."""
    sizes = {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
    model = save_pooling(tmp_path, "Gemma3TextModel", use_bidirectional_attention=True, **sizes)
    write_modules(tmp_path, "mean_tokens", normalize=False, max_length=64)
    modules = json.loads((tmp_path / "modules.json").read_text())
    weights = (torch.randn(128, 32), torch.randn(32, 128))
    for i, weight in enumerate(weights, 2):
        modules.append({"idx": i, "name": str(i), "path": f"{i}_Dense", "type": "sentence_transformers.models.Dense"})
        (tmp_path / f"{i}_Dense").mkdir()
        config = {"in_features": weight.shape[1], "out_features": len(weight), "bias": False}
        config["activation_function"] = "torch.nn.modules.linear.Identity"
        (tmp_path / f"{i}_Dense" / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": weights[0]}, str(tmp_path / "2_Dense" / "model.safetensors"))
    torch.save({"linear.weight": weights[1]}, tmp_path / "3_Dense" / "pytorch_model.bin")
    modules.append({"idx": 4, "name": "4", "path": "4_Normalize", "type": "sentence_transformers.models.Normalize"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with open_llm(tmp_path) as llm:
        assert llm.ready_report.embedding_size == 32
        for output in llm.embed(TEXTS):
            states = hidden_states(model, output.prompt_token_ids)
            expected = torch.nn.functional.normalize(weights[1] @ (weights[0] @ states.mean(0)), dim=0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-5, rtol=1e-4)


def test_a_decoder_whose_tokens_see_those_behind_them_does_not_generate(tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    model = save_pooling(tmp_path, "Gemma3ForCausalLM", use_bidirectional_attention=True, **sizes)
    with pytest.raises(UnsupportedModel, match=r"use_bidirectional_attention.*--runner pooling"):
        open_llm(tmp_path, num_gpu_blocks_override=20)
    with open_llm(tmp_path, runner="pooling") as llm:
        output = llm.embed(TEXTS[2])[0]
    expected = hidden_states(model.model, output.prompt_token_ids)[-1]
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), torch.nn.functional.normalize(expected, dim=0), atol=1e-5, rtol=1e-4)
