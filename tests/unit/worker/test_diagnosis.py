"""Looking for the layer that breaks: seldom, and without harm; and advice that applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.attention.base import LayerSpec
from octavo.attention.prompt import PromptAttention
from octavo.models.compiled import CompiledDecoder
from octavo.models.loader import load_model
from octavo.ops.cpu import abi
from octavo.ops.cpu.cpu_program import CpuProgram
from octavo.ops.registry import load_ops
from octavo.protocol.params import SamplingParams
from octavo.sampling.state import SamplerState
from octavo.worker import native_look
from octavo.worker.diagnosis import ATTEMPTS, Circumstances, Diagnosis
from octavo.worker.tensor_look import look_into
from tests.models.contiguous import load
from tests.support.engine_configs import engine_config
from tests.support.step_plans import slot_init
from tests.support.tiny_models import save_tiny


class Counted:
    """A model that counts its passes, and may fail."""

    def __init__(self, model: Any, *, fails: bool = False) -> None:
        self.model = model
        self.layer_specs = model.layer_specs
        self.passes = 0
        self.fails = fails

    def forward(self, *arguments: Any) -> torch.Tensor:
        self.passes += 1
        if self.fails:
            raise torch.OutOfMemoryError
        hidden: torch.Tensor = self.model.forward(*arguments)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.logits(hidden)
        return logits


FLOAT32 = Circumstances("float32", "float32", "model.gguf")


def look(model: Counted, circumstances: Circumstances = FLOAT32, sampling: SamplingParams | None = None) -> Diagnosis:
    cpu = torch.device("cpu")
    state = SamplerState(2, cpu)
    if sampling is not None:
        state.enter([slot_init(1, [5, 6, 7], [1], sampling=sampling)])
    return Diagnosis(look_into(model, cpu), lambda slot, count: np.zeros(count, np.int32), state, circumstances)  # type: ignore[arg-type]


@pytest.fixture
def sound(tmp_path: Path) -> Counted:
    save_tiny(tmp_path, "llama")
    return Counted(load(tmp_path))


def test_a_sound_model_is_looked_at_a_few_times(sound: Counted) -> None:
    diagnosis = look(sound)
    for _ in range(ATTEMPTS + 3):
        (message,) = diagnosis.explain([1]).values()
        assert message.startswith("The model's output for this request was not a number.") and "layer" not in message
    assert sound.passes == ATTEMPTS
    assert diagnosis.explain([]) == {}


def test_a_look_that_fails_hurts_nobody(sound: Counted) -> None:
    sound.fails = True
    assert look(sound).explain([0])[0].startswith("The model's output for this request was not a number.")


def test_what_the_request_forbids_is_said_first_and_by_name(sound: Counted) -> None:
    wishes = SamplingParams(allowed_token_ids=[0], min_tokens=2, logit_bias={3: 1.0})
    found = look(sound, sampling=wishes).explain([0, 1])
    assert found[1] == "No token was left for this request: its allowed_token_ids and min_tokens forbid every one."
    assert "forbid" not in found[0], "of another request"


@pytest.mark.parametrize(
    ("dtype", "cache", "advised", "not_advised"),
    [
        ("float32", "float32", "weights in model.gguf may be damaged", "--"),
        ("float32", "float16", "--kv-cache-dtype float32", "--dtype"),
        ("float16", "float16", "--dtype bfloat16 or float32", "--kv-cache"),
        ("bfloat16", "float8_e4m3fn", "--kv-cache-dtype auto", "--dtype"),
        ("bfloat16", "bfloat16", "weights in model.gguf may be damaged", "--"),
    ],
)
def test_advice_is_for_what_is_the_case(sound: Counted, dtype: str, cache: str, advised: str, not_advised: str) -> None:
    (message,) = look(sound, Circumstances(dtype, cache, "model.gguf")).explain([0]).values()
    assert advised in message and not_advised not in message


def test_made_up_weights_are_not_damaged(sound: Counted) -> None:
    assert look(sound, Circumstances("float32", "float32", "")).explain([0]) == {0: "The model's output for this request was not a number."}


SPEC = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
}
PROMPT = np.arange(3, 20, dtype=np.int32)


@pytest.fixture
def compiled() -> CompiledDecoder:
    if abi.library() is None:
        pytest.skip("the compiled kernels were not built")
    config = engine_config(hf_config=SPEC, architecture="Gemma2ForCausalLM", vocab_size=150)
    model = load_model(config, load_ops("native"), torch.device("cpu"), lambda *_: None)
    assert isinstance(model, CompiledDecoder)
    return model


def both_looks(model: CompiledDecoder) -> str:
    """What is found with torch and without: the same."""
    program: CpuProgram = model._compiled._compiled  # type: ignore[attr-defined]
    found = native_look.look_into(program, model.layer_specs)(PROMPT)
    assert look_into(model, torch.device("cpu"))(PROMPT) == found
    return found


def test_the_layer_that_breaks_is_found_without_torch(compiled: CompiledDecoder) -> None:
    program = compiled._compiled._compiled.program  # type: ignore[attr-defined]
    assert both_looks(compiled) == ""
    program.final_norm[3] = np.inf
    assert both_looks(compiled) == "Numbers stop being finite in layer 2, behind its attention."
    program.layers[1].attention_norm[3] = np.nan
    assert both_looks(compiled) == "Numbers stop being finite in layer 0 or 1, before the attention of layer 1."


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_attention_without_torch_is_torchs(window: int | None, soft_cap: float | None) -> None:
    spec = LayerSpec(6, 2, 8, scale=0.3, sliding_window=window, soft_cap=soft_cap)
    chance = np.random.default_rng(0)
    q, k, v = (chance.standard_normal((11, heads, 8)).astype(np.float32) for heads in (6, 2, 2))
    expected = PromptAttention([spec], [11], torch.device("cpu"), causal=True)(0, *(torch.from_numpy(x) for x in (q, k, v)))
    assert native_look.attended(spec, q, k, v) == pytest.approx(expected.numpy(), abs=1e-5)
