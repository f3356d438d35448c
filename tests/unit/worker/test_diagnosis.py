"""Looking for the layer that breaks: seldom, and without harm; and advice that applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.protocol.params import SamplingParams
from octavo.sampling.state import SamplerState
from octavo.worker.diagnosis import ATTEMPTS, Circumstances, Diagnosis
from octavo.worker.tensor_look import look_into
from tests.models.contiguous import load
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
