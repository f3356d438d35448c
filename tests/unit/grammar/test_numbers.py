"""Numbers that a double cannot hold: values are met exactly or refused, ranges have nothing outside of them, and no schema ends the process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.grammar.lark import json_options
from octavo.grammar.library import llguidance
from octavo.grammar.numbers import EXACT, FARTHEST, exact
from octavo.grammar.source import grammar_source, json_source
from octavo.protocol.params import StructuredOutputsParams
from tests.support.grammars import matches

COMPACT = {"whitespace_flexible": False}


def spelled(number: float) -> str:
    """How the engine writes a constant."""
    engine: Any = llguidance()
    source = json_source({"const": number}, COMPACT, "x")
    return str(engine.LLMatcher(engine.LLTokenizer("byte"), source, log_level=0).compute_ff_bytes().decode())


NUMBERS = st.one_of(
    st.integers(-(2**65), 2**65),
    st.integers(-(2**54), 2**54),
    st.sampled_from([2**n + k for n in (53, 62, 63, 64) for k in (-1025, -1024, -1, 0, 1)]),
    st.sampled_from([-(2**n) + k for n in (53, 62, 63, 64) for k in (-1, 0, 1, 1024, 1025)]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(-1000, 1000, places=6).map(float),
)


@settings(max_examples=300, deadline=None)
@given(NUMBERS)
@example(3854779244083630.0)
def test_a_constant_is_met_exactly_or_refused(number: float) -> None:
    if exact(number):
        assert json.loads(spelled(number)) == number
    else:
        with pytest.raises(InvalidRequest, match=r"\$\.const: the number .* cannot be met exactly"):
            json_source({"const": number}, COMPACT, "x")
        json_source({"const": number}, json_options(lenient=True), "x")


@settings(max_examples=200, deadline=None)
@given(
    low=st.none() | NUMBERS,
    high=st.none() | NUMBERS,
    keys=st.tuples(st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])),
    kind=st.sampled_from(["integer", "number"]),
    seed=st.integers(0, 1000),
)
def test_a_range_has_nothing_outside_of_it(low: float | None, high: float | None, keys: tuple[str, str], kind: str, seed: int) -> None:
    schema = {"type": kind, **({keys[0]: low} if low is not None else {}), **({keys[1]: high} if high is not None else {})}
    try:
        source = json_source(schema, COMPACT, "x")
    except InvalidRequest:
        return
    chance = random.Random(seed)
    near = [
        n
        for bound in (low, high)
        if bound is not None and abs(bound) < 1e30
        for n in (int(bound) + d for d in (-2000, -2, -1, 0, 1, 2, 2000))
    ]
    for value in [*near, 0, chance.randint(-(2**63), 2**63)]:
        right = (low is None or value > low or (value == low and keys[0] == "minimum")) and (
            high is None or value < high or (value == high and keys[1] == "maximum")
        )
        assert right or not matches(source, str(value)), value


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, FARTHEST - 6000, 6000 - FARTHEST], [2**63, -(2**63) - 1]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, FARTHEST - 6000], [-1, 2**64]),
        ({"type": "integer", "exclusiveMinimum": EXACT}, [EXACT + 10], [EXACT, EXACT - 1]),
        ({"type": "integer", "exclusiveMinimum": EXACT, "minimum": 7}, [EXACT + 10], [EXACT, 8]),
        ({"type": "integer", "maximum": 10**300, "minimum": -(10**300)}, [5, -5], []),
    ],
)
def test_usual_ranges_can_be_used(schema: dict[str, Any], inside: list[int], outside: list[int]) -> None:
    source = json_source(schema, COMPACT, "x")
    assert all(matches(source, str(n)) for n in inside)
    assert not any(matches(source, str(n)) for n in outside)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.000001", "0.05", "0.5"], ["0", "-0", "0.0", "0.6"]),
        ({"exclusiveMinimum": 0, "minimum": 0, "exclusiveMaximum": 0.25}, ["0.1"], ["0", "0.25"]),
        ({"exclusiveMinimum": 10, "maximum": 10.5}, ["10.0001", "10.5"], ["10", "10.0"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.000001"], ["-1", "-1.0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.000001"], ["0", "-0"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["0.1", "1"], ["0"]),
    ],
)
def test_a_whole_bound_that_is_no_part_of_its_range(schema: dict[str, Any], inside: list[str], outside: list[str]) -> None:
    """The engine lets in one that has a fraction behind the same whole number for its other bound."""
    source = json_source({"type": "number", **schema}, COMPACT, "x")
    assert [text for text in inside + outside if matches(source, text)] == inside


def test_places_of_numbers() -> None:
    deep = {"type": "object", "properties": {"a": {"enum": ["x", {"id": [2**60 + 1]}]}}}
    with pytest.raises(InvalidRequest, match=r"at \$\.properties\.a\.enum"):
        json_source(deep, COMPACT, "x")
    with pytest.raises(InvalidRequest, match=r"at \$\.maximum"):
        json_source({"type": "integer", "maximum": -1e19}, COMPACT, "x")
    with pytest.raises(InvalidRequest, match=r"\$\.exclusiveMinimum: 0 would not be left out.*; use 1e-22\."):
        grammar_source(StructuredOutputsParams(grammar='start: %json {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}'))
    with pytest.raises(InvalidRequest, match="line 1"):
        grammar_source(StructuredOutputsParams(grammar='start: %json {"const": 9007199254740993}'))
    tag = {"format": {"type": "json_schema", "json_schema": {"const": 9007199254740993}}}
    with pytest.raises(InvalidRequest, match=r"\$\.const"):
        grammar_source(StructuredOutputsParams(structural_tag=tag))
    grammar_source(StructuredOutputsParams(structural_tag={"format": {"type": "json_schema", "json_schema": {"maximum": 2**63 - 1}}}))


SMALLEST: list[Any] = [-(2**63), -(2**63) + 1, -1e19, float(-(2**63)), -1e300]


def test_the_smallest_numbers_end_no_process() -> None:
    """The engine recurses without end for a range of nothing but the smallest integer of 64 bits: the process would be gone."""
    schemas = [
        schema
        for n in SMALLEST
        for schema in ({"const": n}, {"enum": [n, "x"]}, {"type": "integer", "const": n}, {"type": "integer", "minimum": n, "maximum": n})
    ]
    schemas += [{"allOf": [{"type": "integer", "minimum": n}, {"maximum": n}]} for n in SMALLEST]
    code = (
        "import json, sys\n"
        "from octavo.errors import InvalidRequest\n"
        "from octavo.grammar.lark import json_options\n"
        "from octavo.grammar.source import json_source\n"
        "for schema in json.loads(sys.argv[1]):\n"
        "    for lenient in (False, True):\n"
        "        try: json_source(schema, json_options(lenient=lenient), 'x')\n"
        "        except InvalidRequest: pass\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(schemas)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "alive\n", (done.returncode, done.stderr[-500:])


@pytest.mark.parametrize("number", [-(2**63), -(2**63) - 1, -9.3e18])
def test_no_place_of_a_schema_ends_the_process(number: float) -> None:
    """Where only a reference or an older draft looks for a schema too, and in grammars."""
    wrong = {"const": number}
    schemas: list[dict[str, Any]] = [{"$ref": f"#/{key}", key: {"enum": [number]}} for key in ("x", "default")]
    schemas += [
        {"$ref": "#/examples/0", "examples": [wrong]},
        {"type": "array", "items": [wrong]},
        {"items": [{}], "additionalItems": wrong},
    ]
    lark = [f"start: a\na: %json {json.dumps(schema)}" for schema in schemas]
    tags = [{"type": "grammar", "grammar": text} for text in lark] + [{"type": "json_schema", "json_schema": schema} for schema in schemas]
    wishes = [{"json": schema} for schema in schemas] + [{"grammar": text} for text in lark]
    wishes += [{"structural_tag": json.dumps({"type": "structural_tag", "format": tag})} for tag in tags]
    code = (
        "import json, sys\n"
        "from octavo.errors import InvalidRequest\n"
        "from octavo.grammar.source import grammar_source\n"
        "from octavo.protocol.params import StructuredOutputsParams\n"
        "for wish in json.loads(sys.argv[1]):\n"
        "    try: grammar_source(StructuredOutputsParams(**wish))\n"
        "    except InvalidRequest: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(wishes)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["refused"] * len(wishes), (done.returncode, done.stderr[-500:])
