"""Checkpoints that llmcompressor and auto-round wrote (tests/fixtures/quantized): our logits are those that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.contiguous import load, run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
MADE = ("fp8_dynamic", "w4a16_gptq", "w8a8_int8", "auto_gptq", "auto_awq")
ROUNDED_INPUTS = ("fp8_dynamic", "w8a8_int8")


@pytest.fixture(scope="module")
def logits() -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / "logits.safetensors")


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", MADE)
def test_logits_are_those_of_the_tool(name: str, logits: dict[str, torch.Tensor]) -> None:
    ids, expected = logits["ids"].tolist(), logits[name]
    ours = run(load(FIXTURES / name, ops="reference"), ids)
    # What the tools' runtimes round in another order is seen only where inputs are rounded too.
    assert distance(ours, expected) < (0.02 if name in ROUNDED_INPUTS else 1e-4)
    assert distance(ours, logits["unquantised"]) > 3 * distance(ours, expected)


@pytest.mark.parametrize("ops", ["cpu", "native"])
@pytest.mark.parametrize("name", MADE)
def test_every_format_runs_on_a_cpu(name: str, ops: str, logits: dict[str, torch.Tensor]) -> None:
    """With inputs as they are: what is left is the rounding of scales to float16."""
    expected = logits[name]
    ours = run(load(FIXTURES / name, ops=ops), logits["ids"].tolist())
    assert distance(ours, expected) < (0.2 if name in ROUNDED_INPUTS else 0.01)
