"""The door for grammars: cheap ones are checked at once, others where they can be ended, with the same answers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import InvalidRequest, NotYet
from octavo.frontend import structured
from octavo.frontend.structured import GrammarDoor
from octavo.grammar.check import Checker
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import StructuredOutputsParams

LETTERS = [bytes([i]) for i in range(256)] + [b"<eos>"]
VOCABULARY = Vocabulary(LETTERS, [256], [256])
ENDLESS = "start: A\nA: " + " & ".join(f"/(a{{{prime}}})*b/" for prime in (101, 103, 107, 109))
"""A hundred million states: hours of one core, and no fuel of the engine's is used."""


def wish(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


@pytest.fixture(scope="module")
def door() -> Iterator[GrammarDoor]:
    door = GrammarDoor(lambda: VOCABULARY)
    yield door
    door.close()


CHEAP: list[dict[str, Any]] = [
    {"json_object": True},
    {"choice": ["yes", "no"]},
    {"regex": "[a-z]+"},
    {"grammar": 'start: "a" | "b"'},
    {"grammar": 'start: "x" %json {"type": "object", "properties": {"a": {"type": "string"}}}'},
    {"json": {"type": "object", "properties": {f"f{i}": {"type": "string", "maxLength": 40} for i in range(40)}, "required": ["f1"]}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"}, {"enum": [1, "x"]}]}}}}},
    {"json": {"type": "integer", "minimum": 0, "maximum": 120}},
]
COSTLY: list[dict[str, Any]] = [
    {"json": {"type": "string", "pattern": "^a{1,20}$"}},
    {"json": {"type": "integer", "multipleOf": 10_007}},
    {"json": {"allOf": [{"type": "string", "maxLength": 9}, {"minLength": 3}]}},
    {"json": '{"type": "object"}'},
    {"json": {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(400)}}},
    {"regex": "[a-z]{1,999}"},
    {"grammar": "start: A\nA: /[a-z]+/ & /[a-y]+/"},
    {"grammar": 'root ::= "a" | "b"'},
    {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}},
    {"json_object": True, "whitespace_pattern": "[ ]?"},
]


@pytest.mark.parametrize("fields", CHEAP)
def test_the_usual_is_checked_here(fields: dict[str, Any]) -> None:
    door = GrammarDoor(lambda: VOCABULARY)
    assert asyncio.run(door.prepare(wish(**fields))).source
    assert door.pool.pids == []
    assert asyncio.run(door.prepare(wish(**fields))).cost == 0
    door.close()


@pytest.mark.parametrize("fields", COSTLY)
def test_other_grammars_are_checked_in_a_process_with_the_same_answer(door: GrammarDoor, fields: dict[str, Any]) -> None:
    assert door._quick(wish(**fields), False) is None
    assert asyncio.run(door.prepare(wish(**fields))).source == Checker(VOCABULARY).check(wish(**fields)).source
    assert door.pool.pids


REFUSED: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "objekt"}}}},
    {"json": {"type": "array", "items": {"uniqueItems": True}}},
    {"json": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 1}}, "required": ["n"]}},
    {"regex": "a("},
    {"grammar": "start: y"},
    {"choice": []},
]


@pytest.mark.parametrize("fields", REFUSED)
def test_refusals_say_the_same(door: GrammarDoor, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as here:
        Checker(VOCABULARY).check(wish(**fields))
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequest) as there:
            door.check(wish(**fields))
        assert str(there.value) == str(here.value)
        assert there.value.param == here.value.param


def test_a_check_that_never_ends_is_ended_and_nobody_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.jobs.process.BUSY_FACTOR", 100)
    door = GrammarDoor(lambda: VOCABULARY)
    door.pool._room = dataclasses.replace(structured.ROOM, seconds=1.0)

    async def attacked() -> tuple[float, float]:
        """The longest time that this thread stood still, and the longest that a usual check took meanwhile."""
        await door.prepare(wish(choice=["the tokenizer"]))
        bombs = [asyncio.ensure_future(door.prepare(wish(grammar=f"{ENDLESS}\n// {i}"), "bad")) for i in range(3)]
        gap = slowest = 0.0
        number = 0
        while not bombs[0].done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gap = max(gap, time.monotonic() - before)
            begun, number = time.monotonic(), number + 1
            await door.prepare(wish(choice=[f"choice {number}"]))
            slowest = max(slowest, time.monotonic() - begun)
        # Another client needs a process too, and has not to wait for all of them.
        await door.prepare(wish(regex="[a-z]{1,777}"), "good")
        assert not bombs[2].done()
        for bomb in bombs:
            with pytest.raises(InvalidRequest, match="checking it was stopped, it ran for more than 1 seconds"):
                await bomb
        return gap, slowest

    gap, slowest = asyncio.run(attacked())
    assert gap < 2.0
    assert slowest < 2.0
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match="stopped"):  # what was found is remembered
        door.check(wish(grammar=f"{ENDLESS}\n// 0"))
    assert time.monotonic() - begun < 0.5
    door.close()


def test_parameters_of_tools(door: GrammarDoor) -> None:
    fine = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}]
    asyncio.run(door.prepare_parameters(fine))
    asyncio.run(door.prepare_parameters([{"parameters": {"type": "object", "properties": {"a": {"pattern": "^x"}}}, "strict": True}]))
    with pytest.raises(InvalidRequest, match=r"tools\[1\].*at \$\.properties\.a") as refused:
        asyncio.run(door.prepare_parameters([*fine, {"parameters": {"properties": {"a": {"type": "objekt"}}}}]))
    assert refused.value.param == "tools"


def test_first_tokens(door: GrammarDoor) -> None:
    for fields in ({"choice": ["yes", "no"]}, {"regex": "(yes|no){1,200}"}):
        found = door.check(wish(**fields), first=True).first
        assert found is not None
        assert {i for i in range(8 * len(found)) if found[i // 8] >> i % 8 & 1} == {ord("y"), ord("n")}


def test_without_the_engine_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NotYet("pip install")

    monkeypatch.setattr(structured, "llguidance", missing)
    door = GrammarDoor(lambda: VOCABULARY)
    with pytest.raises(NotYet):
        asyncio.run(door.prepare(wish(grammar=ENDLESS)))
    with pytest.raises(NotYet):
        asyncio.run(door.prepare_parameters([{"parameters": {"pattern": "x"}}]))
    assert door.pool.pids == []
    door.close()


def test_schemas_that_are_no_objects(door: GrammarDoor) -> None:
    assert door.check(wish(json=True)).source == door.check(wish(json={})).source
    with pytest.raises(InvalidRequest, match="allows nothing"):
        door.check(wish(json=False))
    for name, value in {"json": 5, "choice": "x", "regex": ["x"], "json_object": 1, "structural_tag": [], "whitespace_pattern": 5}.items():
        with pytest.raises(InvalidRequest, match=f"structured_outputs.{name} must be"):
            wish(**{name: value})


def test_memory_of_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "MAX_REMEMBERED_BYTES", 10_000)
    door = GrammarDoor(lambda: VOCABULARY)
    for number in range(50):
        door.check(wish(choice=[f"{number} {'x' * 1000}"]))
    assert door._known._bytes <= 10_000
    assert 0 < len(door._known._found) < 10
    door.close()
