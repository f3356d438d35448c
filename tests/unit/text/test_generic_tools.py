"""Tools with templates that know none: nothing is dropped in silence, and what the model is told is what is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.frontend.http.conversation import defaults_note, start_notes
from octavo.frontend.http.settings import ServerSettings
from octavo.frontend.parsing.formats import TOOL_FORMATS
from octavo.frontend.parsing.reply import ReplyFormat, read_whole
from octavo.frontend.text.chat_template import ChatTemplates
from octavo.frontend.text.generic_tools import written
from octavo.frontend.text.template_inspection import knows_tools

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for part in m['content'] %}{{ part['text'] }}|{% endfor %}</>{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
KNOWING = "{% if tools %}[{{ tools | tojson }}]{% endif %}" + PLAIN
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": {"type": "object"}}}]
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
]
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "43"}]},
    {"role": "user", "content": "and?"},
]


def render(template: str, messages: Any = HISTORY[:1], **kwargs: Any) -> str:
    return ChatTemplates({"default": template}).render(messages, **kwargs)


def test_tools_are_described_in_the_system_message() -> None:
    text = render(PLAIN, tools=TOOLS)
    assert text.startswith("<system>")
    assert json.dumps(TOOLS[0]["function"]) in text
    assert '[{"name": "NAME", "arguments": {"PARAMETER": VALUE}}]' in text
    assert text.endswith("</><user>hi</>")
    with_system = render(PLAIN, [{"role": "system", "content": "Be kind."}, *HISTORY[:1]], tools=TOOLS)
    assert with_system.startswith("<system>Be kind.\n\nYou can call")
    assert with_system.count("<system>") == 1


def test_every_shape_of_content() -> None:
    text = render(PARTS, HISTORY, tools=TOOLS)
    assert text.startswith("<system>You can call")
    assert '<user>{"tool_response": {"name": "f", "content": "42"}}|{"tool_response": {"name": "g", "content": "43"}}|</>' in text


def test_a_template_without_system_messages_gets_it_from_the_user() -> None:
    text = render(NO_SYSTEM, tools=TOOLS)
    assert text.startswith("<user>You can call")
    assert text.endswith("in plain text.\n\nhi</>")


def test_earlier_calls_and_results_are_written_out_even_without_tools() -> None:
    for tools in (None, TOOLS):
        text = render(PLAIN, HISTORY, tools=tools)
        assert '<assistant>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</>' in text
        assert '<user>{"tool_response": {"name": "f", "content": "42"}}' in text
        assert "<tool>" not in text
        assert text.endswith("<user>and?</>")


def test_templates_that_know_tools_decide_for_themselves() -> None:
    assert render(KNOWING, tools=TOOLS) == f"[{json.dumps(TOOLS)}]<user>hi</>"
    assert "<tool>42</>" in render(KNOWING, HISTORY)
    assert knows_tools("{%- set x = tools | default(none) -%}")
    assert not knows_tools("{{ messages[0].tools }} tools")


def test_nobody_reads_calls_nobody_is_told_of_tools() -> None:
    assert render(PLAIN, tools=TOOLS, call_syntax=None) == "<user>hi</>"


def test_a_conversation_can_be_continued() -> None:
    messages = [*HISTORY, {"role": "assistant", "content": "So"}]
    assert render(PLAIN, messages, tools=TOOLS, continue_final_message=True, add_generation_prompt=False).endswith("<assistant>So")


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if form.syntax is not None])
def test_what_is_shown_is_what_is_read(name: str) -> None:
    form = TOOL_FORMATS[name]
    assert form.syntax is not None
    reply = read_whole(
        ReplyFormat(form, {"f": {}, "g": {}}), written(CALLS[:1] if name in ("openai", "mistral_named") else CALLS, form.syntax)
    )
    assert (reply.calls[0].name, json.loads(reply.calls[0].arguments)) == ("f", {"a": 1})
    assert reply.text == ""


@pytest.mark.parametrize(
    ("named", "settings", "part"),
    [
        ({"default": PLAIN}, {}, "described in the system message (json format)"),
        ({"default": PLAIN}, {"tool_call_parser": "hermes"}, "(hermes format)"),
        ({"default": PLAIN}, {"tool_call_parser": "pythonic"}, "--tool-call-parser json"),
        ({"default": PLAIN}, {"tool_call_parser": "none"}, ""),
        ({"default": KNOWING}, {}, ""),
        ({"default": PLAIN, "tool_use": KNOWING}, {}, ""),
        ({}, {}, "no chat template"),
    ],
)
def test_the_server_says_at_its_start_what_will_not_work(named: dict[str, str], settings: dict[str, Any], part: str) -> None:
    notes = start_notes(ChatTemplates(named), ServerSettings(**settings))
    assert len(notes) == bool(part)
    assert all(part in note for note in notes)


def test_the_server_says_at_its_start_which_sampling_parameters_are_the_models_own() -> None:
    assert defaults_note({}) == ""
    assert "temperature=0.6, top_p=0.95 (--generation-config vllm" in defaults_note({"top_p": 0.95, "temperature": 0.6})
