"""Tokens that are judged after they are drawn: the sequences are those that masks lead to, and whatever else ends or moves them goes on as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.core.constraint import Constraint
from octavo.core.mask_turns import SLOW_SECONDS
from octavo.core.trial import MaskTrial
from octavo.protocol.engine import FinishReason
from octavo.protocol.params import OutputConstraint
from tests.support.core_engine import Engine
from tests.support.letters import assert_same_sequences, run

MIXED = OutputConstraint(grammar='start: ("hello" /[a-z]/ "w" /[k-t]/){6} "end"?')
LOOSE = OutputConstraint(grammar="start: /[a-y]*/")
TURNS = OutputConstraint(grammar="start: (/[a-q]/ /[g-y]/){30}")
LONG = OutputConstraint(grammar="start: /[a-y]{60}/")


def same(make: Any, **options: Any) -> Engine:
    masked, tried = run(make(), **options), run(make(), tries=True, **options)
    assert_same_sequences(masked, tried)
    assert not any(plan.trial for plan in masked.worker.plans)
    return tried


@pytest.mark.parametrize("forces", [False, True])
@pytest.mark.parametrize("constraint", [MIXED, LOOSE])
def test_the_same_tokens(constraint: OutputConstraint, forces: bool) -> None:
    tried = same(lambda: {f"r{i}": {"seed": i, "max_tokens": 40, "constraint": constraint} for i in range(4)}, forces=forces)
    assert any(plan.trial for plan in tried.worker.plans)


@pytest.mark.parametrize("num_blocks", [14, 20, 40])
def test_among_others_with_little_memory(num_blocks: int) -> None:
    """Preempted and resumed, with siblings, behind prompts in chunks, beside lists and budgets that need their masks."""

    def requests() -> dict[str, dict[str, Any]]:
        return {
            "a": {"seed": 1, "max_tokens": 30, "constraint": MIXED, "n": 2},
            "b": {"seed": 2, "max_tokens": 25, "ignore_eos": True, "prompt": list(range(2, 22))},
            "c": {"seed": 3, "max_tokens": 30, "constraint": LOOSE, "min_tokens": 5},
            "d": {"seed": 4, "max_tokens": 9, "constraint": OutputConstraint(grammar='start: "abcdefgh"')},
            "e": {"seed": 5, "max_tokens": 20, "constraint": LOOSE, "allowed_token_ids": list(range(5, 20))},
            "f": {"seed": 6, "max_tokens": 20, "constraint": LOOSE, "logprobs": 1},
        }

    same(requests, num_blocks=num_blocks, budget=8)


def test_a_grammar_that_runs_dead_ends_its_request_alone() -> None:
    dead = OutputConstraint(grammar='start: "ab" /[b&&[^b]]/ | "ac" DEAD\nDEAD: /[a-c]/ & /[d-f]/', field="guided_grammar")
    requests = {"dead": {"max_tokens": 20, "constraint": dead}, "good": {"seed": 3, "max_tokens": 12, "constraint": LONG}}
    tried = run({name: dict(params) for name, params in requests.items()}, tries=True, forces=False)
    assert tried.seen["dead", 0].reason is FinishReason.ERROR
    assert len(tried.tokens("good")) == 12


def test_a_model_that_never_follows_its_grammar_is_seldom_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    refused = MaskTrial.refused

    def counted(self: MaskTrial, slots: Any, tokens: Any) -> Any:
        asked.extend(tokens.tolist())
        return refused(self, slots, np.full_like(tokens, -1))

    monkeypatch.setattr(MaskTrial, "refused", counted)
    tried = same(lambda: {"a": {"max_tokens": 55, "constraint": LONG}})
    assert 5 < len(asked) < 25
    assert sum(plan.masks is not None for plan in tried.worker.plans) > 25


def test_a_trial_says_who_has_become_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging takes long too in a grammar of that kind: the next mask is computed beside the steps of others."""
    passes = Constraint.passes

    def slowly(self: Constraint, token: int) -> bool:
        found = passes(self, token)
        self._debt += 1.0
        return found

    monkeypatch.setattr(Constraint, "passes", slowly)
    tried = same(lambda: {"a": {"max_tokens": 30, "constraint": LONG}})
    assert sum(plan.trial is not None for plan in tried.worker.plans) == 1


@pytest.mark.parametrize("constraint", [MIXED, TURNS])
def test_slow_for_a_moment(monkeypatch: pytest.MonkeyPatch, constraint: OutputConstraint) -> None:
    """The processor was elsewhere while a token was judged: its mask is made beside the steps, and used once."""
    passes = Constraint.passes

    def now_and_then(self: Constraint, token: int) -> bool:
        found = passes(self, token)
        if token % 3 == 0:
            self._debt = 1.02 * SLOW_SECONDS
        return found

    monkeypatch.setattr(Constraint, "passes", now_and_then)
    tried = same(lambda: {f"r{i}": {"seed": i, "max_tokens": 40, "constraint": constraint} for i in range(4)})
    assert sum(plan.trial is not None for plan in tried.worker.plans) > 5
    assert sum(plan.masks is not None for plan in tried.worker.plans) > 5
