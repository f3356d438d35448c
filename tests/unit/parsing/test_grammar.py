"""Grammars of calls: what they force is what the format's parser reads, with markers as special tokens and as plain text."""

from __future__ import annotations

import pytest

from octavo.frontend.parsing.formats import TOOL_FORMATS, CallSyntax
from octavo.frontend.parsing.grammar import required_calls
from octavo.frontend.parsing.guard import optional_calls
from octavo.frontend.parsing.reply import ReplyFormat, read_whole
from octavo.grammar.compiler import GrammarCompiler, Matcher
from octavo.protocol.engine import Vocabulary

EOS = 256
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"name": "f", "parameters": SCHEMA, "strict": True}, {"name": "get-time"}]
SCHEMAS = {"f": SCHEMA, "get-time": {}}
FORMATS = sorted(name for name, f in TOOL_FORMATS.items() if f.syntax is not None)


def syntax_of(name: str) -> CallSyntax:
    syntax = TOOL_FORMATS[name].syntax
    assert syntax is not None
    return syntax


def written(syntax: CallSyntax, *calls: tuple[str, str]) -> str:
    texts = [f"{syntax.before}{name}{syntax.between}{arguments}{syntax.after}" for name, arguments in calls]
    return syntax.begin + syntax.separator.join(texts) + syntax.end


def special_tokens(name: str, special: bool) -> dict[str, int]:
    return {mark: EOS + 1 + i for i, mark in enumerate(TOOL_FORMATS[name].marks)} if special else {}


def follow(grammar: str, text: str, special: dict[str, int]) -> Matcher | None:
    """The matcher behind `text`; None if the grammar does not allow it."""
    compiler = GrammarCompiler()
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>"] + [mark.encode() for mark in special]
    compiler.set_vocabulary(Vocabulary(tokens, [EOS, *special.values()], [EOS]))
    matcher = compiler.matcher(compiler.compile(grammar))
    while text:
        mark = next((m for m in sorted(special, key=len, reverse=True) if text.startswith(m)), None)
        ids = [special[mark]] if mark is not None else list(text[0].encode())
        text = text[len(mark or text[0]) :]
        if not all(matcher.accept(i) for i in ids):
            return None
    return matcher


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_must_be_made(name: str, special: bool) -> None:
    syntax, marks = syntax_of(name), special_tokens(name, special)
    one, two = written(syntax, ("f", '{"a": 1}')), written(syntax, ("f", '{"a": 1}'), ("get-time", "{}"))
    grammar = required_calls(syntax, TOOLS, marks)
    for text, names in ((one, ["f"]), (two, ["f", "get-time"])):
        matcher = follow(grammar, text, marks)
        assert matcher is not None
        assert matcher.complete
        reply = read_whole(ReplyFormat(TOOL_FORMATS[name], SCHEMAS), text)
        assert [call.name for call in reply.calls] == names
        assert reply.text == ""
    for bad in ("hello", written(syntax, ("f", '{"a": "x"}')), written(syntax, ("f", '{"b": 1}')), written(syntax, ("other", "{}"))):
        assert follow(grammar, bad, marks) is None
    single = required_calls(syntax, TOOLS, marks, most=1)
    assert follow(single, one, marks) is not None
    assert follow(single, two, marks) is None


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_may_be_made(name: str, special: bool) -> None:
    syntax, marks = syntax_of(name), special_tokens(name, special)
    grammar = optional_calls(TOOL_FORMATS[name], TOOLS, marks)
    bare = name in ("json", "llama3_json")
    for text in ("hello, world", "", written(syntax, ("f", '{"a": 1}'))):
        matcher = follow(grammar, text, marks)
        assert matcher is not None, text
        assert matcher.complete
    assert follow(grammar, written(syntax, ("f", '{"a": "x"}')), marks) is None
    if not bare:
        text = "Let me see. " + written(syntax, ("f", '{"a": 1}'))
        matcher = follow(grammar, text, marks)
        assert matcher is not None
        assert matcher.complete
        assert follow(grammar, "Let me see. " + written(syntax, ("f", '{"b": 1}')), marks) is None


def test_names_are_escaped_where_they_stand_in_json() -> None:
    grammar = required_calls(syntax_of("hermes"), [{"name": 'a"b'}], {})
    matcher = follow(grammar, '<tool_call>\n{"name": "a\\"b", "arguments": {}}\n</tool_call>', {})
    assert matcher is not None
    assert matcher.complete
