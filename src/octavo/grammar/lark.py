"""Writing grammars: escaping, JSON inside a grammar, alternatives. The text is that of the engine's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.grammar.unkept import string_options

WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the tokens of a JSON text. Bounded: small models write blanks until the end of their context when nothing stops them."""

ANY_TEXT = r"/(.|\n)*/"


def json_options(*, compact: bool = False, pattern: str | None = None, lenient: bool = False) -> dict[str, Any]:
    """How JSON is to be written.

    Args:
        compact: no whitespace outside of strings.
        pattern: a regular expression for the whitespace between tokens.
        lenient: keywords that cannot be enforced are left out instead of refused.
    """
    options: dict[str, Any] = {"whitespace_flexible": False} if compact else {"whitespace_pattern": pattern or WHITESPACE}
    if lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    return options


def inline_json(schema: Any, options: Mapping[str, Any]) -> str:
    """A JSON schema as a part of a rule."""
    if schema is True:
        schema = {}
    return f"%json {json.dumps({**schema, 'x-guidance': {**options, **string_options(schema)}} if isinstance(schema, dict) else schema)}"


def literal(text: str, special: Mapping[str, int] | None = None) -> str:
    """`text` as part of a rule: strings, and single tokens for the special tokens in it.

    Args:
        special: special tokens by their text. They are no text to the engine, so they are named by id.
    """
    parts: list[str] = []
    rest = text
    while rest:
        found = min(((at, name) for name in special or () if (at := rest.find(name)) >= 0), default=None, key=lambda f: (f[0], -len(f[1])))
        if found is None:
            parts.append(json.dumps(rest, ensure_ascii=False))
            break
        at, name = found
        if at:
            parts.append(json.dumps(rest[:at], ensure_ascii=False))
        parts.append(f"<[{(special or {})[name]}]>")
        rest = rest[at + len(name) :]
    return " ".join(parts)


def pattern_literal(pattern: str) -> str:
    """A regular expression as part of a terminal: between slashes, so that those in it are escaped unless they are already, and on one line."""
    parts = re.findall(r"\\.|.", pattern, re.DOTALL)
    return "/" + "".join({"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(part, part) for part in parts) + "/"


def choices(texts: Sequence[str]) -> str:
    """A grammar of exactly these texts. One terminal, not a rule: the parser would follow each of them by itself, two thousand at most."""
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def in_any_tokens(source: str) -> str:
    """A grammar, as the engine takes it, whose texts may come in all tokens that spell them. By itself the engine allows only those that the
    tokenizer would choose, where a text leaves no choice: lists that forbid one of these would leave nothing."""
    option = '%llguidance {"no_forcing": true}\n'
    if not source.lstrip().startswith("{"):
        return option + source
    document = json.loads(source)
    for grammar in document.get("grammars", ()):
        if grammar.get("lark_grammar") is not None:
            grammar["lark_grammar"] = option + grammar["lark_grammar"]
        elif grammar.get("json_schema") is not None:
            grammar["lark_grammar"], grammar["json_schema"] = f"{option}start: %json {json.dumps(grammar['json_schema'])}", None
    return json.dumps(document)
