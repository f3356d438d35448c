"""Tokens that a grammar decides on its own are computed together with the next one that it does not: fewer steps, the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.protocol.engine import FinishReason
from octavo.protocol.params import OutputConstraint
from tests.support.core_engine import EOS, Engine
from tests.support.letters import LETTERS, VOCABULARY, assert_same_sequences, run

WORDS = OutputConstraint(grammar='start: ("hello" /[a-z]/ "world" /[k-t]/){8} "end"')
"""Five tokens that are decided, one that is not, and so on."""


def text(tokens: list[int]) -> str:
    return b"".join(LETTERS[token] for token in tokens if token != EOS).decode()


def same(make: Any, **options: Any) -> tuple[int, int]:
    """Compare both ways; returns the steps that each took."""
    plain, forced = run(make(), forces=False, **options), run(make(), **options)
    assert_same_sequences(plain, forced)
    return len(plain.worker.plans), len(forced.worker.plans)


@pytest.mark.parametrize("inflight", [0, 1, 2])
def test_fewer_steps_and_the_same_tokens(inflight: int) -> None:
    many, few = same(lambda: {f"r{i}": {"seed": i, "max_tokens": 40, "constraint": WORDS} for i in range(3)}, inflight=inflight)
    assert few < many / 2


@pytest.mark.parametrize("limit", range(1, 16))
def test_every_length(limit: int) -> None:
    same(lambda: {"a": {"seed": 5, "max_tokens": limit, "constraint": WORDS}})


@pytest.mark.parametrize("letter", "hlwd")
@pytest.mark.parametrize("min_tokens", [0, 3, 8])
def test_stop_tokens_among_those_that_are_decided(letter: str, min_tokens: int) -> None:
    stop = LETTERS.index(letter.encode())
    request = {"seed": 5, "max_tokens": 30, "min_tokens": min_tokens, "stop_token_ids": [stop], "constraint": WORDS}
    same(lambda: {"a": dict(request), "b": {"seed": 1, "max_tokens": 20}})


@pytest.mark.parametrize("inflight", [0, 1])
@pytest.mark.parametrize("num_blocks", [14, 20, 40])
def test_among_others_with_little_memory(inflight: int, num_blocks: int) -> None:
    """Preempted and resumed, with siblings, behind prompts in chunks."""

    def requests() -> dict[str, dict[str, Any]]:
        return {
            "a": {"seed": 1, "max_tokens": 30, "constraint": WORDS, "n": 2},
            "b": {"seed": 2, "max_tokens": 25, "ignore_eos": True, "prompt": list(range(2, 22))},
            "c": {"seed": 3, "max_tokens": 30, "constraint": WORDS},
            "d": {"seed": 4, "max_tokens": 9, "constraint": OutputConstraint(grammar='start: "abcdefgh"')},
        }

    same(requests, inflight=inflight, num_blocks=num_blocks, budget=8)


def test_a_whole_text_that_is_decided() -> None:
    engine = run({"a": {"max_tokens": 30, "constraint": OutputConstraint(grammar='start: "abcdefgh"')}})
    seen = engine.seen
    assert text(seen["a", 0].tokens) == "abcdefgh"
    assert seen["a", 0].reason is FinishReason.STOP
    assert len(engine.worker.plans) == 2  # the first letter, and the end


def test_logprobs_need_every_token_sampled() -> None:
    seen = run({"a": {"max_tokens": 8, "logprobs": 1, "constraint": WORDS}}).seen
    assert len(seen["a", 0].logprobs) == len(seen["a", 0].tokens) == 8


def test_an_abort_between() -> None:
    engine = Engine()
    engine.worker.obeys = True
    engine.core.set_vocabulary(VOCABULARY)
    engine.add("a", [3, 4], max_tokens=40, constraint=WORDS)
    engine.add("b", [3, 4], max_tokens=10, ignore_eos=True)
    while not engine.seen.get(("a", 0)) or len(engine.seen["a", 0].tokens) < 5:
        engine.step()
    engine.abort("a")
    engine.run()
    assert engine.seen["a", 0].reason is FinishReason.ABORT
    assert len(engine.tokens("b")) == 10
    assert not engine.core.batch.forced
    engine.check_idle()
