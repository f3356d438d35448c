"""The arguments of a call as Qwen's coders write them: <parameter=name>value</parameter>, with the values of texts as they are.

Only what such a text can be held to is taken: an object with named properties, each either a text (free, or one of several), or a value
that is written as JSON. A limit on a free text would have to be counted up to a closing tag that the text itself may not hold; it is
refused rather than left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.grammar.json_schema import FORMATS, NOTES
from octavo.grammar.pointers import Path, followed

VALUE_END = "</parameter>"
BLANKS = r"/[ \t\n]{0,20}/"
"""Around parameters and values. Bounded, as those of JSON are."""
_OUTER = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance"}
_FREE = NOTES | {"type", "nullable"}
_MAX_REFERENCES = 20


class NotInXml(Exception):
    """A schema that no text of this form can be held to."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path
        self.why = why


@dataclass(frozen=True)
class Parameter:
    """With neither `texts` nor `schema` the value is any text."""

    name: str
    required: bool
    texts: tuple[str, ...] | None = None
    schema: dict[str, Any] | None = None


def parameters_of(schema: Any) -> list[Parameter]:
    """The parameters that an object's schema names, in its order.

    Raises:
        NotInXml: with the path in the schema.
    """
    if not isinstance(schema, dict):
        raise NotInXml((), "the schema of an object is needed, with the parameters as its properties")
    if schema.get("type", "object") != "object":
        raise NotInXml(("type",), 'must be "object"')
    for key in schema:
        if key not in _OUTER:
            raise NotInXml((key,), f"cannot be enforced in XML; allowed are {', '.join(sorted(_OUTER - NOTES))} and annotations")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise NotInXml(("properties",), "must be an object")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise NotInXml(("required",), "must be a list of names of properties")
    if missing := [name for name in required if name not in properties]:
        raise NotInXml(("required",), f"names {missing[0]!r}, which is not among the properties")
    for name, part in properties.items():
        if part is False and name in required:
            raise NotInXml(("properties", name), "it is required, and nothing can match it")
    return [_parameter(schema, name, part, name in required) for name, part in properties.items() if part is not False]


def _parameter(schema: dict[str, Any], name: str, part: Any, required: bool) -> Parameter:
    path: Path = ("properties", name)
    if not name or any(char in name for char in "<>\n"):
        raise NotInXml(path, "a name in XML is not empty, and has no <, > or line break")
    part = {} if part is True else part
    for _ in range(_MAX_REFERENCES):
        reference = part.get("$ref") if isinstance(part, dict) and part.keys() <= NOTES | {"$ref"} else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target = followed((), schema, reference[1:])
        if target is None:
            break
        part = target[1]
    if not isinstance(part, dict):
        raise NotInXml(path, "a schema is an object")
    if part.get("format") not in FORMATS:
        part = {key: value for key, value in part.items() if key != "format"}
    if _free(part):
        return Parameter(name, required)
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list) and values and part.keys() <= _FREE | {"const", "enum"} and all(isinstance(v, str) for v in values):
        listed = part.get("enum", values)
        texts = tuple(
            dict.fromkeys(v for v in values if isinstance(listed, list) and v in listed and VALUE_END not in v and v.strip() == v and v)
        )
        if part.get("type", "string") != "string" or len(texts) != len(set(values)):
            raise NotInXml(path, "not all of its values can be written as texts between tags")
        return Parameter(name, required, texts=texts)
    if not _never_text(part):
        raise NotInXml(
            path,
            "of a text in XML only the type, or its values (enum, const), can be enforced; of any other value the type must say that it is none",
        )
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return Parameter(name, required, schema={**definitions, **part})


def _free(part: Any) -> bool:
    """Any text will do: it is a text, or may be one, and nothing else is said."""
    if not isinstance(part, dict):
        return part is True
    kinds = part.get("type", "string")
    if part.keys() <= _FREE:
        return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    choices = part.get("anyOf")
    return part.keys() <= NOTES | {"anyOf"} and isinstance(choices, list) and any(_free(choice) for choice in choices)


def _never_text(part: dict[str, Any]) -> bool:
    """None of its values is a text."""
    kinds = part.get("type")
    if kinds is not None:
        return "string" not in (kinds if isinstance(kinds, list) else [kinds])
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list):
        return not any(isinstance(value, str) for value in values)
    choices = part.get("anyOf")
    return isinstance(choices, list) and all(isinstance(choice, dict) and _never_text(choice) for choice in choices)
