"""Looking for the layer that breaks: seldom, and without harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from octavo.sampling.state import SamplerState
from octavo.worker.diagnosis import ATTEMPTS, Diagnosis
from octavo.worker.slots import SlotTables
from tests.models.contiguous import load
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


def look(model: Counted) -> Diagnosis:
    cpu = torch.device("cpu")
    return Diagnosis(model, SlotTables(2, 32, 16, cpu), SamplerState(2, cpu))  # type: ignore[arg-type]


def test_a_sound_model_is_looked_at_a_few_times(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = Counted(load(tmp_path))
    diagnosis = look(model)
    for _ in range(ATTEMPTS + 3):
        assert diagnosis.explain([1]) == ""
    assert model.passes == ATTEMPTS


def test_a_look_that_fails_hurts_nobody(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    assert look(Counted(load(tmp_path), fails=True)).explain([0]) == ""
