"""Structured output end to end: the door, the core's constraints, the masks, workers that obey them; alone, in batches, after a crash."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo import LLM, AsyncLLM, InvalidRequest, SamplingParams, StructuredOutputsParams
from octavo.protocol.params import OutputConstraint
from tests.support.scripts import scripted_args, token_ids
from tests.support.tiny_checkpoint import write_tiny_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def make(folder: Path, **options: Any) -> LLM:
    args = dataclasses.asdict(scripted_args(folder, **options))
    return LLM(args.pop("model"), **args)


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Would say "no, never!" if nothing held it to anything else."""
    with make(tmp_path_factory.mktemp("s"), default="no, never!", async_scheduling=request.param) as llm:
        yield llm


def say(llm: LLM, prompt: str = "x", *, max_tokens: int = 40, **wish: Any) -> tuple[str, str | None]:
    params = SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**wish))
    output = llm.generate(prompt, params)[0].outputs[0]
    assert output.error is None
    return output.text, output.finish_reason


def test_a_model_is_held_to_its_grammar(llm: LLM) -> None:
    assert say(llm, choice=["yes", "maybe"])[0] in ("yes", "maybe")
    assert say(llm, choice=["no", "yes"]) == ("no", "stop")
    assert re.fullmatch(r"[0-9]{3}-[a-c]", say(llm, regex="[0-9]{3}-[a-c]")[0])
    assert say(llm, grammar='start: "SELECT " ("a" | "b")')[0] in ("SELECT a", "SELECT b")
    text, finish = say(llm, json=SCHEMA, disable_any_whitespace=True, max_tokens=100)
    assert finish == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)
    assert say(llm, regex="no, .*", max_tokens=5) == ("no, n", "length")


def test_choices_that_begin_alike_and_very_many_of_them(llm: LLM) -> None:
    assert say(llm, choice=["no", "no, never", "no, n"])[0] in ("no", "no, never", "no, n")
    assert say(llm, choice=["no, never mind", "no"])[0] in ("no, never mind", "no")
    text, finish = say(llm, choice=[f"no {i}" for i in range(10_000)])
    assert (re.fullmatch(r"no \d{1,4}", text) is not None, finish) == (True, "stop")


def test_neighbours_are_left_alone(llm: LLM) -> None:
    wishes = [None, StructuredOutputsParams(choice=["aa", "bb"]), None, StructuredOutputsParams(regex="[xyz]{4}")]
    params = [SamplingParams(max_tokens=30, structured_outputs=wish) for wish in wishes]
    free, choice, again, regex = (o.outputs[0].text for o in llm.generate(["a", "b", "c", "d"], params))
    assert free == again == "no, never!"
    assert choice in ("aa", "bb")
    assert re.fullmatch("[xyz]{4}", regex)


def test_siblings_each_follow_the_grammar(llm: LLM) -> None:
    params = SamplingParams(n=5, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["aab", "ccd"]))
    outputs = llm.generate("x", params)[0].outputs
    assert [o.text in ("aab", "ccd") and o.finish_reason == "stop" for o in outputs] == [True] * 5


def test_the_grammar_ends_the_output_whatever_else_is_wished(llm: LLM) -> None:
    for more in ({"ignore_eos": True}, {"min_tokens": 15}):
        params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes"]), **more)
        output = llm.generate("x", params)[0].outputs[0]
        assert (output.error, output.finish_reason, output.stop_reason) == (None, "stop", None)
        assert output.text.startswith("yes")
        assert len(output.token_ids) <= 5


def test_stop_strings_still_stop(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, stop="ev", structured_outputs=StructuredOutputsParams(regex="no, n.*"))
    output = llm.generate("x", params)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("no, n", "stop", "ev")


def test_a_bad_grammar_fails_alone_and_before_anything_runs(llm: LLM) -> None:
    good, bad = StructuredOutputsParams(choice=["a"]), StructuredOutputsParams(json={"type": "objekt"})
    with pytest.raises(InvalidRequest, match=r"Prompt 1 .* \$: .*objekt"):
        llm.generate(["x", "y"], [SamplingParams(structured_outputs=good), SamplingParams(structured_outputs=bad)])
    assert say(llm, choice=["a"])[0] == "a"


def test_reasoning_is_free_and_the_grammar_begins_behind_it(tmp_path: Path) -> None:
    end = token_ids(")")
    with make(tmp_path, default="(mm)no", async_scheduling=True) as llm:

        def think(**marks: Any) -> str:
            params = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(choice=["YES"]))
            params.constraint = OutputConstraint(reasoning_end_ids=end, reasoning_stop_ids=end, **marks)
            return llm.generate("x", params)[0].outputs[0].text

        assert think() == "(mm)YES"


@pytest.mark.parametrize(
    ("says", "start", "text", "limited"),
    [
        ("<t>mmm</t>no", "<t>", "<t>mmm</t>YES", "<t>m</t>YES"),
        ("mmm</t>no", "", "mmm</t>YES", "m</t>YES"),  # the prompt has begun it
        ("</t>no", "", "</t>YES", "</t>YES"),
        ("no", "[t]", "YES", "YES"),
    ],
)
def test_markers_of_several_tokens_do_as_well(tmp_path: Path, says: str, start: str, text: str, limited: str) -> None:
    assert len(token_ids("<t>")) > 1
    with make(tmp_path, default=says, async_scheduling=True) as llm:
        params = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(choice=["YES"]))
        params.constraint = OutputConstraint(reasoning_start=start, reasoning_end="</t>", reasoning_stop_ids=token_ids("</t>"))
        assert llm.generate("x", params)[0].outputs[0].text == text
        params.thinking_token_budget = 1
        assert llm.generate("x", params)[0].outputs[0].text == limited


@pytest.mark.parametrize(("budget", "text"), [(0, ")mm)no"), (1, "()m)no"), (2, "(m))no"), (3, "(mm)no"), (9, "(mm)no")])
def test_a_budget_ends_the_reasoning(tmp_path: Path, budget: int, text: str) -> None:
    end = token_ids(")")
    with make(tmp_path, default="(mm)no") as llm:
        params = SamplingParams(max_tokens=30, thinking_token_budget=budget)
        params.constraint = OutputConstraint(reasoning_end_ids=end, reasoning_stop_ids=end)
        assert llm.generate("x", params)[0].outputs[0].text == text


def test_a_grammar_that_gets_too_complex_fails_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.grammar.compiler import Matcher

    monkeypatch.setattr(Matcher, "problem", lambda self: "too many states")
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes"]))
    hard, easy = llm.generate(["x", "y"], [params, SamplingParams(max_tokens=20)])
    assert hard.outputs[0].finish_reason == "error"
    assert "too many states" in (hard.outputs[0].error or "")
    assert easy.outputs[0].text == "no, never!"
    monkeypatch.undo()
    assert say(llm, choice=["yes"])[0] == "yes"


DEAD_END = "start: W X\nW: /[a-z]{5}/\nX: /[^\\s\\S]/"
"""Nothing fits it, which is not seen from its beginning."""


async def test_a_reply_that_runs_into_a_dead_end_blames_its_grammar(tmp_path: Path) -> None:
    async with await AsyncLLM.start(scripted_args(tmp_path, default="abcdefg")) as llm:
        params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(grammar=DEAD_END))
        with pytest.raises(InvalidRequest, match=r"structured_outputs: .* no text can match") as failed:
            async for _ in llm.generate("x", params):
                pass
        assert failed.value.param == "structured_outputs"
        good = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes"]))
        assert [o.outputs[0].text async for o in llm.generate("x", good)][-1].endswith("yes")
        assert llm.restarts == 0


async def test_through_processes_and_across_a_crash(tmp_path: Path) -> None:
    args = scripted_args(tmp_path, default="no", script={"step_delay_ms": 20})
    async with await AsyncLLM.start(args) as llm:
        params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(regex="(ab){20}"))
        stream = await llm.submit("x", params)
        seen = 0
        async for output in stream:
            seen = len(output.outputs[0].token_ids)
            if seen >= 5 and not llm.restarts:
                assert llm.engine_pid is not None
                os.kill(llm.engine_pid, signal.SIGKILL)
                break
        async for output in stream:
            last = output.outputs[0]
        assert (last.text, last.finish_reason) == ("ab" * 20, "stop")
        assert llm.restarts == 1


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_random_weights_write_valid_json(tmp_path: Path, temperature: float) -> None:
    """The real worker: logits, masks on them, and sampling."""
    with LLM(str(write_tiny_checkpoint(tmp_path)), load_format="dummy", device="cpu", dtype="float32") as llm:
        wish = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=120, structured_outputs=wish, logprobs=2)
        free = SamplingParams(temperature=0.0, max_tokens=5)
        before = llm.generate("zz", free)[0].outputs[0].token_ids
        outputs = llm.generate(["a", "b", "zz"], [params, params, free])
        for output in outputs[:2]:
            jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)
        assert outputs[2].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": token_ids("xz"), "structured_outputs": StructuredOutputsParams(choice=["yes", "no"])}, "allowed_token_ids"),
        ({"bad_words": ["y", "n"], "structured_outputs": StructuredOutputsParams(choice=["y", "n"])}, "bad_words"),
    ],
)
def test_lists_that_leave_nothing_to_begin_with_are_refused(llm: LLM, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="no token is left") as refused:
        llm.generate("x", SamplingParams(max_tokens=5, **params))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            {"allowed_token_ids": token_ids("ye"), "structured_outputs": StructuredOutputsParams(choice=["yes", "yeti"])},
            "forbid every token",
        ),
        ({"bad_words": ["es", "s", "no"], "structured_outputs": StructuredOutputsParams(choice=["yes"])}, "forbid every token"),
    ],
)
def test_lists_that_leave_nothing_later_end_their_request_alone(llm: LLM, params: dict[str, Any], said: str) -> None:
    usual = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    outputs = llm.generate(["x", "x", "x"], [usual, SamplingParams(max_tokens=5, **params), SamplingParams(max_tokens=5)])
    assert [output.outputs[0].error is None for output in outputs] == [True, False, True]
    assert said in str(outputs[1].outputs[0].error)
    assert outputs[0].outputs[0].text in ("yes", "no")


@pytest.mark.parametrize(
    ("bad", "choices", "text"),
    [
        (["no", "yes"], ["yes", "yeti"], "yeti"),  # in whichever tokens
        (["et"], ["yeti", "yes"], "yes"),  # a way that leads nowhere is not begun
        (["es"], ["yes"], None),
        (["ye"], ["yes", "no"], "no"),
        (["yeti", "yes", "no"], ["yes", "no", "yet"], "yet"),
    ],
)
@pytest.mark.parametrize("slow", [False, True])
def test_words_are_left_out_of_what_a_grammar_allows(
    llm: LLM, bad: list[str], choices: list[str], text: str | None, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slow:
        monkeypatch.setattr("octavo.core.constraint.SLOW_SECONDS", -1.0)
    params = SamplingParams(max_tokens=9, bad_words=bad, structured_outputs=StructuredOutputsParams(choice=choices))
    output = llm.generate("x", params)[0].outputs[0]
    assert (output.text or None, output.error is None) == (text, text is not None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_of_a_grammar_needs_no_place_in_a_list(tmp_path: Path, temperature: float) -> None:
    """A real sampler, which applies lists of its own."""
    choice = StructuredOutputsParams(choice=["yes", "no"])
    with LLM(str(write_tiny_checkpoint(tmp_path / "model")), load_format="dummy", device="cpu", dtype="float32") as llm:

        def answer(allowed: str, wish: StructuredOutputsParams = choice, **more: Any) -> Any:
            params = SamplingParams(
                max_tokens=8, temperature=temperature, seed=1, allowed_token_ids=token_ids(allowed), structured_outputs=wish, **more
            )
            return llm.generate(["x"], [params])[0].outputs[0]

        for more in ({}, {"ignore_eos": True}, {"logprobs": 2}, {"bad_words": ["yes"]}, {"min_tokens": 7}):
            output = answer("yesno", **more)
            assert (output.error, output.finish_reason, output.stop_reason) == (None, "stop", None)
            assert output.text in (("no",) if "bad_words" in more else ("yes", "no"))
        assert answer("no").text == "no"
        # Where the grammar goes on, the list decides what comes next.
        free = answer("ab", StructuredOutputsParams(regex="[a-z]*"))
        assert (free.finish_reason, set(free.text) <= set("ab"), len(free.text)) == ("length", True, 8)
        assert answer("ab", StructuredOutputsParams(regex="[ab]c?")).text in ("a", "b")


def test_lists_that_leave_nothing_without_a_grammar(tmp_path: Path) -> None:
    """A real sampler, which finds nothing to sample: the request is to blame, not the engine."""
    with LLM(str(write_tiny_checkpoint(tmp_path / "model")), load_format="dummy", device="cpu", dtype="float32") as llm:
        params = SamplingParams(max_tokens=5, allowed_token_ids=token_ids("a"), bad_words=["aa"], ignore_eos=True)
        outputs = llm.generate(["x", "x"], [params, SamplingParams(max_tokens=5, ignore_eos=True)])
        assert outputs[0].outputs[0].error == "After 1 tokens bad_words forbids every one of allowed_token_ids: no token is left."
        assert len(outputs[1].outputs[0].token_ids) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_a_grammar_decides_change_nothing(tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real model: the same texts, whether they are sampled one by one or computed with the next."""
    wishes = [
        StructuredOutputsParams(json={**SCHEMA, "title": "x"}, disable_any_whitespace=True),
        StructuredOutputsParams(regex="(hello [a-z] world [0-9] )+"),
        StructuredOutputsParams(choice=["the quick brown fox", "the quick brown dog"]),
    ]
    with LLM(str(write_tiny_checkpoint(tmp_path / "model")), load_format="dummy", device="cpu", dtype="float32") as llm:

        def texts() -> list[list[int]]:
            params = [
                SamplingParams(max_tokens=60, temperature=temperature, seed=i, repetition_penalty=1.1, structured_outputs=wish)
                for i, wish in enumerate(wishes)
            ]
            return [
                output.outputs[0].token_ids for output in llm.generate(["x"] * 4, [*params, SamplingParams(temperature=0, max_tokens=20)])
            ]

        together = texts()
        monkeypatch.setattr("octavo.core.settle.MAX_FORCED", 0)
        assert texts() == together
