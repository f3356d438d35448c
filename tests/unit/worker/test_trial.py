"""Rows that are drawn before their mask is known get the tokens that they would get under it: compiled, and on torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.models.compiled import CompiledDecoder
from octavo.models.decoder import Model
from octavo.models.loader import load_model
from octavo.ops.cpu import abi
from octavo.ops.registry import load_ops
from octavo.protocol.params import OutputConstraint, SamplingParams
from octavo.protocol.step import Int32, StepPlan, TokenMasks
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplerState
from octavo.worker.native_steps import NativeSteps
from octavo.worker.runner import Runner
from octavo.worker.slots import SlotTables
from tests.support.engine_configs import engine_config
from tests.support.mixed_steps import BLOCK, BLOCKS, LENGTH, SLOTS, Run, by_operations
from tests.support.step_plans import Plans, Row, slot_init
from tests.unit.worker.test_native_steps import CONFIG, steps_of

pytestmark = pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")

VOCAB = 1000
"""Several groups of the two levels of a draw, the last one ragged."""
WIDTH = -(-VOCAB // 32)
HELD = OutputConstraint(grammar="x")


class Judge:
    """A `Trial` of known masks."""

    def __init__(self, masks: TokenMasks) -> None:
        self.slots = masks.slots[::-1].copy()
        self._words = dict(zip(masks.slots.tolist(), masks.words, strict=True))
        self.asked = self.passed = 0

    def refused(self, slots: Int32, tokens: Int32) -> TokenMasks | None:
        self.asked += len(slots)
        passes = [t >= 0 and bool(self._words[s][t >> 5] >> (t & 31) & 1) for s, t in zip(slots.tolist(), tokens.tolist(), strict=True)]
        self.passed += sum(passes)
        rest = [slot for slot, passed in zip(slots.tolist(), passes, strict=True) if not passed]
        return TokenMasks(np.asarray(rest, np.int32), np.stack([self._words[slot] for slot in rest])) if rest else None


def random_sampling(chance: np.random.Generator, *, plain: bool) -> SamplingParams:
    """Anything that a constrained request may ask for beside its grammar."""

    def one(*choices: Any) -> Any:
        return choices[int(chance.integers(len(choices)))]

    more: dict[str, Any] = {}
    if not plain:
        more = {
            "presence_penalty": one(0.0, 0.5),
            "frequency_penalty": one(0.0, 0.7),
            "repetition_penalty": one(1.0, 1.3),
            "logit_bias": one(None, {int(chance.integers(VOCAB)): 4.0, int(chance.integers(VOCAB)): -100.0}),
            "logprobs": one(None, None, 0, 3),
        }
    return SamplingParams(
        temperature=one(0.0, 0.02, 0.05, 0.1, 1.0),
        top_k=one(0, 0, 1, 5, 300),
        top_p=one(1.0, 1.0, 0.4, 0.95),
        min_p=one(0.0, 0.0, 0.02, 0.5),
        seed=int(chance.integers(1 << 40)),
        max_tokens=None,
        constraint=HELD,
        **more,
    )


def play(run: Run, seed: int, *, tried: bool, plain: bool) -> tuple[list[Any], int, int]:
    """Four requests for some steps, all but the last held to masks. Returns what they got, and how many tokens were judged and passed."""
    chance = np.random.default_rng(seed)
    sampling = [random_sampling(chance, plain=plain) for _ in range(3)] + [SamplingParams(temperature=0.9, seed=7, max_tokens=None)]
    plans, found, asked, passed = Plans(), [], 0, 0
    for step in range(8):
        rows = [Row(slot, 0, 3, True) if step == 0 else Row(slot, step + 2, 1, True) for slot in range(4)]
        init = [slot_init(slot, [3, 4, slot], [1 + 4 * slot + j for j in range(4)], sampling=sampling[slot]) for slot in range(4)]
        plan: StepPlan = plans(rows, init=init if step == 0 else [])
        allowed = chance.random((3, WIDTH * 32)) < chance.choice([0.9, 0.5, 0.02, 1.0, 0.2], (3, 1))
        allowed[:, chance.integers(0, VOCAB)] = True
        words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        masks = TokenMasks(np.asarray([2, 0, 1], np.int32), words)
        if tried and step % 4 == 3:  # one under a mask beside others on trial
            plan.masks, masks = TokenMasks(masks.slots[:1], words[:1]), TokenMasks(masks.slots[1:], words[1:])
        judge = Judge(masks)
        if tried:
            plan.trial = judge
        else:
            plan.masks = masks
        result = run(plan)
        assert not result.errors
        asked, passed = asked + judge.asked, passed + judge.passed
        scored = {slot: [(r.token_id, r.rank, tuple(r.top_ids)) for r in rows] for slot, rows in (result.logprobs or {}).items()}
        found.append((result.tokens.tolist(), scored))
    return found, asked, passed


def compared(runs: Callable[[], Run], *, plain: bool, seeds: range) -> float:
    """Whether both ways lead to the same; the share of tokens that passed."""
    asked = passed = 0
    for seed in seeds:
        expected, _, _ = play(runs(), seed, tried=False, plain=plain)
        found, some, good = play(runs(), seed, tried=True, plain=plain)
        assert found == expected, seed
        asked, passed = asked + some, passed + good
    return passed / asked


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    hf = CONFIG | {"vocab_size": VOCAB}
    config = engine_config(hf_config=hf, architecture="Qwen3ForCausalLM", vocab_size=VOCAB)
    return {name: load_model(config, load_ops(name), torch.device("cpu"), lambda *_: None) for name in ("cpu", "native")}


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("plain", [True, False])
def test_compiled_steps(models: dict[str, Model], plain: bool, processed: bool) -> None:
    steps: list[NativeSteps] = []

    def fresh() -> Run:
        steps.append(steps_of(models["native"], processed=processed))
        return steps[-1].run

    assert compared(fresh, plain=plain, seeds=range(60)) > (0.1 if processed else 0.15)


@pytest.mark.parametrize("name", ["cpu", "native"])
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("plain", [True, False])
def test_operation_by_operation(models: dict[str, Model], name: str, plain: bool, processed: bool) -> None:
    model = models[name]

    def fresh() -> Run:
        device = torch.device("cpu")
        tables, state = SlotTables(SLOTS, LENGTH, BLOCK, device), SamplerState(SLOTS, device)
        draw = model.draw if isinstance(model, CompiledDecoder) else None
        sampler = Sampler(state, tables.tokens, processed_logprobs=processed, draw=draw)
        return by_operations(Runner(model, attention_of(model, name, device), tables, state, sampler))

    assert compared(fresh, plain=plain, seeds=range(25)) > (0.1 if processed else 0.15)


def attention_of(model: Model, name: str, device: torch.device) -> Any:
    from octavo.attention.native_cpu import NativeCpuAttention
    from octavo.attention.torch_paged import TorchPagedAttention

    kind = NativeCpuAttention if name == "native" else TorchPagedAttention
    return kind(model.layer_specs, BLOCKS, BLOCK, torch.float32, device)
