"""Structural tags: free text in which certain beginnings must be followed by something of a given form.

Two spellings are in use. The older: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. The newer is a tree: {"type":
"structural_tag", "format": F}, where F is one of const_string, json_schema, qwen_xml_parameter, any_text, regex, grammar, sequence, or, tag,
triggered_tags and tags_with_separator. A key that is not known is refused in all of them: whoever wrote it counts on what it says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.errors import InvalidRequest
from octavo.grammar.gbnf import in_lark, is_gbnf
from octavo.grammar.json_schema import prepared
from octavo.grammar.lark import ANY_TEXT, inline_json, literal, pattern_literal
from octavo.grammar.pointers import pointer
from octavo.grammar.unkept import pattern_problem
from octavo.grammar.xml_parameters import BLANKS, VALUE_END, NotInXml, parameters_of

MAX_DEPTH = 32
MAX_PATH = 120
"""Characters of a place in a message."""
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
_OLDER_PLACE = re.compile(r"^structures\.tags\[(\d+)\]\.content\.json_schema")


@dataclass(frozen=True)
class TagGrammar:
    """The grammar of a structural tag, and what in it may be wrong for reasons of its own; each with its place."""

    text: str
    schemas: list[tuple[str, Any]]
    patterns: list[tuple[str, str]]


def structural_tag_grammar(document: dict[str, Any], options: dict[str, Any], param: str) -> TagGrammar:
    """The grammar of a structural tag in either spelling.

    Args:
        options: how JSON is to be written.

    Raises:
        InvalidRequest: a field is missing or of the wrong type; the message has its path.
    """
    writer = _Writer(options, param)
    if document.get("type", "structural_tag") != "structural_tag":
        writer.refuse("type", 'must be "structural_tag"')
    if "structures" in document:
        root = writer.older(document)
    elif "format" in document:
        writer.known(document, "$", ("type", "format"))
        root = writer.format(document["format"], "format")
    else:
        writer.refuse("$", 'needs "format" (or "structures" and "triggers")')
    return TagGrammar("\n".join([f"start: {root}", *writer.rules]), writer.schemas, writer.patterns)


def _is_regular(node: Any) -> bool:
    """Whether a format can be one terminal."""
    match node.get("type") if isinstance(node, dict) else None:
        case "const_string" | "any_text" | "regex":
            return True
        case "sequence" | "or":
            parts = node.get("elements")
            return isinstance(parts, list) and bool(parts) and all(map(_is_regular, parts))
        case _:
            return False


def _has_any_text(node: Any) -> bool:
    """Of a format that is regular: whether it may go on for ever, whatever comes."""
    return node["type"] == "any_text" or any(map(_has_any_text, node.get("elements", ())))


class _Writer:
    """Collects rules; every method returns the name of one."""

    def __init__(self, options: dict[str, Any], param: str) -> None:
        self._options = options
        self._param = param
        self._depth = 0
        self.schemas: list[tuple[str, Any]] = []
        self.patterns: list[tuple[str, str]] = []
        self.rules: list[str] = [f"TEXT: {ANY_TEXT}"]

    def refuse(self, path: str, why: str) -> NoReturn:
        if len(path) > MAX_PATH:
            path = f"{path[: MAX_PATH // 2]} … {path[-MAX_PATH // 2 :]}"
        raise InvalidRequest(f"{self._param}.structural_tag: at {path}: {why}.", param=self._param)

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

    def older(self, document: dict[str, Any]) -> str:
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

    def format(self, node: Any, path: str) -> str:
        kinds: dict[str, Callable[[dict[str, Any], str], str]] = {
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
        name = kinds[node["type"]](node, path)
        self._depth -= 1
        return name

    def const_string(self, node: dict[str, Any], path: str) -> str:
        return self._rule(literal(self._string(node, ("value", "text"), path)))

    def json_schema(self, node: dict[str, Any], path: str) -> str:
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            self.refuse(f"{path}.json_schema", "must be a JSON schema")
        self.schemas.append((_OLDER_PLACE.sub(r"structures[\1].schema", f"{path}.json_schema"), schema))
        return self._rule(inline_json(prepared(schema), self._options))

    def xml_parameters(self, node: dict[str, Any], path: str) -> str:
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
        return self._rule(" ".join(parts))

    def any_text(self, node: dict[str, Any], path: str) -> str:
        return self._rule("TEXT")

    def regex(self, node: dict[str, Any], path: str) -> str:
        return self._rule(self._pattern(node, path))

    def _pattern(self, node: dict[str, Any], path: str) -> str:
        pattern = self._string(node, ("pattern",), path)
        if problem := pattern_problem(pattern):
            self.refuse(f"{path}.pattern", problem)
        self.patterns.append((f"{path}.pattern", pattern))
        return self._terminal(pattern_literal(pattern))

    def grammar(self, node: dict[str, Any], path: str) -> str:
        text = self._string(node, ("grammar",), path)
        if is_gbnf(text):
            text = in_lark(text, f"{self._param}.structural_tag: at {path}.grammar", self._param)
        return self._rule(f"%lark {{\n{text}\n}}")

    def sequence(self, node: dict[str, Any], path: str) -> str:
        """The engine's lexer takes as much as a terminal can have, and never goes back: neighbours that are regular become one terminal."""
        parts = self._list(node, "elements", path)
        rules: list[str] = []
        at = 0
        while at < len(parts):
            end = at
            while end < len(parts) and _is_regular(parts[end]):
                end += 1
            place = f"{path}.elements[{at}]"
            if end == at:
                rules.append(self.format(parts[at], place))
            elif end == len(parts) or not any(map(_has_any_text, parts[at:end])):
                rules.append(self._terminal(self._expressions(parts[at:end], path, at)))
            elif isinstance(following := parts[end], dict) and following.get("type") == "tag":
                begin = literal(self._string(following, ("begin",), f"{path}.elements[{end}]"))
                rules.append(self._until(f"{self._expressions(parts[at:end], path, at)} {begin}"))
                rules.append(self._tag_after(following, "", f"{path}.elements[{end}]"))
                end += 1
            elif _has_any_text(parts[end - 1]):
                self.refuse(f"{path}.elements[{end - 1}]", "any text has no end before what follows, which begins with no fixed text")
            else:
                rules.append(self._until(self._expressions(parts[at:end], path, at)))
            at = max(end, at + 1)
        return self._rule(" ".join(rules))

    def _expressions(self, parts: list[Any], path: str, first: int = 0) -> str:
        return " ".join(self._expression(part, f"{path}.elements[{i}]") for i, part in enumerate(parts, first))

    def _expression(self, node: dict[str, Any], path: str) -> str:
        """A format that `_is_regular`, as part of a terminal."""
        self.known(node, path, ("type", *KEYS[node["type"]]))
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self.refuse(path, f"nested more than {MAX_DEPTH} levels deep")
        try:
            match node["type"]:
                case "const_string":
                    return literal(self._string(node, ("value", "text"), path))
                case "any_text":
                    return "TEXT"
                case "regex":
                    return self._pattern(node, path)
                case "sequence":
                    return f"({self._expressions(node['elements'], path)})"
                case _:
                    return (
                        "(" + " | ".join(self._expression(part, f"{path}.elements[{i}]") for i, part in enumerate(node["elements"])) + ")"
                    )
        finally:
            self._depth -= 1

    def alternatives(self, node: dict[str, Any], path: str) -> str:
        parts = self._list(node, "elements", path)
        if _is_regular(node):
            return self._rule(self._terminal(self._expression(node, path)))
        return self._rule(" | ".join(self.format(part, f"{path}.elements[{i}]") for i, part in enumerate(parts)))

    def tag(self, node: dict[str, Any], path: str) -> str:
        begin = self._string(node, ("begin",), path)
        return self._tag_after(node, begin, path)

    def _tag_after(self, node: dict[str, Any], begin: str, path: str) -> str:
        """A tag of whose beginning only `begin` is left."""
        if node.get("type", "tag") != "tag":
            self.refuse(f"{path}.type", 'must be "tag"')
        self.known(node, path, ("type", *KEYS["tag"]))
        ends = node.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            self.refuse(f"{path}.end", "must be a string, or a list of strings")
        content = node.get("content")
        if isinstance(content, dict) and _is_regular(content):
            inside = self._expression(content, f"{path}.content")
            closing = " | ".join(literal(end) for end in ends if end)
            if all(ends):  # the text goes up to the end, not past it
                return self._rule(f"{literal(begin)} {self._until(f'({inside}) ({closing})')}")
            return self._rule(f"{literal(begin)} {self._terminal(f'({inside})' + (f' ({closing})?' if closing else ''))}")
        inner = self.format(content, f"{path}.content")
        closing = " | ".join(literal(end) or '""' for end in ends)
        return self._rule(f"{literal(begin)} {inner} ({closing})" if any(ends) else f"{literal(begin)} {inner}")

    def triggered(self, node: dict[str, Any], path: str) -> str:
        triggers, tags = node.get("triggers"), self._list(node, "tags", path)
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            self.refuse(f"{path}.triggers", "must be a non-empty list of non-empty strings")
        started = []
        for trigger in triggers:
            bodies = []
            for i, tag in enumerate(tags):
                begin = self._string(tag, ("begin",), f"{path}.tags[{i}]")
                if begin.startswith(trigger):
                    bodies.append(self._tag_after(tag, begin[len(trigger) :], f"{path}.tags[{i}]"))
            if bodies:
                name = f"trigger_{len(self.rules)}"
                self.rules.append(f"{name}[lazy]: TEXT {literal(trigger)}")
                started.append(self._rule(f"{name} ({' | '.join(bodies)})"))
        for i, tag in enumerate(tags):
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                self.refuse(f"{path}.tags[{i}].begin", "starts with none of the triggers")
        repeat = "+" if node.get("at_least_one") else "*"
        if node.get("stop_after_first"):
            return self._rule(" | ".join([*started, *([] if node.get("at_least_one") else ["TEXT"])]))
        return self._rule(f"({' | '.join(started)}){repeat} TEXT")

    def separated(self, node: dict[str, Any], path: str) -> str:
        tags = self._list(node, "tags", path)
        names = [self.tag(tag, f"{path}.tags[{i}]") for i, tag in enumerate(tags)]
        one = self._rule(" | ".join(names))
        separator = literal(self._string(node, ("separator",), path, empty=True))
        body = one if node.get("stop_after_first") else f"{one} ({separator} {one})*"
        return self._rule(body if node.get("at_least_one") else f"({body})?")

    def _until(self, expression: str) -> str:
        """A terminal that ends where its expression first can."""
        name = f"until_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {expression}")
        return name

    def _terminal(self, expression: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

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
