"""References that lead deep are refused before the engine follows them: its stack would end, and the process with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.grammar.compiler import GrammarCompiler, GrammarError
from octavo.grammar.depth import MAX_LEVELS, depth_problem, too_deep
from octavo.grammar.lark import inline_json, json_options
from octavo.grammar.source import grammar_source
from octavo.grammar.stack import on_deep_stack
from octavo.protocol.params import StructuredOutputsParams
from tests.unit.grammar.test_compiler import VOCABULARY

LINKS: dict[str, Callable[[str], Any]] = {
    "reference": lambda ref: {"$ref": ref},
    "property": lambda ref: {"type": "object", "properties": {"a": {"$ref": ref}}},
    "anyOf": lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]},
    "allOf": lambda ref: {"allOf": [{"$ref": ref}, {"type": "object"}]},
    "oneOf": lambda ref: {"oneOf": [{"type": "null"}, {"$ref": ref}]},
    "items": lambda ref: {"type": "array", "items": {"$ref": ref}},
    "prefixItems": lambda ref: {"type": "array", "prefixItems": [{"$ref": ref}]},
    "additionalProperties": lambda ref: {"type": "object", "additionalProperties": {"$ref": ref}},
    "patternProperties": lambda ref: {"type": "object", "patternProperties": {"^a": {"$ref": ref}}},
    "several": lambda ref: {"allOf": [{"anyOf": [{"type": "object", "properties": {"a": {"$ref": ref}}}, {"type": "null"}]}]},
}


def chain(link: Callable[[str], Any], count: int, end: Any = None) -> dict[str, Any]:
    parts = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(count)}
    return {"$defs": {**parts, f"d{count}": end or {"type": "object"}}, "$ref": "#/$defs/d0"}


def identified(count: int, key: str) -> dict[str, Any]:
    sign = "#" if key == "$anchor" else ""
    parts = {f"d{i}": {key: f"d{i}", "$ref": f"{sign}d{i + 1}"} for i in range(count)}
    return {"$id": "http://x/y", "$defs": {**parts, f"d{count}": {key: f"d{count}"}}, "$ref": f"{sign}d0"}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
def test_a_long_chain_of_references_is_refused_with_its_place(link: Callable[[str], Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"at \$\.\$defs\.d0: .*levels"):
        grammar_source(StructuredOutputsParams(json=chain(link, 4000)))


@pytest.mark.parametrize("key", ["$id", "$anchor"])
def test_identifiers_are_references_too(key: str) -> None:
    assert too_deep(identified(4000, key)) is not None
    assert too_deep(identified(5, key)) is None


def test_escaped_pointers_and_circles() -> None:
    assert too_deep(chain(lambda ref: {"$ref": ref.replace("$", "%24")}, 4000)) is not None
    assert too_deep(chain(LINKS["property"], 4000, {"properties": {"a": {"$ref": "#/$defs/d0"}}})) is not None
    # A tree of many kinds that may contain one another, as a program's syntax has.
    kinds = {f"k{i}": {"properties": {"a": {"anyOf": [{"$ref": f"#/$defs/k{j}"} for j in range(60)]}}} for i in range(60)}
    assert too_deep({"$defs": kinds, "$ref": "#/$defs/k0"}) is None
    # Deep only where nothing refers to it, and wide.
    assert too_deep({"$defs": chain(LINKS["reference"], 4000)["$defs"], "type": "null"}) is None
    assert too_deep({"$defs": {"a": {}}, "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(1900)}}) is None


@pytest.mark.parametrize("link", [link for kind, link in LINKS.items() if kind != "oneOf"])
def test_what_is_let_through_can_be_compiled(link: Callable[[str], Any]) -> None:
    schema = chain(link, next(n for n in (MAX_LEVELS // k - 2 for k in range(2, 9)) if too_deep(chain(link, n)) is None))
    source = grammar_source(StructuredOutputsParams(json=schema))
    compiler = GrammarCompiler()
    compiler.set_vocabulary(VOCABULARY)
    assert not compiler.matcher(compiler.compile(source)).problem()
    compiler.close()


RULES: dict[str, Callable[[int], str]] = {
    "rules": lambda n: "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(n)) + f'\nr{n}: "c"',
    "terminals": lambda n: "start: T0\n" + "\n".join(f'T{i}: "a" T{i + 1} | "b"' for i in range(n)) + f'\nT{n}: "c"',
    "one line": lambda n: "start: r0 " + " ".join(f'r{i}:"a" r{i + 1}' for i in range(n)) + f' r{n}:"c"',
    "gbnf": lambda n: "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(n)) + f'\nr{n} ::= "c"',
    "brackets": lambda n: (
        "start: r0\n" + "\n".join(f'r{i}: {"(" * 20}"a" r{i + 1}{")?" * 20}' for i in range(n // 40)) + f'\nr{n // 40}: "c"'
    ),
    "nested": lambda n: "start: inner\ninner: %lark {\n" + RULES["rules"](n) + "\n}",
}


@pytest.mark.parametrize("write", RULES.values(), ids=RULES.keys())
def test_a_grammar_of_too_many_rules_is_refused(write: Callable[[int], str]) -> None:
    with pytest.raises(InvalidRequest, match=r"more than \d+ rules"):
        grammar_source(StructuredOutputsParams(grammar=write(20_000)))


def test_schemas_inside_grammars() -> None:
    text = f"start: a\na: {inline_json(chain(LINKS['anyOf'], 4000), json_options())}"
    with pytest.raises(InvalidRequest, match=r"line 2: the JSON schema cannot be used: at \$\.\$defs\.d0: .*levels"):
        grammar_source(StructuredOutputsParams(grammar=text))
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": chain(LINKS["allOf"], 4000)}}
    with pytest.raises(InvalidRequest, match=r"format\.json_schema: .* at \$\.\$defs\.d0: .*levels"):
        grammar_source(StructuredOutputsParams(structural_tag=tag))
    wide = {
        "properties": {f"p{i}": {"type": "string", "enum": ["a(", "b["]} for i in range(1900)},
        "required": [f"p{i}" for i in range(1900)],
    }
    assert not depth_problem(json.dumps({"grammars": [{"lark_grammar": f"start: a\na: {inline_json(wide, {})}"}]}))


def test_the_core_checks_for_itself() -> None:
    compiler = GrammarCompiler()
    compiler.set_vocabulary(VOCABULARY)
    for source in ({"json_schema": chain(LINKS["property"], 4000)}, {"lark_grammar": RULES["rules"](20_000)}):
        with pytest.raises(GrammarError, match="more than"):
            compiler.matcher(compiler.compile(json.dumps({"grammars": [source]})))
    compiler.close()


def test_a_deep_stack_gives_back_results_and_errors() -> None:
    assert on_deep_stack(lambda: on_deep_stack(int, "7")) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        on_deep_stack(int, "x")
