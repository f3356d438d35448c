"""Every format: what a reply is read as, and that it is read the same however it is cut."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.parsing.events import Call, CallArguments, CallStart, Reply
from octavo.frontend.parsing.formats import (
    ALIASES,
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_FORMATS,
    opened_by,
    reasoning_format,
    tool_format,
)
from octavo.frontend.parsing.machine import MAX_NAME
from octavo.frontend.parsing.reply import ReplyFormat, ReplyParser, read_whole

SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}, "get-time": {}}
F1 = Call("f", '{"a": 1}', True)
G = Call("get-time", "{}", True)

CASES: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", 'Hi\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Hi", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "get-time"}</tool_call>\n', "", [F1, G]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call> done', "done", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F1]),
    ("hermes", '<tool_call>{"name": "get-time", "arguments": null}</tool_call>', "", [G]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>}{"}}</tool_call>',
        "",
        [Call("f", '{"s": "</tool_call>}{"}', True)],
    ),
    ("hermes", "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    ("hermes", "half a marker: <tool_ca", "half a marker: <tool_ca", []),
    ("hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [Call("f", '{"a": 1', False)]),
    ("hermes", "text with { braces } \n ", "text with { braces } \n ", []),
    ("json", '{"name": "f", "parameters": {"a": 1}}', "", [F1]),
    ("json", '[{"name": "f", "arguments": {"a": 1}}, {"name": "get-time", "arguments": {}}]', "", [F1, G]),
    ("json", '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', "", [F1]),
    ("json", '{"name": "Ann", "age": 30}', '{"name": "Ann", "age": 30}', []),
    ("json", '{"name": "f", "age": 30}', '{"name": "f", "age": 30}', []),
    ("json", "[1, 2] is a list", "[1, 2] is a list", []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get-time", "arguments": {}}]', "", [F1, G]),
    ("mistral", 'ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get-time[CALL_ID]12[ARGS]{}', "ok", [F1, G]),
    ("mistral", "[TOOL_CALLS]\nhello", "[TOOL_CALLS]\nhello", []),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [F1]),
    ("granite", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "get-time"}]', "", [F1, G]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "get-time", "parameters": {}}', "", [F1, G]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F1]),
    ("llama3_json", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ("pythonic", "[f(a=1), get-time()]", "", [F1, G]),
    ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", "", [F1]),
    ("pythonic", '[f(s="x)]", a=[True, None, {"k": null}])]', "", [Call("f", '{"s": "x)]", "a": [true, null, {"k": null}]}', True)]),
    ("pythonic", "[f(a=1", "[f(a=1", []),
    ("pythonic", "[os.system('x')]", "[os.system('x')]", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic", "see [f(a=1)]", "see [f(a=1)]", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "", [F1]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\n12\nb\n</parameter>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        [Call("f", '{"s": "12\\nb", "a": 1}', True)],
    ),
    ("qwen3_coder", "<tool_call><function=get-time></function></tool_call> ok", "ok", [G]),
    ("json", '```json\n{"name": "f", "arguments": {"a": 1}}\n```', "", [F1]),
    ("json", '```\n[{"name": "f", "arguments": {"a": 1}}]\n``` Done.', "Done.", [F1]),
    ("json", '```json\n{"answer": 42}\n```', '```json\n{"answer": 42}\n```', []),
    ("json", "```js\nlet a = {}\n```", "```js\nlet a = {}\n```", []),
    ("json", "`a` and ``b``", "`a` and ``b``", []),
    ("llama3_json", '```json\n{"name": "f", "parameters": {"a": 1}}', "", [F1]),
    ("qwen3_coder", "Use <function=name> and <parameter=x> like so.", "Use <function=name> and <parameter=x> like so.", []),
    (
        "deepseek_v3",
        'I<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I",
        [F1, G],
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [F1],
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing", "<｜tool▁calls▁begin｜>nothing", []),
    ("openai", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', "", [F1]),
    ("openai", "<|channel|>final<|message|>Hi<|return|>", "Hi", []),
    ("openai", "no channels", "no channels", []),
]


@pytest.mark.parametrize(("name", "text", "answer", "calls"), CASES)
def test_what_is_read(name: str, text: str, answer: str, calls: list[Call]) -> None:
    reply = read_whole(ReplyFormat(TOOL_FORMATS[name], SCHEMAS), text)
    assert (reply.text, reply.calls) == (answer, calls)
    for call in calls:
        assert not call.complete or json.loads(call.arguments) is not None


def joined(form: ReplyFormat, pieces: list[str], *, cut_short: bool = False) -> Reply:
    parser, reply = ReplyParser(form), Reply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish(cut_short=cut_short))
    return reply


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _, _ in CASES])
def test_every_split_reads_the_same(name: str, text: str, thinks: bool, whole_calls: bool) -> None:
    if thinks and name != "openai":
        text = f"<think>\n why \n</think>\n\n{text}"
    form = ReplyFormat(TOOL_FORMATS[name], SCHEMAS, REASONING_FORMATS["think"] if thinks else None, whole_calls=whole_calls)
    whole = read_whole(form, text)
    for place in range(len(text) + 1):
        assert joined(form, cut(text, [place])) == whole
    assert joined(form, list(text)) == whole
    chance = random.Random(len(text))
    for _ in range(10):
        assert joined(form, cut(text, [chance.randrange(len(text) + 1) for _ in range(5)])) == whole


ALPHABET = [
    "<tool_call>", "</tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<function=f>",
    "<parameter=a>", "</parameter>", "</function>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "analysis", "final", "commentary to=functions.f", "<think>", "</think>",
    '{"name": "f", "arguments": ', '{"a": 1}', '"name"', "{", "}", "[", "]", "(", ")", ",", ":", '"', "\\", " ", "\n", "f", "a", "1", "```json",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(ALPHABET), max_size=14), places=st.lists(st.integers(0, 200), max_size=6), flags=st.integers(0, 31))
def test_any_text_at_any_split(name: str, parts: list[str], places: list[int], flags: int) -> None:
    text = "".join(parts)
    form = ReplyFormat(
        TOOL_FORMATS[name],
        SCHEMAS,
        REASONING_FORMATS["think"] if flags & 1 else None,
        opened=bool(flags & 2),
        max_calls=1 if flags & 4 else None,
        whole_calls=bool(flags & 2),
        must_call=bool(flags & 8),
    )
    cut_short = bool(flags & 16)
    whole = read_whole(form, text, cut_short=cut_short)
    assert joined(form, cut(text, [min(place, len(text)) for place in places]), cut_short=cut_short) == whole
    assert joined(form, list(text), cut_short=cut_short) == whole


NAME_EDGES = [
    '[TOOL_CALLS]<tool_call>\n{"a": 1}',
    '[TOOL_CALLS]f \n [ARGS]{"a": 1}',
    "[TOOL_CALLS]f\ng[ARGS]{}",
    *(f"[TOOL_CALLS]{'f' * n}[ARGS]{{}}" for n in range(MAX_NAME - 6, MAX_NAME + 3)),
    *(f"[TOOL_CALLS]f[CALL_ID]{'1' * n}{{}}" for n in range(MAX_NAME - 12, MAX_NAME + 3)),
]
"""Names with line ends, and about as long as they may be."""


@pytest.mark.parametrize("text", NAME_EDGES)
def test_a_name_is_one_however_it_comes(text: str) -> None:
    form = ReplyFormat(TOOL_FORMATS["mistral"], SCHEMAS)
    whole = read_whole(form, text)
    assert joined(form, list(text)) == whole
    assert all(joined(form, cut(text, [place])) == whole for place in range(len(text)))


WHOLE_CALLS = [(name, text, calls) for name, text, answer, calls in CASES if calls and not answer]


@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize(("name", "text", "calls"), WHOLE_CALLS)
def test_a_reply_cut_anywhere_is_the_beginning_of_its_calls(name: str, text: str, calls: list[Call], whole_calls: bool) -> None:
    form = ReplyFormat(TOOL_FORMATS[name], SCHEMAS, whole_calls=whole_calls)
    must = ReplyFormat(TOOL_FORMATS[name], SCHEMAS, must_call=True)
    known = 0
    for end in range(1, len(text)):
        reply = read_whole(form, text[:end], cut_short=True)
        assert joined(form, list(text[:end]), cut_short=True) == reply
        assert len(reply.calls) >= known, "a longer beginning knows no less"
        known = len(reply.calls)
        for call, whole in zip(reply.calls, calls, strict=False):
            assert call.name == whole.name
            assert whole.arguments.startswith(call.arguments)
            assert call.arguments == whole.arguments or not call.complete
        assert read_whole(must, text[:end], cut_short=True) == Reply(calls=reply.calls), "nothing of a demanded call is an answer"
    assert known == len(calls)


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("json", '{"name": "f"', Call("f")),
        ("json", '[{"name": "f", "argu', Call("f")),
        ("json", '{"name": "f", "arguments": {"s": "ab', Call("f", '{"s": "ab')),
        ("json", '{"type": "function", "function": {"name": "f", "parameters": {"a": 1', Call("f", '{"a": 1')),
        ("json", '{"arguments": {"a": 1}, "name": "f"', Call("f", '{"a": 1}')),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\', Call("f", '{"a": ')),
        ("llama3_json", '{"name": "f", "parameters": {"a"', Call("f", '{"a"')),
        ("mistral_named", "[TOOL_CALLS]f[ARGS]", Call("f")),
        ("granite", '<|tool_call|>[{"name": "f"', Call("f")),
        ("pythonic", '[f(a=1, s="x', Call("f", '{"a": 1')),
        ("pythonic", "[f(", Call("f")),
        ("qwen3_coder", "<tool_call><function=f><parameter=s>some te", Call("f", '{"s": "some te')),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=s>x</para", Call("f", '{"a": 1, "s": "x')),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", Call("f")),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n``", Call("f")),
        ("openai", "<|channel|>commentary to=functions.f <|const", Call("f")),
        ("openai", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a"', Call("f", '{"a"')),
    ],
)
def test_a_call_cut_by_a_limit_is_a_call_as_soon_as_its_name_is_known(name: str, text: str, call: Call) -> None:
    for whole_calls in (False, True):
        form = ReplyFormat(TOOL_FORMATS[name], SCHEMAS, whole_calls=whole_calls)
        assert read_whole(form, text, cut_short=True) == Reply(calls=[call])


def test_a_demanded_call_of_the_only_tool_has_its_name_from_the_start() -> None:
    form = ReplyFormat(TOOL_FORMATS["json"], {"f": {}}, must_call=True)
    assert read_whole(form, '[{"na', cut_short=True) == Reply(calls=[Call("f")])
    assert read_whole(form, '[{"na') == Reply('[{"na')


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"openai"}))
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<[{`"), max_size=50))
def test_plain_text_stays_as_it_is(name: str, text: str) -> None:
    assert read_whole(ReplyFormat(TOOL_FORMATS[name], SCHEMAS), text) == Reply(text)


def test_arguments_come_as_they_are_written() -> None:
    parser = ReplyParser(ReplyFormat(TOOL_FORMATS["hermes"], SCHEMAS))
    assert parser.push('<tool_call>{"name": "f", ') == []
    assert parser.push('"arguments": {"a"') == [CallStart("f"), CallArguments('{"a"')]
    assert parser.push(": 12") == [CallArguments(": 12")]


def test_a_call_cut_short_is_text_where_whole_calls_are_wanted() -> None:
    text = 'Sure. <tool_call>{"name": "f", "arguments": {"a": 1'
    reply = read_whole(ReplyFormat(TOOL_FORMATS["hermes"], SCHEMAS, whole_calls=True), text)
    assert (reply.text, reply.calls) == (text, [])


def test_one_call_at_most() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "get-time"}</tool_call>'
    assert [c.name for c in read_whole(ReplyFormat(TOOL_FORMATS["hermes"], SCHEMAS, max_calls=1), text).calls] == ["f"]


@pytest.mark.parametrize(
    ("name", "opened", "text", "reasoning", "answer"),
    [
        ("think", False, "<think>\nwhy\n</think>\n\nso", "why", "so"),
        ("think", False, " so", "", " so"),
        ("think", False, "I <think> not", "", "I <think> not"),
        ("think", True, "why\n</think>so", "why", "so"),
        ("think", True, "<think>why</think>so", "why", "so"),
        ("think", True, "never ends", "never ends", ""),
        ("mistral", False, "[THINK]why[/THINK]so", "why", "so"),
        ("granite", False, "Here is my thought process: why\nHere is my response: so", "why", "so"),
        ("openai_gptoss", False, "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so", "why", "so"),
    ],
)
def test_reasoning(name: str, opened: bool, text: str, reasoning: str, answer: str) -> None:
    form = ReplyFormat(reasoning=REASONING_FORMATS[name], opened=opened)
    for pieces in ([text], list(text)):
        reply = joined(form, pieces)
        assert (reply.reasoning, reply.text) == (reasoning, answer)


def test_a_prompt_that_closed_the_reasoning_leaves_none() -> None:
    form = ReplyFormat(reasoning=REASONING_FORMATS["think"], closed=True)
    assert read_whole(form, "<think>") == Reply("<think>")


def test_formats_are_told_from_templates() -> None:
    signs = {
        "{{ '<tool_call>' }}": "hermes",
        "[AVAILABLE_TOOLS] [TOOL_CALLS]": "mistral",
        "[TOOL_CALLS] [ARGS]": "mistral_named",
        "<|tool_call|>": "granite",
        "<function= <tool_call>": "qwen3_coder",
        "<｜tool▁calls▁begin｜> ```json": "deepseek_v3",
        "<｜tool▁calls▁begin｜>": "deepseek_v31",
        '<|start_header_id|> {"name": function name, "parameters": {}}': "llama3_json",
        "<|channel|>": "openai",
        "plain": "json",
    }
    for template, name in signs.items():
        found = tool_format(None, template)
        assert found is not None
        assert found.name == name
    assert tool_format("none", "<tool_call>") is None
    assert reasoning_format(None, "plain") is None
    assert {f.name for t in ("</think>", "[THINK]", "<|channel|>") if (f := reasoning_format(None, t))} == {
        "think",
        "mistral",
        "openai_gptoss",
    }


def test_aliases_name_formats() -> None:
    assert set(ALIASES.values()) <= TOOL_FORMATS.keys()
    assert set(REASONING_ALIASES.values()) <= REASONING_FORMATS.keys()
    with pytest.raises(KeyError):
        tool_format("nope", None)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("think", "<think>so </thi", Reply(reasoning="so")),
        ("think", "<think>a <", Reply(reasoning="a <")),
        ("think", "<thi", Reply()),
        ("deepseek_r1", "<thi", Reply()),
        ("think", "so", Reply(text="so")),
        ("granite", "Here is", Reply(text="Here is")),
        ("granite", "Here is my thought process: so. Here is my", Reply(reasoning="so. Here is my")),
    ],
)
def test_half_a_marker_at_the_end_of_a_reply_that_was_cut_is_not_shown(name: str, text: str, expected: Reply) -> None:
    form = ReplyFormat(reasoning=REASONING_FORMATS[name], opened=REASONING_FORMATS[name].always)
    assert read_whole(form, text, cut_short=True) == expected
    assert joined(form, list(text), cut_short=True) == expected
    ended = read_whole(form, text)
    assert (ended.reasoning + ended.text).endswith(text[-2:]), "it is all there is where the model ended it"


def test_what_a_prompt_says_of_the_reasoning() -> None:
    think = REASONING_FORMATS["think"]
    assert opened_by("<|im_start|>assistant\n<think>\n", think) is True
    assert opened_by("<think>\n\n</think>\n\n", think) is False
    assert opened_by("<|im_start|>assistant\n", think) is None
    # Inside of a message of the assistant's: its last marker counts, and no user's.
    for text, opened in (("<think>so", True), ("<think>so</think>yes", False), ("yes", False), ("<think>a</think>b<think>c", True)):
        assert opened_by(f"user\n<think>?\nassistant\n{text}", think, text) is opened
    assert opened_by("assistant\n<think>\nso", think, "so") is True
