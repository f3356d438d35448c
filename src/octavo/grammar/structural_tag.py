"""Structural tags: free text in which certain beginnings must be followed by something of a given form.

Two spellings are in use. The older: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. The newer is a tree: {"type":
"structural_tag", "format": F}, where F is one of const_string, json_schema, qwen_xml_parameter, any_text, regex, grammar, sequence, or, tag,
triggered_tags and tags_with_separator. A key that is not known is refused in all of them: whoever wrote it counts on what it says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from octavo.errors import InvalidRequest
from octavo.grammar.gbnf import in_lark, is_gbnf
from octavo.grammar.json_schema import prepared
from octavo.grammar.lark import ANY_TEXT, inline_json, literal, pattern_literal
from octavo.grammar.pointers import pointer
from octavo.grammar.reach import takes_all
from octavo.grammar.rules import in_gbnf, parts_of, with_string_options, without_quotes
from octavo.grammar.size import too_large
from octavo.grammar.unkept import pattern_problem, unkept
from octavo.grammar.xml_parameters import BLANKS, VALUE_END, NotInXml, parameters_of

MAX_DEPTH = 32
KEYS: dict[str, tuple[str, ...]] = {
    "const_string": ("value", "text"),
    "json_schema": ("json_schema", "style"),
    "qwen_xml_parameter": ("json_schema",),
    "any_text": ("excludes",),
    "regex": ("pattern", "excludes"),
    "grammar": ("grammar",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
"""What each kind of format may hold besides its type."""
IDLE: dict[str, tuple[Any, ...]] = {"excludes": ([], None), "style": ("json",)}
"""Keys of which only these values are taken: those that clients send when nobody set them."""
MAX_PATH_CHARS = 120
"""Of a path in a message: what is longer has its middle left out."""
_OLDER_PLACE = re.compile(r"^structures\.tags\[(\d+)\]\.content\.json_schema")


def structural_tag_grammar(
    document: dict[str, Any], options: dict[str, Any], param: str, problem_of: Callable[[str], str]
) -> tuple[str, list[tuple[str, Any]]]:
    """The grammar of a structural tag in either spelling, and the JSON schemas in it, each with its place.

    Args:
        options: how JSON is to be written.
        problem_of: what there is to say against a grammar; "" when it is fine.

    Raises:
        InvalidRequest: a field is missing or of the wrong type, or a part would never end; the message has its path.
    """
    writer = _Writer(options, param, problem_of)
    if document.get("type", "structural_tag") != "structural_tag":
        writer.refuse("type", 'must be "structural_tag"')
    if "structures" in document:
        parts = writer.older(document)
    elif "format" in document:
        writer.known(document, "$", ("type", "format"))
        parts = writer.format(document["format"], "format")
    else:
        writer.refuse("$", 'needs "format" (or "structures" and "triggers")')
    root = writer.rule_of(parts)
    return "\n".join([f"start: {root}", *writer.rules]), writer.schemas


@dataclass(frozen=True)
class _Part:
    """A piece of a text. What is not a rule is regular, and can be put together with its neighbours.

    That matters because the engine reads the longest piece that it can: a text that may be anything, or letters before a letter, would
    never end. Written as one expression with what follows they do.
    """

    kind: Literal["text", "end", "pattern", "free", "rule", "choice"]
    """A fixed text (one of some), the same at the end of a tag, which is where it ends; a pattern; any text; a rule; one of `choices`."""
    path: str
    expression: str = ""
    """As part of a terminal, or of a rule."""
    choices: tuple[tuple[_Part, ...], ...] = ()

    @property
    def fixed(self) -> bool:
        return self.kind in ("text", "end")

    @property
    def regular(self) -> bool:
        return self.kind not in ("rule", "choice")


_Parts = tuple[_Part, ...]


class _Writer:
    """Collects rules."""

    def __init__(self, options: dict[str, Any], param: str, problem_of: Callable[[str], str]) -> None:
        self._options = options
        self._param = param
        self._problem_of = problem_of
        self._depth = 0
        self.schemas: list[tuple[str, Any]] = []
        self.rules: list[str] = [f"TEXT: {ANY_TEXT}"]

    def refuse(self, path: str, why: str) -> NoReturn:
        if len(path) > MAX_PATH_CHARS:
            path = f"{path[: MAX_PATH_CHARS // 2]} ... {path[-MAX_PATH_CHARS // 2 :]}"
        raise InvalidRequest(f"{self._param}.structural_tag: at {path}: {why.removesuffix('.')}.", param=self._param)

    def known(self, node: dict[str, Any], path: str, keys: tuple[str, ...]) -> None:
        """Refuse a key that says something nobody would heed."""
        for key, value in node.items():
            place = key if path == "$" else f"{path}.{key}"
            if key not in keys:
                self.refuse(place, f"there is no such key here; allowed are {', '.join(keys)}")
            if key in IDLE and value not in IDLE[key]:
                self.refuse(place, f"cannot be enforced; leave it out, or set it to {IDLE[key][0]!r}")
            if key in ("at_least_one", "stop_after_first") and not isinstance(value, bool):
                self.refuse(place, "must be true or false")

    def older(self, document: dict[str, Any]) -> _Parts:
        self.known(document, "$", ("type", "structures", "triggers"))
        structures, triggers = document.get("structures"), document.get("triggers")
        if not isinstance(structures, list) or not structures or not all(isinstance(s, dict) for s in structures):
            self.refuse("structures", "must be a non-empty list of objects with begin, schema and end")
        for i, structure in enumerate(structures):
            self.known(structure, f"structures[{i}]", ("begin", "schema", "end"))
        tags = [
            {"begin": s.get("begin"), "content": {"type": "json_schema", "json_schema": s.get("schema", {})}, "end": s.get("end", "")}
            for s in structures
        ]
        return self.triggered({"triggers": triggers, "tags": tags}, "structures")

    def format(self, node: Any, path: str) -> _Parts:
        kinds: dict[str, Callable[[dict[str, Any], str], _Parts]] = {
            "const_string": self.const_string,
            "json_schema": self.json_schema,
            "qwen_xml_parameter": self.xml_parameters,
            "any_text": self.any_text,
            "regex": self.regex,
            "grammar": self.grammar,
            "sequence": self.sequence,
            "or": self.alternatives,
            "tag": self.tag,
            "triggered_tags": self.triggered,
            "tags_with_separator": self.separated,
        }
        if not isinstance(node, dict) or node.get("type") not in list(kinds):
            self.refuse(path, f"type must be one of {', '.join(kinds)}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self.refuse(path, f"nested more than {MAX_DEPTH} levels deep")
        self.known(node, path, ("type", *KEYS[node["type"]]))
        parts = kinds[node["type"]](node, path)
        self._depth -= 1
        return parts

    def const_string(self, node: dict[str, Any], path: str) -> _Parts:
        return (_Part("text", path, literal(self._string(node, ("value", "text"), path))),)

    def json_schema(self, node: dict[str, Any], path: str) -> _Parts:
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            self.refuse(f"{path}.json_schema", "must be a JSON schema")
        self.schemas.append((_OLDER_PLACE.sub(r"structures[\1].schema", f"{path}.json_schema"), schema))
        return self._as_rule(inline_json(prepared(schema), self._options), path)

    def xml_parameters(self, node: dict[str, Any], path: str) -> _Parts:
        """<parameter=name>value</parameter> for each property, in the order of the schema. Texts stand as they are, up to the closing tag."""
        schema = node.get("json_schema")
        place = f"{path}.json_schema"
        try:
            parameters = parameters_of(schema)
        except NotInXml as error:
            self.refuse(place, f"the JSON schema cannot be used: at {pointer(error.path)}: {error.why}")
        blanks = self._rule(BLANKS)
        parts = [blanks]
        for parameter in parameters:
            opening = literal(f"<parameter={parameter.name}>")
            if parameter.texts is not None:
                value = f"{blanks} ({' | '.join(map(literal, parameter.texts))}) {blanks} {literal(VALUE_END)}"
            elif parameter.schema is not None:
                self.schemas.append((f"{place}.properties.{parameter.name}", parameter.schema))
                value = f"{blanks} {inline_json(prepared(parameter.schema), self._options)} {blanks} {literal(VALUE_END)}"
            else:
                value = f"until_{len(self.rules)}"
                self.rules.append(f"{value}[lazy]: TEXT {literal(VALUE_END)}")
            parts.append(f"({opening} {value} {blanks})" + ("" if parameter.required else "?"))
        return self._as_rule(" ".join(parts), path)

    def any_text(self, node: dict[str, Any], path: str) -> _Parts:
        return (_Part("free", path, "TEXT"),)

    def regex(self, node: dict[str, Any], path: str) -> _Parts:
        pattern = self._string(node, ("pattern",), path)
        expression = pattern_literal(pattern)
        if problem := pattern_problem(pattern) or self._problem_of(f"start: {expression}"):
            self.refuse(f"{path}.pattern", without_quotes(problem))
        return (_Part("pattern", path, expression),)

    def grammar(self, node: dict[str, Any], path: str) -> _Parts:
        given = text = self._string(node, ("grammar",), path)
        if gbnf := is_gbnf(text):
            text = in_lark(text, f"{self._param}.structural_tag: at {path}.grammar", self._param)
        for line, schema in parts_of(text).schemas:
            if (bad := too_large(schema) or unkept(schema)) is not None:
                self.refuse(f"{path}.grammar", f"the JSON schema in line {line}, at {pointer(bad[0])}: {bad[1]}")
        text = with_string_options(text)
        if problem := self._problem_of(text):
            self.refuse(f"{path}.grammar", in_gbnf(problem, given, text) if gbnf else problem)
        return self._as_rule(f"%lark {{\n{text}\n}}", path)

    def sequence(self, node: dict[str, Any], path: str) -> _Parts:
        elements = self._list(node, "elements", path)
        return tuple(part for i, element in enumerate(elements) for part in self.format(element, f"{path}.elements[{i}]"))

    def alternatives(self, node: dict[str, Any], path: str) -> _Parts:
        ways = [self.format(element, f"{path}.elements[{i}]") for i, element in enumerate(self._list(node, "elements", path))]
        return (self._one_of(ways, path),)

    def _one_of(self, ways: Sequence[_Parts], path: str) -> _Part:
        parts = [part for way in ways for part in way]
        if not all(part.regular and part.kind != "end" for part in parts):
            return _Part("choice", path, choices=tuple(ways))
        expression = f"({' | '.join(_joined(way) for way in ways)})"
        if all(part.kind == "text" for part in parts):
            return _Part("text", path, expression)
        free = next((way[-1] for way in ways if way[-1].kind == "free"), None)
        return _Part("pattern", path, expression) if free is None else _Part("free", free.path, expression)

    def tag(self, node: dict[str, Any], path: str) -> _Parts:
        begin = self._string(node, ("begin",), path)
        return self._tag_after(node, begin, path)

    def _tag_after(self, node: dict[str, Any], begin: str, path: str) -> _Parts:
        """A tag of whose beginning only `begin` is left."""
        if node.get("type", "tag") != "tag":
            self.refuse(f"{path}.type", 'must be "tag"')
        self.known(node, path, ("type", *KEYS["tag"]))
        ends = node.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            self.refuse(f"{path}.end", "must be a string, or a list of strings")
        beginning: _Parts = (_Part("text", path, literal(begin)),) if begin else ()
        content = self.format(node.get("content"), f"{path}.content")
        if not any(ends):
            return (*beginning, *content)
        closing = " | ".join(literal(end) or '""' for end in ends)
        if all(ends):
            return (*beginning, *content, _Part("end", f"{path}.end", closing if len(ends) == 1 else f"({closing})"))
        # Without its end a text that may be anything is one with any end.
        return (*beginning, *content) if content[-1].kind == "free" else (*beginning, *content, *self._as_rule(closing, path))

    def triggered(self, node: dict[str, Any], path: str) -> _Parts:
        triggers, tags = node.get("triggers"), self._list(node, "tags", path)
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            self.refuse(f"{path}.triggers", "must be a non-empty list of non-empty strings")
        started: list[_Parts] = []
        for trigger in triggers:
            bodies = []
            for i, tag in enumerate(tags):
                begin = self._string(tag, ("begin",), f"{path}.tags[{i}]")
                if begin.startswith(trigger):
                    bodies.append(self._tag_after(tag, begin[len(trigger) :], f"{path}.tags[{i}]"))
            if bodies:
                name = f"trigger_{len(self.rules)}"
                self.rules.append(f"{name}[lazy]: TEXT {literal(trigger)}")
                started.append((_Part("rule", path, name), _Part("choice", path, choices=tuple(bodies))))
        for i, tag in enumerate(tags):
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                self.refuse(f"{path}.tags[{i}].begin", "starts with none of the triggers")
        no_tag: _Parts = (_Part("free", path, "TEXT"),)
        if node.get("stop_after_first"):
            return (_Part("choice", path, choices=(*started, *(() if node.get("at_least_one") else (no_tag,)))),)
        one = self.rule_of((_Part("choice", path, choices=tuple(started)),), f"the text behind the tags of {path}")
        return (_Part("rule", path, f"{one}{'+' if node.get('at_least_one') else '*'}"), *no_tag)

    def separated(self, node: dict[str, Any], path: str) -> _Parts:
        tags = self._list(node, "tags", path)
        ways = [self.tag(tag, f"{path}.tags[{i}]") for i, tag in enumerate(tags)]
        given = self._string(node, ("separator",), path, empty=True)
        if not node.get("stop_after_first"):
            one = self.rule_of((_Part("choice", path, choices=tuple(ways)),), f"{path}.separator")
            ways = [self._as_rule(f"{one} ({literal(given)} {one})*", path)]
        return (_Part("choice", path, choices=(*ways, *(() if node.get("at_least_one") else ((),)))),)

    # Parts as rules

    def rule_of(self, parts: _Parts, before: str = "") -> str:
        """The name of a rule for parts one after the other.

        Args:
            before: what comes behind them, if anything does.
        """
        return self._rule(" ".join(self._pieces(parts, before)) or '""')

    def _pieces(self, parts: _Parts, before: str) -> Iterator[str]:
        chunk: list[_Part] = []
        for i, part in enumerate(parts):
            if part.regular:
                chunk.append(part)
                if part.kind == "end" and not all(one.fixed for one in chunk):
                    yield self._named(chunk, lazy=True)  # up to the end of the tag, not past it
                    chunk = []
                continue
            after = parts[i + 1].path if i + 1 < len(parts) else before
            rule = self.rule_of_choice(part, after) if part.kind == "choice" else part.expression
            if chunk:
                yield self._regular(chunk, part.path, rule)
                chunk = []
            yield rule
        if chunk:
            yield self._regular(chunk, before)

    def rule_of_choice(self, part: _Part, before: str) -> str:
        return self._rule(" | ".join(" ".join(self._pieces(way, before)) or '""' for way in part.choices))

    def _regular(self, chunk: list[_Part], before: str, rule: str = "") -> str:
        """Regular parts up to something else, or to the end of all.

        Args:
            before: where what follows is, if anything does.
            rule: what follows, if it is known.
        """
        last = chunk[-1]
        if all(part.fixed for part in chunk):
            return " ".join(part.expression for part in chunk)
        if before and last.kind == "free":
            self.refuse(
                last.path,
                f"any text may stand here, so that what follows ({before}) would never begin. Put a const_string between the two, or give "
                "the tag an end",
            )
        if before and last.kind == "pattern" and takes_all(_joined(chunk), "\n".join([f"start: {rule}", *self.rules]) if rule else ""):
            self.refuse(last.path, f"the pattern takes what follows ({before}) for more of its own, so that it would never begin")
        return self._named(chunk, lazy=bool(before) and last.fixed)

    def _named(self, chunk: list[_Part], *, lazy: bool) -> str:
        """One expression of its own: it ends as soon as it can, or else as late as it can."""
        name = f"until_{len(self.rules)}" if lazy else f"TEXT_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {_joined(chunk)}")
        return name

    def _as_rule(self, body: str, path: str) -> _Parts:
        return (_Part("rule", path, self._rule(body)),)

    def _rule(self, body: str) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _string(self, node: Any, names: tuple[str, ...], path: str, *, empty: bool = False) -> str:
        values = [node.get(name) for name in names] if isinstance(node, dict) else []
        value = next((v for v in values if isinstance(v, str) and (v or empty)), None)
        if value is None:
            self.refuse(f"{path}.{names[0]}", "must be a string" if empty else "must be a non-empty string")
        return value

    def _list(self, node: dict[str, Any], name: str, path: str) -> list[Any]:
        value = node.get(name)
        if not isinstance(value, list) or not value:
            self.refuse(f"{path}.{name}", "must be a non-empty list")
        return value


def _joined(parts: Sequence[_Part]) -> str:
    """As one expression."""
    return " ".join(part.expression for part in parts)
