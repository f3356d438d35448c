"""Choosing and rendering chat templates, and saying what is wrong when that fails."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.frontend.text.chat_template import ChatTemplates

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PARTS = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def render(template: str, messages: Any = USER, **kwargs: Any) -> str:
    return ChatTemplates({"default": template}, {"bos_token": "<s>"}).render(messages, **kwargs)


def refusal(template: str, messages: Any = USER, **kwargs: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render(template, messages, **kwargs)
    return caught.value


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\n") == "x\n"


def test_variables() -> None:
    assert render("{{ bos_token }}{{ tools }}{{ documents }}") == "<s>NoneNone"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render("{{ tools[0].function.name }}{{ documents[0].title }}", tools=tools, documents=[{"title": "T"}]) == "fT"
    assert render("{{ enable_thinking }} {{ bos_token }}", template_kwargs={"enable_thinking": False, "bos_token": "B"}) == "False B"


def test_tojson_is_plain_json() -> None:
    assert render("{{ messages[0].content | tojson }}", [{"role": "user", "content": "<é'>"}]) == '"<é\'>"'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  2\n ]\n}'


def test_extensions_templates_use() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}b") == "ahib"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}") == "1"
    assert render("{% for a in messages %}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.index0 }}{% endfor %}") == "TrueTrue10"


def test_template_by_name_and_by_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools", "rag": "{{ 'rag' }}"})
    assert templates.render(USER) == "plain"
    assert templates.render(USER, tools=[{"type": "function"}]) == "tools"
    assert templates.render(USER, chat_template="rag") == "rag"
    assert templates.render(USER, chat_template="{{ 1 + 1 }}") == "2"
    with pytest.raises(InvalidRequest, match=r"'nope' is no template.*default, rag, tool_use") as caught:
        templates.render(USER, chat_template="nope")
    assert caught.value.param == "chat_template"


def test_a_model_without_template_says_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template.*--chat-template.*/v1/completions") as caught:
        ChatTemplates({}).render(USER)
    assert caught.value.code == "chat_template_missing"


def test_a_template_refuses_in_its_own_words() -> None:
    error = refusal("{{ raise_exception('Roles must alternate') }}")
    assert str(error) == "The chat template refuses these messages: Roles must alternate"
    assert error.param == "messages"


@pytest.mark.parametrize("template", ["{{ raise_exception('no ' ~ 'x' * 100000) }}", "{{ raise_exception([1] * 50000) }}"])
def test_what_a_template_says_is_bounded(template: str) -> None:
    said = str(refusal(template))
    assert len(said) < 600
    assert said.endswith("…")


@pytest.mark.parametrize(
    "template",
    ["{{ messages[5].content }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ messages[0].content.nope() }}", "{{ ''.__class__.mro() }}"],
)
def test_anything_else_that_fails_is_the_requests_fault(template: str) -> None:
    assert str(refusal(template)).startswith("The chat template failed on these messages: ")


def test_syntax_errors_name_the_line() -> None:
    assert "line 2" in str(refusal("\n{% if %}"))
    assert refusal("{{ x", chat_template="{{ y").param == "chat_template"


def test_reserved_variables_cannot_be_set() -> None:
    error = refusal(CHATML, template_kwargs={"messages": [], "tools": []})
    assert (str(error), error.param) == ("chat_template_kwargs may not set messages, tools.", "chat_template_kwargs")


@pytest.mark.parametrize("text", ["Sure, ", "Sure", " a\n", "<|im_end|>"])
def test_continue_the_final_message(text: str) -> None:
    messages = [*USER, {"role": "assistant", "content": text}]
    expected = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{text}"
    assert render(CHATML, messages, add_generation_prompt=False, continue_final_message=True) == expected
    parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": text}]}]
    assert render(PARTS, parts, add_generation_prompt=False, continue_final_message=True) == f"[hi][x][{text}"


def test_continuing_with_a_template_that_trims() -> None:
    trimming = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": " Sure, "}]
    assert render(trimming, messages, add_generation_prompt=False, continue_final_message=True) == "<hi><Sure,"


def test_continuing_what_cannot_be_continued() -> None:
    assert "exclude each other" in str(refusal(CHATML, continue_final_message=True))
    for messages, template in ((USER, "constant"), ([{"role": "assistant", "content": ""}], CHATML), ([{"role": "assistant"}], CHATML)):
        error = refusal(template, messages, add_generation_prompt=False, continue_final_message=True)
        assert error.param == "continue_final_message"


def test_contents_reach_templates_in_the_shape_they_read() -> None:
    two = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in render(CHATML, two)
    assert render(PARTS, two) == "[a][b]"
    assert render(PARTS) == "[hi]"
    forced = ChatTemplates({"default": "{{ messages[0].content }}"}, content_format="openai")
    assert forced.render(USER) == "[{'type': 'text', 'text': 'hi'}]"


def test_developer_becomes_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{% if messages[0].role == 'developer' %}yes{% endif %}", messages) == "yes"


@pytest.mark.parametrize("arguments", ['{"city": "Zürich"}', {"city": "Zürich"}])
def test_tool_arguments_reach_templates_in_the_shape_they_read(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    expected = '{"city": "Zürich"}'
    for use in ("{{ c.arguments | tojson }}", "{{ '' + c['arguments'] }}", "{{ c.arguments }}"):
        assert render("{% set c = messages[1].tool_calls[0].function %}" + use, messages) == expected
    loop = "{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    assert render(loop, messages) == "city=Zürich"


def test_half_a_surrogate_pair_does_not_leave_a_template() -> None:
    """It may come from the template's own escapes, or from JSON inside a text: neither is seen before."""
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud800 \\ud83d\\ude00"}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    shown = ChatTemplates({"default": "{{ messages[0].tool_calls[0].function.arguments['a'] }}"})
    assert shown.render(messages, add_generation_prompt=False) == "\ufffd \U0001f600"
    assert ChatTemplates({"default": "a{{ '\\ud800' }}b"}).render(messages) == "a\ufffdb"
