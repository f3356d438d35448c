"""How deep a grammar goes through its references, known before the engine follows them.

Nesting in the text itself is bounded by whoever parses it. References are not: a thousand definitions, each naming the next, are a small
text, and the engine's stack would end before they do (see `stack`). Nothing here recurses, and what it says is an upper bound: where
references run in circles, every level of the circle counts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from octavo.grammar.json_schema import subschemas
from octavo.grammar.pointers import Path, followed, pointer
from octavo.grammar.rules import parts_of
from octavo.grammar.size import too_large

MAX_LEVELS = 1000
"""Of a schema: schemas inside one another and references, all of those on one way."""
MAX_RULES = 10_000
"""Of a grammar: rules and the brackets in them, as if each rule were used by the one before it."""
MAX_STEPS = 500_000
"""Looks at parts of one schema."""
BRACKETS = 30
"""Most levels of brackets that the engine takes in a rule."""

_DEFINITIONS = ("$defs", "definitions")


class _TooIntricate(Exception):
    pass


def depth_problem(source: str) -> str:
    """What is wrong with the depth of a grammar as the engine takes it; "" if nothing is."""
    document = None
    if source.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):  # the engine will say so
            document = json.loads(source)
    if not isinstance(document, dict):
        return _rules_problem(source)
    grammars = document.get("grammars")
    for grammar in [document, *(grammars if isinstance(grammars, list) else ())]:
        if not isinstance(grammar, dict):
            continue
        for schema in (grammar, grammar.get("json_schema")):
            if (found := too_deep(schema)) is not None:
                return f"at {pointer(found[0])}: {found[1]}"
        if isinstance(text := grammar.get("lark_grammar"), str) and (problem := _rules_problem(text)):
            return problem
    return ""


def _rules_problem(text: str) -> str:
    """Rules are not told apart from colons in strings: what is counted can only be too much. Embedded schemas are looked at as such."""
    parts = parts_of(text)
    count = sum(1 + min(part.count("(") + part.count("["), BRACKETS) for part in parts.rest.split(":"))
    if count > MAX_RULES:
        return f"it has more than {MAX_RULES} rules, brackets counted. Use a simpler one, or a regular expression."
    for line, schema in parts.schemas:
        if (large := too_large(schema)) is not None:
            return f"the JSON schema in line {line}, at {pointer(large[0])}: {large[1]}"
        if (deep := too_deep(schema)) is not None:
            return f"the JSON schema in line {line}, at {pointer(deep[0])}: {deep[1]}"
    return ""


def too_deep(schema: Any) -> tuple[Path, str] | None:
    """Where a schema goes deeper than `MAX_LEVELS`, and what to say; None if it does not."""
    try:
        return _Levels(schema).problem()
    except _TooIntricate:
        return (), "its references are too intricate. Use a schema with fewer of them."


class _Levels:
    """Levels below each reference of one schema. The root is the reference None."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._steps = 0
        self._named: list[tuple[Path, Any]] | None = None
        self._places: dict[str, list[tuple[Path, Any]]] = {}
        self._own: dict[str | None, int] = {None: 0}
        self._below: dict[str | None, list[str]] = {}

    def problem(self) -> tuple[Path, str] | None:
        todo: list[str | None] = [None]
        while todo:
            name = todo.pop()
            if name in self._below:
                continue
            starts = [((), self._schema)] if name is None else self._targets(name)
            levels, inside = 0, dict[str, None]()
            for _, start in starts:
                for depth, reference in self._references(start):
                    levels = max(levels, depth)
                    if reference is not None:
                        inside[reference] = None
            self._own[name], self._below[name] = levels, list(inside)
            todo += inside
        return self._longest()

    def _longest(self) -> tuple[Path, str] | None:
        """The longest way from the root; references that lead to one another are one step of it, as long as all of them."""
        groups = _circles(self._below)
        total: dict[str | None, int] = {}
        for group in groups:  # what is referred to comes first
            beyond = max((total[name] for member in group for name in self._below[member] if name in total), default=0)
            levels = beyond + sum(self._own[member] for member in group)
            if levels > MAX_LEVELS:
                return self._place(self._first_step(group)), (
                    f"its references lead through more than {MAX_LEVELS} levels (each schema inside another is one, and each reference). "
                    "Use a flatter schema."
                )
            total.update(dict.fromkeys(group, levels))
        return None

    def _first_step(self, group: list[str | None]) -> str | None:
        """The first reference on a way from the root to the members of a group."""
        first: dict[str | None, str | None] = {None: None}
        todo: list[str | None] = [None]
        while todo:
            name = todo.pop()
            if name in group:
                return first[name]
            for other in self._below[name]:
                if other not in first:
                    first[other] = other if name is None else first[name]
                    todo.append(other)
        return group[0]

    def _place(self, name: str | None) -> Path:
        places = self._targets(name) if name is not None else []
        return places[0][0] if places else ()

    def _references(self, start: Any) -> Iterator[tuple[int, str | None]]:
        """Every part of `start` without its definitions: its level, and what it refers to."""
        todo = [(start, 1)]
        while todo:
            node, level = todo.pop()
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise _TooIntricate
            references = [node[key] for key in ("$ref", "$dynamicRef") if isinstance(node.get(key), str)] if isinstance(node, dict) else []
            yield level + len(references), None
            for reference in references:
                yield level, reference
            todo += [(inner, level + 1) for step, inner in subschemas(node) if step[0] not in _DEFINITIONS]

    def _targets(self, reference: str) -> list[tuple[Path, Any]]:
        """The places that a reference may mean. Where identifiers are involved, every part that has one."""
        if reference not in self._places:
            base, _, fragment = reference.partition("#")
            roots: list[tuple[Path, Any]] = (
                [((), self._schema), *self._identified()] if base or not fragment.startswith("/") else [((), self._schema)]
            )
            if not fragment.startswith("/") and reference not in ("", "#"):
                self._places[reference] = roots
            else:
                found = [followed(place, node, fragment) for place, node in [*roots, *self._identified()]]
                self._places[reference] = [place for place in found if place is not None]
        return self._places[reference]

    def _identified(self) -> list[tuple[Path, Any]]:
        if self._named is None:
            self._named = []
            todo: list[tuple[Path, Any]] = [((), self._schema)]
            while todo:
                path, node = todo.pop()
                if path and isinstance(node, dict) and not {"$id", "id", "$anchor", "$dynamicAnchor"}.isdisjoint(node):
                    self._named.append((path, node))
                todo += [((*path, *step), inner) for step, inner in subschemas(node)]
        return self._named


def _circles(below: dict[str | None, list[str]]) -> list[list[str | None]]:
    """Tarjan's strongly connected components, each after those that it leads to."""
    index: dict[str | None, int] = {}
    low: dict[str | None, int] = {}
    stack: list[str | None] = []
    stacked: set[str | None] = set()
    groups: list[list[str | None]] = []
    work: list[tuple[str | None, Iterator[str]]] = []

    def enter(name: str | None) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        stacked.add(name)
        work.append((name, iter(below[name])))

    for root in below:
        if root not in index:
            enter(root)
        while work:
            name, following = work[-1]
            for other in following:
                if other not in index:
                    enter(other)
                    break
                if other in stacked:
                    low[name] = min(low[name], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    group: list[str | None] = []
                    while not group or group[-1] != name:
                        group.append(stack.pop())
                        stacked.discard(group[-1])
                    groups.append(group)
    return groups
