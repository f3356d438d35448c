"""Replies that are an answer in JSON or calls, where both begin alike: every answer stays possible, however it is written, and every call."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from octavo.frontend.parsing.formats import TOOL_FORMATS, CallSyntax
from octavo.frontend.parsing.grammar import answer_or_calls, any_object_but_a_call, required_calls
from octavo.frontend.parsing.guard import CannotGuard
from octavo.frontend.parsing.guard_other import channels_to_answer
from octavo.frontend.parsing.reply import ReplyFormat, read_whole
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.json_schema import prepared
from octavo.grammar.lark import inline_json, json_options
from octavo.grammar.library import llguidance
from octavo.protocol.engine import Vocabulary
from tests.support.grammars import matches

TOOLS: list[dict[str, Any]] = [
    {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    },
    {"name": "get_time"},
]
ANSWERS: list[tuple[Any, list[Any]]] = [
    (
        {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
        [{"answer": "x"}, {"answer": '{"name": "f"'}],
    ),
    ({"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}}, [{"name": "n", "n": 3}, {"name": "fi"}, {}]),
    (
        {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "integer"}}}},
        [[{"b": 1}], [{"b": 1}, {"b": 2}], [], [{}]],
    ),
    ({"type": "array"}, [[1, 2], ["f"], [[1]], [{"name": "x"}]]),
    (
        {"type": "object"},
        [{"a": {"name": "f"}}, {"name": ["f"]}, {"names": "f", "n": None}, {}, {"name": "other", "arguments": {"a": "x"}}],
    ),
]
STYLES: list[dict[str, Any]] = [{"separators": (",", ":")}, {}, {"indent": 1}]


def syntax_of(name: str) -> CallSyntax:
    syntax = TOOL_FORMATS[name].syntax
    assert syntax is not None
    return syntax


def source(text: str) -> str:
    return str(llguidance().LLMatcher.grammar_from_lark(text))


def answer_rule(schema: Any) -> str:
    if schema == {"type": "object"}:
        return any_object_but_a_call(TOOLS)
    return f"answer: {inline_json(prepared(schema, closed=True), json_options())}"


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if form.syntax is not None])
@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_answers_in_every_style(name: str, number: int) -> None:
    schema, answers = ANSWERS[number]
    grammar = source(answer_or_calls(syntax_of(name), TOOLS, {}, answer_rule(schema)))
    for answer in answers:
        for style in STYLES:
            assert matches(grammar, json.dumps(answer, **style)), (answer, style)
    assert not matches(grammar, "hello")


@pytest.mark.parametrize("name", ["json", "llama3_json"])
@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_calls_in_every_style(name: str, number: int) -> None:
    key = syntax_of(name).arguments_key
    grammar = source(answer_or_calls(syntax_of(name), TOOLS, {}, answer_rule(ANSWERS[number][0])))
    form = ReplyFormat(tools=TOOL_FORMATS[name], schemas={tool["name"]: tool.get("parameters", {}) for tool in TOOLS})
    one, other = {"name": "f", key: {"a": 3}}, {"name": "get_time", key: {}}
    for style in STYLES:
        texts = [json.dumps(one, **style), json.dumps(other, **style)]
        texts += ["; ".join(texts)] if name == "llama3_json" else [json.dumps([one, other], **style)]
        for text in texts:
            assert matches(grammar, text), text
            reply = read_whole(form, text)
            assert [call.name for call in reply.calls] == (["f", "get_time"] if text == texts[-1] else [json.loads(text)["name"]])
            assert not reply.text
    if number != 3:  # a list of anything may have anything in it
        assert not matches(grammar, json.dumps({"name": "f", key: {"a": "no number"}}))
        assert not matches(grammar, json.dumps({"function": "f", key: {}}))
    single = source(answer_or_calls(syntax_of(name), TOOLS, {}, answer_rule(ANSWERS[0][0]), most=1))
    assert matches(single, json.dumps(one))
    assert not matches(single, json.dumps([one, other]))
    assert not matches(single, f"{json.dumps(one)}; {json.dumps(other)}")


def test_a_call_that_must_be_made_may_stand_without_brackets() -> None:
    grammar = source(required_calls(syntax_of("json"), TOOLS, {}))
    for text in ('{"name": "f", "arguments": {"a": 1}}', '[{"name": "f", "arguments": {"a": 1}}]'):
        assert matches(grammar, text)
    assert not matches(grammar, '{"name": "f", "arguments": {"a": "x"}}')
    assert not matches(source(required_calls(syntax_of("granite"), TOOLS, {})), '{"name": "f", "arguments": {"a": 1}}')


MARKS = {"<|channel|>": 4, "<|message|>": 5, "<|start|>": 6, "<|end|>": 7, "<|call|>": 8, "<|return|>": 9, "<|constrain|>": 10}
THOUGHT = "<|channel|>analysis<|message|>Hm, to=functions.f?<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
ANSWER = '<|channel|>final<|message|>{"b": "x"}'


def follows(grammar: str, text: str) -> bool:
    """`text` is a whole one of a grammar, over bytes and `MARKS`."""
    tokens = [b"<eos>", b"", b"", b"", *(mark.encode() for mark in MARKS), *(bytes([i]) for i in range(256))]
    grammars = GrammarCompiler()
    grammars.set_vocabulary(Vocabulary(tokens, [0, *MARKS.values()], [0]))
    matcher = grammars.matcher(grammars.compile(grammar))
    for part in re.split(f"({'|'.join(map(re.escape, MARKS))})", text):
        ids = [MARKS[part]] if part in MARKS else [len(MARKS) + 4 + byte for byte in part.encode()]
        if not all(matcher.accept(i) for i in ids):
            return False
    return matcher.complete


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (ANSWER, True),
        (THOUGHT + ANSWER, True),
        (CALL, True),
        (THOUGHT + CALL, True),
        (THOUGHT + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL, True),
        (CALL + "<|call|><|start|>assistant" + ANSWER, True),
        (CALL + "<|end|><|start|>assistant" + CALL.replace("1", "2"), True),
        (THOUGHT + " to=functions.get_time<|channel|>commentary json<|message|>{}", True),
        (CALL.replace("functions.", "").replace(" <|constrain|>json", ""), True),
        (THOUGHT.removesuffix("<|end|><|start|>assistant"), False),
        (THOUGHT + "<|channel|>final<|message|>plain", False),
        ("plain", False),
        ("<|channel|>final<|message|>plain", False),
        (CALL.replace("1", '"no"'), False),
        (CALL.replace("functions.f", "functions.nope"), False),
        (CALL.replace("functions.f", "functions.fjson"), False),
        (THOUGHT + "<|channel|>commentary to=python code<|message|>print(1)", False),
        (" to=functions.f<|channel|>commentary<|message|>{}", False),
        (ANSWER + "<|end|><|start|>assistant" + ANSWER, False),
    ],
)
def test_channels(text: str, right: bool) -> None:
    answer = answer_rule({"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]})
    grammar = source(channels_to_answer(TOOLS, MARKS, answer))
    assert follows(grammar, text) == right
    if right:
        form = ReplyFormat(tools=TOOL_FORMATS["openai"], schemas={tool["name"]: tool.get("parameters", {}) for tool in TOOLS})
        reply = read_whole(form, text)
        assert len(reply.calls) == text.count(" to=functions.") + text.count(" to=f<") - text.count("Hm,")
        assert ANSWER.endswith(reply.text.removeprefix("I look."))


def test_channels_need_their_marks() -> None:
    with pytest.raises(CannotGuard, match="response_format"):
        channels_to_answer(TOOLS, {}, "answer: /a/")
