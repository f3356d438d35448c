"""Strict tools under auto: for every format, what is read as a call is what the grammar guards, and all other text stays possible."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.parsing.formats import TOOL_FORMATS
from octavo.frontend.parsing.guard import CannotGuard, optional_calls
from octavo.frontend.parsing.reply import ReplyFormat, read_whole
from octavo.grammar.compiler import GrammarCompiler, Matcher
from octavo.protocol.engine import Vocabulary

EOS = 256
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [{"name": "f", "parameters": SCHEMA, "strict": True}, {"name": "get-time", "parameters": {}, "strict": True}]
SCHEMAS = {"f": SCHEMA, "get-time": {}}
NAMES = sorted(TOOL_FORMATS)
TAGGED = {
    "json": "<tool_call>",
    "hermes": "<tool_call>",
    "granite": "<|tool_call|>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
}
CLOSED = ("json", "hermes", "granite")

OBJECTS = (
    '{"name": "f", "arguments": {"n": @}}',
    '{"name":"f","parameters":{"n":@}}',
    ' { "tool_name" : "f" , "args" : {"n": @} } ',
    '{"type": "function", "name": "f", "arguments": {"n": @}}',
    '{"id": "1", "name": "f", "arguments": {"n": @}, "type": "function"}',
    '{"function": "f", "arguments": {"n": @}}',
    '{"type": "function", "function": {"name": "f", "parameters": {"n": @}}}',
    '[{"name": "f", "arguments": {"n": @}}]',
    '[{"name": "get-time"}, {"name": "f", "arguments": {"n": @}}]',
    '[{"name": "get-time", "arguments": {}}, {"type": "function", "function": {"name": "f", "arguments": {"n": @}}}]',
)
BEHIND_A_MARK = ('\n{"arguments": {"n": @}, "name": "f"}\n',)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{@n@}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "Hi.<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{@n@}\n```<｜tool▁call▁end｜>",
)
SPELLINGS: dict[str, list[str]] = {
    "qwen3_coder": [
        "<tool_call>\n<function=f>\n<parameter=n>\n@\n</parameter>\n</function>\n</tool_call>",
        "So: <function=f><parameter=n>@</parameter></function>",
        "<tool_call><function=f><parameter=n>@</parameter>\n<parameter=s>\nfree </text>\n</parameter></function></tool_call>",
    ],
    "pythonic": [
        "[f(n=@)]",
        " [get-time(), f(n=@)]",
        "<|python_start|>[f(n = @, s='it')]<|python_end|>",
        'So. <|python_start|>[f(n=@, s="it"), get-time()]',
    ],
    "openai": [
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": @}',
        '<|channel|>commentary to=f<|message|>{"n": @}',
        '<|channel|>analysis<|message|>why<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"n": @}',
    ],
    **{name: [text.replace("@n@", '"n": @') for text in DEEPSEEK] for name in ("deepseek_v3", "deepseek_v31")},
}
for _name, _mark in TAGGED.items():
    _end = "</tool_call>" if _name in CLOSED else ""
    SPELLINGS[_name] = [f"Well.\n{_mark}{call}{_end}" for call in (*OBJECTS, *BEHIND_A_MARK)]
    if _name in ("json", "llama3_json"):
        SPELLINGS[_name] += [*OBJECTS, '{"name": "get-time"}; {"name": "f", "arguments": {"n": @}}']
    if _end:
        SPELLINGS[_name].append(f'{_mark}{{"name": "get-time"}}{_end}\n{_mark}{{"name": "f", "arguments": {{"n": @}}}}{_end}')
SPELLINGS["granite"].append('<tool_call>[{"name": "f", "arguments": {"n": @}}]')
SPELLINGS["mistral"] += [
    '[TOOL_CALLS]f{"n": @}', '[TOOL_CALLS] f [ARGS] {"n": @}', '[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"n": @}',
    '[TOOL_CALLS]get-time[ARGS]{}[TOOL_CALLS]f[ARGS]{"n": @}',
]  # fmt: skip
SPELLINGS["mistral_named"] = SPELLINGS["mistral"]
CASES = [(name, text) for name in NAMES for text in SPELLINGS[name]]

TEXTS = [
    "", "hello", " \n hello", '{"answer": 42}', "[1, 2, 3]", "[]", "{", "[", '[{"a": 1}, {"b": [2]}]', '{"name": "Ann", "age": 30}',
    '{"name": "f", "age": 30}', '{"name": "f"}', '{"name": "other", "arguments": {"n": "x"}}', '{"parameters": {"n": "x"}}',
    '{"x": {"name": "f", "arguments": {"n": "x"}}}', "{braces} and [brackets]", "```json\n[1]\n```", "[f(x)]", "[f(1), g]", "[link](http://x)",
    "f(n='x')", "<b>bold</b>", "<function name>", "<tool_call", "a <tool_call> tag", '<tool_call>{"a": 1}</tool_call>', "[TOOL_CALLS] hello",
    "[TOOL_CALLS]hello{}", "<|tool_call|> is a marker", "<|python_tag|>print(1)", "<function=>", "<|python_start|>x", "<｜tool▁call▁begin｜>f",
    "é 漢字 😀",
]  # fmt: skip


@cache
def begun(name: str, special: bool) -> tuple[Matcher, dict[str, int]]:
    marks = {mark: EOS + 1 + i for i, mark in enumerate(TOOL_FORMATS[name].marks)} if special else {}
    compiler = GrammarCompiler()
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>"] + [mark.encode() for mark in marks]
    compiler.set_vocabulary(Vocabulary(tokens, [EOS, *marks.values()], [EOS]))
    return compiler.matcher(compiler.compile(optional_calls(TOOL_FORMATS[name], TOOLS, marks))), marks


def possible(name: str, text: str, special: bool) -> bool:
    """Whether the grammar has `text` as a whole reply."""
    start, marks = begun(name, special)
    matcher = start.fork()
    while text:
        mark = next((m for m in sorted(marks, key=len, reverse=True) if text.startswith(m)), None)
        ids = [marks[mark]] if mark is not None else list(text[0].encode())
        text = text[len(mark or text[0]) :]
        if not all(matcher.accept(i) for i in ids):
            return False
    return matcher.complete


def read(name: str, text: str) -> list[tuple[str, str]]:
    reply = read_whole(ReplyFormat(TOOL_FORMATS[name], SCHEMAS, guarded=True), text)
    return [(call.name, call.arguments) for call in reply.calls]


def right(call: tuple[str, str]) -> bool:
    name, arguments = call
    try:
        given = json.loads(arguments)
    except ValueError:
        return False
    if name != "f":
        return name == "get-time" and isinstance(given, dict)
    kinds = {"n": int, "s": str}
    return isinstance(given, dict) and "n" in given and all(type(value) is kinds.get(key) for key, value in given.items())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("name", "text"), CASES)
def test_every_spelling_of_a_call_is_held_to_its_schema(name: str, text: str, special: bool) -> None:
    fine, wrong = text.replace("@", "12"), text.replace("@", '"abc"')
    for guarded in (False, True):
        calls = read_whole(ReplyFormat(TOOL_FORMATS[name], SCHEMAS, guarded=guarded), fine).calls
        assert [(call.name, json.loads(call.arguments)["n"]) for call in calls if call.name == "f"] == [("f", 12)]
    assert possible(name, fine, special)
    assert any(call[0] == "f" for call in read(name, wrong))
    assert not possible(name, wrong, special)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_call_stays_possible(name: str, special: bool) -> None:
    for text in TEXTS:
        if not read(name, text):
            assert possible(name, text, special), text


@pytest.mark.parametrize("special", [False, True])
def test_nothing_stands_behind_the_arguments_of_a_message(special: bool) -> None:
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}'
    assert possible("openai", call + "<|end|><|start|>assistant<|channel|>final<|message|>Done.", special)
    assert possible("openai", call + "<|end|><|start|>assistant" + call, special)
    assert not possible("openai", call + " and more", special)


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_arguments_written_one_by_one(name: str) -> None:
    """Each kind of value as it may be, and as it may not."""
    properties = {
        "kind": {"type": "string", "enum": ["a", "it's"]},
        "size": {"type": "string", "minLength": 2, "maxLength": 3},
        "on": {"type": "boolean"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/part"}},
    }
    schema = {"type": "object", "properties": properties, "required": ["kind"], "$defs": {"part": {"type": "integer"}}}
    compiler = GrammarCompiler()
    compiler.set_vocabulary(Vocabulary([bytes([i]) for i in range(256)] + [b"<eos>"], [EOS], [EOS]))
    grammar = optional_calls(TOOL_FORMATS[name], [{"name": "f", "parameters": schema, "strict": True}], {})
    compiled = compiler.compile(grammar)

    def written(**values: str) -> str:
        if name == "pythonic":
            return f"[f({', '.join(f'{key}={value}' for key, value in values.items())})]"
        plain = {key: value.strip('"') for key, value in values.items()}
        return "<function=f>" + "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in plain.items()) + "</function>"

    def allowed(text: str) -> bool:
        matcher = compiler.matcher(compiled)
        return all(map(matcher.accept, text.encode())) and matcher.complete

    fine: list[dict[str, str]] = [
        {"kind": '"a"'}, {"kind": '"it\'s"', "size": '"xyz"'}, {"kind": '"a"', "on": "true"}, {"kind": '"a"', "list": "[1, 2]"},
        {"kind": '"a"', "size": '"xy"', "on": "false", "list": "[]"},
    ]  # fmt: skip
    wrong: list[dict[str, str]] = [
        {"kind": '"c"'}, {"kind": '"a"', "size": '"x"'}, {"kind": '"a"', "size": '"wxyz"'}, {"kind": '"a"', "on": "1"},
        {"kind": '"a"', "list": '["x"]'}, {"size": '"xyz"'}, {"kind": '"a"', "other": "1"},
    ]  # fmt: skip
    form = ReplyFormat(TOOL_FORMATS[name], {"f": schema}, guarded=True)
    for values in fine:
        assert allowed(written(**values)), values
        (call,) = read_whole(form, written(**values)).calls
        assert json.loads(call.arguments) == {key: json.loads(value) for key, value in values.items()}
    for values in wrong:
        assert read_whole(form, written(**values)).calls, values
        assert not allowed(written(**values)), values


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>",
    "<function=f>", "<function=get-time>", "<parameter=n>", "</parameter>", "</function>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", '{"name": "f"', '"name"', '"function": ', '"f"', '"get-time"', ', "arguments": ', '{"n": 1}', '{"n": "x"}', "{}", "{", "}",
    "[", "]", "(", ")", "n=1", "n='x'", ",", ":", '"', "\\", " ", "\n", "f", "1", '"id": "1", ', "```json", "; ",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"openai"}))
@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12), special=st.booleans())
def test_a_wrong_call_is_never_possible(name: str, parts: list[str], special: bool) -> None:
    text = "".join(parts)
    if not all(map(right, read(name, text))):
        assert not possible(name, text, special)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from('{}[]()":, \n\\fnx1=<>'), max_size=20))
def test_text_without_calls_is_always_possible(name: str, text: str) -> None:
    if not read(name, text):
        assert possible(name, text, False)


@pytest.mark.parametrize(
    ("name", "schema", "said"),
    [
        ("qwen3_coder", {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}}, "format of a string"),
        ("qwen3_coder", {"anyOf": [{"type": "object"}]}, "anyOf cannot be enforced"),
        ("pythonic", {"type": "object", "properties": {"a-b": {}}, "required": ["a-b"]}, "cannot be the name of an argument"),
    ],
)
def test_what_cannot_be_held_is_refused(name: str, schema: object, said: str) -> None:
    with pytest.raises(CannotGuard, match=said):
        optional_calls(TOOL_FORMATS[name], [{"name": "f", "parameters": schema, "strict": True}], {})
    optional_calls(TOOL_FORMATS[name], [{"name": "f", "parameters": schema}], {})
