"""Low-bit models on a GPU through the whole engine: captured steps, prompts of any length, and the tools' own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
MADE = ("auto_awq", "auto_gptq", "w4a16_gptq", "w8a8_int8", "fp8_dynamic")
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 48, "gpu_memory_utilization": 0.05}


@pytest.mark.parametrize("name", MADE)
def test_prompt_scores_are_those_of_the_tool(name: str) -> None:
    logits = load_file(FIXTURES / "logits.safetensors")
    ids = logits["ids"].tolist()
    expected = logits[name].log_softmax(-1)[:-1].gather(1, logits["ids"][1:, None])[:, 0]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    with LLM(str(FIXTURES / name), **SETTINGS) as llm:
        rows = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs
    assert rows is not None
    ours = torch.tensor([row[token].logprob for token, row in zip(ids[1:], rows[1:], strict=True) if row is not None])
    assert float((ours - expected).abs().mean()) < (0.4 if name in ("w8a8_int8", "fp8_dynamic") else 0.1)  # bf16, on a model of noise


@pytest.mark.parametrize("name", MADE)
def test_graphs_change_nothing(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [{"prompt_token_ids": torch.randint(3, 270, (n,), generator=generator).tolist()} for n in (3, 40, 150, 200)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=20, detokenize=False)
    found = []
    for eager in (False, True):
        with LLM(str(FIXTURES / name), enforce_eager=eager, **SETTINGS) as llm:
            found.append([o.outputs[0].logprobs for o in llm.generate(prompts, params, use_tqdm=False)])
    # Graphs pad rows, which may choose another kernel, and of a model of noise the best tokens are nearly alike: up to where the two
    # part, a token is as probable in both, and there either would do.
    compared = 0
    for captured, eagerly in zip(*found, strict=True):
        assert captured is not None and eagerly is not None
        for one, two in zip(captured, eagerly, strict=True):
            best, other = next(iter(one)), next(iter(two))
            compared += 1
            assert best in two and abs(one[best].logprob - two[best].logprob) < 0.25
            if best != other:
                assert abs(two[best].logprob - two[other].logprob) < 0.25
                break
    assert compared >= 8


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_rounded_while_loading_takes_half(method: str, tmp_path: Path) -> None:
    shape = json.loads((FIXTURES / "auto_awq" / "config.json").read_text())
    del shape["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(shape | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}))
    sizes = []
    for asked in (None, method):
        with LLM(str(tmp_path), load_format="dummy", quantization=asked, **SETTINGS) as llm:
            out = llm.generate({"prompt_token_ids": list(range(3, 200))}, SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
            assert out[0].outputs[0].finish_reason == "length"
            sizes.append(llm.ready_report.weights_bytes)
    assert sizes[1] < 0.6 * sizes[0]


def made_up(folder: Path, quantization: dict[str, Any] | None) -> Path:
    shape = json.loads((FIXTURES / "auto_awq" / "config.json").read_text())
    del shape["quantization_config"]
    shape |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(shape | ({} if quantization is None else {"quantization_config": quantization})))
    return folder


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "4-bit groups"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "4-bit groups"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "8-bit floating point"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "8-bit floating point"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "4-bit tables"),
        ({"quant_method": "int8"}, "8-bit integers"),
    ],
)
def test_made_up_weights_are_stored_as_the_config_says(quantization: dict[str, Any], kind: str, tmp_path: Path) -> None:
    with LLM(str(made_up(tmp_path, quantization)), load_format="dummy", **SETTINGS) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)
        out = llm.generate([{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 40, 250)], params, use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in out] == ["length"] * 3
        assert kind in llm.ready_report.weights_kinds
        assert not [w for w in llm.ready_report.warnings if "dequantised" in w]


def test_scales_found_while_running(tmp_path: Path) -> None:
    """Prompts of more tokens than are looked at, then decodes by graphs: as close to a bfloat16 cache as float8 is."""
    folder = made_up(tmp_path, None)
    generator = torch.Generator().manual_seed(5)
    prompts = [{"prompt_token_ids": torch.randint(3, 270, (n,), generator=generator).tolist()} for n in (100, 120, 90, 125, 110, 80)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False, prompt_logprobs=1)
    found = []
    for settings in ({}, {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}):
        with LLM(str(folder), load_format="dummy", **(SETTINGS | settings)) as llm:
            assert not [w for w in llm.ready_report.warnings if "scale of 1.0" in w]
            rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        rows = [(p["prompt_token_ids"], o.prompt_logprobs) for p, o in zip(prompts, rounds[1], strict=True)]
        found.append(torch.tensor([row[t].logprob for ids, scored in rows for t, row in zip(ids[1:], scored[1:], strict=True)]))
    assert found[0].isfinite().all() and float((found[0] - found[1]).abs().mean()) < 0.1


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_XS"])
def test_gguf_stays_packed(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.models.test_gguf_packed import packed_and_plain

    scores = []
    for path in packed_and_plain(tmp_path, lambda _: name):
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False, prompt_logprobs=1)
        ids = list(range(5, 105))
        with LLM(str(path), dtype="bfloat16", **SETTINGS) as llm:
            rows = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs
            kinds = llm.ready_report.weights_kinds
        assert rows is not None
        scores.append(torch.tensor([row[t].logprob for t, row in zip(ids[1:], rows[1:], strict=True) if row is not None]))
        assert any(kind.startswith(("4-bit", "8-bit")) for kind in kinds) == (path.name == "packed.gguf")
    assert float((scores[0] - scores[1]).abs().mean()) < 0.1
