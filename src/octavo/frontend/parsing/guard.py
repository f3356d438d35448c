"""Grammars of replies that may call strict tools: free text, in which all that the parser would read as a call is a right one.

The parser of such a reply (made with `guarded`) and the grammar agree on where text turns into a call: at a beginning, written here as a
regular expression, behind which only a call that fits its schema goes on. Until then it is text that may go on in any way: a marker, or
JSON that happens to have a "name", is no call yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from octavo.frontend.parsing.formats import ToolFormat
from octavo.frontend.parsing.guard_other import channels, deepseek_calls, python_list, tags
from octavo.frontend.parsing.schemas import CannotGuard, arguments_rule, needs_arguments

__all__ = ["CannotGuard", "optional_calls"]

Special = Mapping[str, int]


COMMON = r"""
TEXT: /(.|\n)*/
BLANKS: /[\s\x1c-\x1f]*/
BEHIND: /[\s,;\x1c-\x1f]*/
OPEN: "{" /[\s,\x1c-\x1f]*/
NEXT: BLANKS "," /[\s,\x1c-\x1f]*/
COLON: BLANKS ":" BLANKS
STRING: /"([^"\\]|\\(.|\n))*"/
SCALAR: STRING | /[^"{\[\s\x1c-\x1f][^,\]}:\s\x1c-\x1f]*/
OTHER: (STRING & ~/"(name|tool_name|function|arguments|parameters|args)"/) COLON SCALAR
HARMLESS: /"(type|id)"/ COLON SCALAR
NAME_KEY: /"(name|tool_name|function)"/ COLON
ARGUMENTS_KEY: /"(arguments|parameters|args)"/ BLANKS ":"
THEN_ARGUMENTS: NEXT (OTHER NEXT)* ARGUMENTS_KEY
NO_ARGUMENTS: (NEXT HARMLESS)* (NEXT | BLANKS) "}"
W: /[ \n\r\t]{0,40}/
SPACE: /[ \n\r\t]{1,40}/
EXTRA: /"(type|id)"/ W ":" W /"[^"\\\x00-\x1f]{0,100}"/
TO_ARGUMENTS: W ("," W EXTRA W){0,2} "," W /"(arguments|parameters|args)"/ W ":" W
TAIL: W ("," W EXTRA W){0,2} "}"
"""
"""Up to `OTHER`, what the parser reads, however odd; from `W` on, what is written behind the beginning of a call."""


_QUOTE = r'"\""'


def any_of(texts: Iterable[str]) -> str:
    return "(" + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts) + ")"


def optional_calls(form: ToolFormat, tools: Sequence[Mapping[str, Any]], special: Special) -> str:
    """The grammar of replies in a format that may call tools.

    Args:
        tools: "function" objects: name, parameters, strict.
        special: special tokens by their text.

    Raises:
        CannotGuard: the arguments of a tool cannot be held to their schema in this format.
    """
    return _GUARDS[form.name](tools, special)


def objects(
    tools: Sequence[Mapping[str, Any]],
    special: Special,
    *,
    opens: Sequence[str],
    close: str = "",
    bare: bool = False,
    named: Sequence[str] = (),
) -> str:
    """Calls as JSON objects: behind a marker, or (bare) from the first character on. See `TaggedCalls`.

    Args:
        named: what may stand between a name behind the marker and its arguments: [ARGS], [CALL_ID].
    """
    return _Objects(tools, special, opens, close, named).grammar(bare=bare)


class _Objects:
    """Writes the rules down as they are needed."""

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], special: Special, opens: Sequence[str], close: str, named: Sequence[str]
    ) -> None:
        self._tools, self._special, self._close, self._named = tools, special, close, named
        self._text_opens = [mark for mark in opens if mark not in special]
        self._special_opens = [special[mark] for mark in opens if mark in special]
        self._names = [json.dumps(str(tool["name"]), ensure_ascii=False)[1:-1] for tool in tools]
        self._empty = [not needs_arguments(tool.get("parameters")) for tool in tools]
        self._rules: list[str] = []
        self._bad = ""
        """What no text may have in it: a name that arguments follow at once."""

    def grammar(self, *, bare: bool) -> str:
        calls = self._marked_calls()
        first = ""
        if bare:
            first = f"(({self._bare('bare', 'BLANKS')}) ({self._bare('next', 'BEHIND')})*)? "
        if self._close:
            closed = f"({calls}) SPACE? {self._mark(self._close)}"
            start = f"start: {first}({closed}{self._free_marks()})* (FREE | {calls})"
        else:
            behind = self._calls("behind", "BEHIND")
            start = f"start: {first}(({calls}) ({behind})*{self._free_marks()})* FREE"
        self._bodies()
        return "\n".join([start, f"FREE: TEXT{self._bad}", COMMON, *self._rules])

    def _mark(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text, ensure_ascii=False)

    def _free_marks(self) -> str:
        """Special tokens that may stand in the text, where they are no part of a call."""
        ids = [*self._special_opens, *([self._special[self._close]] if self._close in self._special else [])]
        return "".join(f" | FREE <[{i}]>" for i in ids)

    def _marked_calls(self) -> str:
        """Text, a marker, and the calls behind it."""
        parts = []
        if self._named:
            at_once = f'BLANKS {any_of(self._names)} BLANKS "{{" TEXT'
            within = f"TEXT {any_of(self._text_opens)} {at_once}" if self._text_opens else at_once
            self._rules.append(f"AT_ONCE: {within}")
            self._bad = " & ~AT_ONCE"
        if self._text_opens:
            prefix = f"TEXT {any_of(self._text_opens)} BLANKS"
            parts += [self._calls("marked", prefix), *self._named_calls("marked", prefix)]
        for i in self._special_opens:
            inner = [self._calls("inner", "BLANKS"), *self._named_calls("inner", "BLANKS")]
            parts.append(f"FREE <[{i}]> ({' | '.join(inner)})")
        return " | ".join(parts)

    def _rule(self, name: str, body: str) -> str:
        if not any(rule.startswith((f"{name}: ", f"{name}[lazy]: ")) for rule in self._rules):
            self._rules.append(f"{name}{body}")
        return name

    def _head(self, name: str, prefix: str, rest: str) -> str:
        """The beginning of a call, as soon as it is one."""
        bad = self._bad if prefix.startswith("TEXT") else ""
        return self._rule(name, f"[lazy]: ({prefix} {rest}){bad}" if bad else f"[lazy]: {prefix} {rest}")

    def _calls(self, name: str, prefix: str) -> str:
        """An object, or a list of them, behind `prefix`. What stands there means to be a call, whatever its name."""
        objects = []
        for kind, opening in (("object", ""), ("list", '"[" BLANKS ')):
            start = f"{opening}OPEN (OTHER NEXT)*"
            named = self._head(f"{name}_{kind}", prefix, f"{start} NAME_KEY {_QUOTE}")
            arguments_first = self._head(f"{name}_{kind}_arguments", prefix, f"{start} ARGUMENTS_KEY")
            nested = self._head(f"{name}_{kind}_function", prefix, f'{start} "\\"function\\"" COLON "{{"')
            one = [f"{named} body", f"{arguments_first} SPACE? arguments_first", f"{nested} nested"]
            objects.append(f"({' | '.join(one)})" + (" more* LIST_END" if kind == "list" else ""))
        return " | ".join(objects)

    def _named_calls(self, name: str, prefix: str) -> list[str]:
        if not self._named:
            return []
        arguments_mark, id_mark = self._named
        calls = []
        for i, tool in enumerate(self._names):
            word = json.dumps(tool, ensure_ascii=False)
            bad = self._bad if prefix.startswith("TEXT") else ""
            self._rule(f"{name.upper()}_NAME_{i}", f": ({prefix} {word} BLANKS){bad}")
            calls.append(f"{name.upper()}_NAME_{i} arguments_{i}")
            for mark, rest in ((arguments_mark, ""), (id_mark, f"CALL_ID {self._mark(arguments_mark)} ")):
                if mark in self._special:
                    begin = f"{name.upper()}_NAME_{i} <[{self._special[mark]}]>"
                else:
                    begin = self._head(f"{name}_named_{i}_{len(rest) > 0:d}", prefix, f"{word} BLANKS {json.dumps(mark)}")
                calls.append(f"{begin} {rest}SPACE? arguments_{i}")
        self._rule("CALL_ID", ": /[A-Za-z0-9_\\-]{1,64}/")
        return calls

    def _bare(self, name: str, prefix: str) -> str:
        """Calls without a marker: JSON that names a tool and goes on with its arguments, or ends where the tool needs none."""
        objects = []
        for kind, opening in (("object", ""), ("list", '"[" BLANKS ')):
            one = []
            for i, tool in enumerate(self._names):
                word = json.dumps(f'"{tool}"', ensure_ascii=False)
                for nested, start in (("", ""), ("_nested", '(OTHER NEXT)* "\\"function\\"" COLON OPEN ')):
                    outer = " TAIL" if nested else ""
                    shared = f"{name}_{kind}{nested}".upper()
                    self._rule(shared, f": {prefix} {opening}OPEN {start}(OTHER NEXT)* NAME_KEY")
                    head = self._head(f"{name}_{kind}{nested}_{i}", shared, f"{word} THEN_ARGUMENTS")
                    null = ' | SPACE? "null"' if self._empty[i] else ""
                    one.append(f"{head} (SPACE? arguments_{i}{null}) TAIL{outer}")
                    if self._empty[i]:
                        alone = start.replace("OTHER", "HARMLESS")
                        self._rule(f"{shared}_ALONE", f": {prefix} {opening}OPEN {alone}(HARMLESS NEXT)* NAME_KEY")
                        head = self._head(f"{name}_{kind}{nested}_empty_{i}", f"{shared}_ALONE", f"{word} NO_ARGUMENTS")
                        one.append(f"{head}{outer}")
            objects.append(f"({' | '.join(one)})" + (" more_bare* LIST_END" if kind == "list" else ""))
        return " | ".join(objects)

    def _bodies(self) -> None:
        bodies, first = [], []
        for i, tool in enumerate(self._names):
            end = json.dumps(f'{tool}"', ensure_ascii=False)
            null = ' | "null"' if self._empty[i] else ""
            self._rules.append(arguments_rule(i, self._tools[i]))
            bodies.append(f"{end} TO_ARGUMENTS (arguments_{i}{null}) TAIL")
            if self._empty[i]:
                bodies.append(f"{end} TAIL")
            self._rules.append(f'THEN_NAME_{i}: W "," W (EXTRA W "," W){{0,2}} /"(name|tool_name|function)"/ W ":" W "\\"" {end}')
            first.append(f"arguments_{i} THEN_NAME_{i} TAIL")
        self._rules += [
            f"body: {' | '.join(bodies)}",
            f"arguments_first: {' | '.join(first)}",
            'INNER: W (EXTRA W "," W){0,2} /"(name|tool_name)"/ W ":" W "\\""',
            "nested: INNER body TAIL",
            'MORE: W "," W "{" W (EXTRA W "," W){0,2}',
            'MORE_NAMED: MORE /"(name|tool_name|function)"/ W ":" W "\\""',
            'MORE_ARGUMENTS: MORE /"(arguments|parameters|args)"/ W ":" W',
            'MORE_NESTED: MORE /"function"/ W ":" W "{"',
            "more_bare: MORE_NAMED body | MORE_NESTED nested",
            "more: MORE_NAMED body | MORE_ARGUMENTS arguments_first | MORE_NESTED nested",
            'LIST_END: W "]"',
        ]


_GUARDS: dict[str, Callable[[Sequence[Mapping[str, Any]], Special], str]] = {
    "json": partial(objects, opens=("<tool_call>",), close="</tool_call>", bare=True),
    "hermes": partial(objects, opens=("<tool_call>",), close="</tool_call>"),
    "granite": partial(objects, opens=("<|tool_call|>", "<tool_call>"), close="</tool_call>"),
    "llama3_json": partial(objects, opens=("<|python_tag|>",), bare=True),
    "mistral": partial(objects, opens=("[TOOL_CALLS]",), named=("[ARGS]", "[CALL_ID]")),
    "mistral_named": partial(objects, opens=("[TOOL_CALLS]",), named=("[ARGS]", "[CALL_ID]")),
    "qwen3_coder": tags,
    "pythonic": python_list,
    "deepseek_v3": deepseek_calls,
    "deepseek_v31": deepseek_calls,
    "openai": channels,
}
