"""Output items out of chat chunks: reasoning, text and calls; whole and streamed are the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.http.replies import ChatChoice, ChatChunkChoice, Delta, FunctionCall, FunctionDelta, Message, ToolCall, ToolCallDelta
from octavo.frontend.http.responses.items import input_items, messages
from octavo.frontend.http.responses.output import Output, whole_choice


def chunk(finish: str | None = None, **delta: Any) -> ChatChunkChoice:
    return ChatChunkChoice(0, Delta(**delta), finish_reason=finish)


def call(index: int, arguments: str, name: str | None = None) -> ChatChunkChoice:
    function = FunctionDelta(arguments=arguments)
    delta = ToolCallDelta(index, function)
    if name is not None:
        function.name, delta.id = name, f"call_{index}"
    return chunk(tool_calls=[delta])


def run(chunks: list[ChatChunkChoice]) -> tuple[Output, list[tuple[str, dict[str, Any]]]]:
    output = Output()
    events = [event for c in chunks for event in output.add(c)]
    return output, [*events, *output.end()]


def shape(items: list[dict[str, Any]]) -> list[Any]:
    return [
        (i["type"], i["status"], i.get("call_id"), i.get("name"), i.get("arguments"), [p["text"] for p in i.get("content", ())])
        for i in items
    ]


def test_reasoning_text_and_two_calls() -> None:
    output, events = run(
        [
            chunk(role="assistant", content=""),
            chunk(reasoning="let me "),
            chunk(reasoning="see"),
            chunk(content="Calling."),
            call(0, "", "now"),
            call(0, '{"tz":'),
            call(0, '"UTC"}'),
            call(1, "{}", "later"),
            chunk("tool_calls"),
        ]
    )
    assert shape(output.items) == [
        ("reasoning", "completed", None, None, None, ["let me see"]),
        ("message", "completed", None, None, None, ["Calling."]),
        ("function_call", "completed", "call_0", "now", '{"tz":"UTC"}', []),
        ("function_call", "completed", "call_1", "later", "{}", []),
    ]
    added = [(e["output_index"], e["item"]["type"]) for name, e in events if name == "response.output_item.added"]
    assert added == [(0, "reasoning"), (1, "message"), (2, "function_call"), (3, "function_call")]
    done = [e["arguments"] for name, e in events if name == "response.function_call_arguments.done"]
    assert done == ['{"tz":"UTC"}', "{}"]
    assert [e["item"] for name, e in events if name == "response.output_item.done"] == output.items


def test_the_first_event_of_an_item_shows_it_empty() -> None:
    _, events = run([chunk(content="a"), chunk("stop", content="b")])
    first = next(e for name, e in events if name == "response.output_item.added")
    assert (first["item"]["status"], first["item"]["content"]) == ("in_progress", [])


def test_a_call_without_arguments_is_still_a_call() -> None:
    output, events = run([call(0, "", "now"), chunk("tool_calls")])
    assert shape(output.items) == [("function_call", "completed", "call_0", "now", "", [])]
    assert "response.function_call_arguments.delta" not in [name for name, _ in events]


def test_only_the_last_item_is_incomplete() -> None:
    output, _ = run([chunk(reasoning="r"), chunk("length", content="c")])
    assert [i["status"] for i in output.items] == ["completed", "incomplete"]


@given(
    reasoning=st.lists(st.text(max_size=4), max_size=3),
    content=st.lists(st.text(max_size=4), max_size=3),
    calls=st.lists(st.lists(st.text(max_size=4), max_size=3), max_size=3),
)
def test_whole_is_what_the_stream_adds_up_to(reasoning: list[str], content: list[str], calls: list[list[str]]) -> None:
    chunks = [chunk(reasoning=r) for r in reasoning] + [chunk(content=c) for c in content]
    for index, pieces in enumerate(calls):
        chunks += [call(index, "", f"f{index}"), *(call(index, piece) for piece in pieces)]
    streamed, events = run([*chunks, chunk("stop")])
    message = Message("assistant", "".join(content))
    if text := "".join(reasoning):
        message.reasoning = text
    if calls:
        message.tool_calls = [ToolCall(f"call_{i}", FunctionCall(f"f{i}", "".join(p))) for i, p in enumerate(calls)]
    whole, _ = run([whole_choice(ChatChoice(0, message, None, "stop"))])
    assert shape(whole.items) == shape(streamed.items)
    opened = [e["item"]["id"] for name, e in events if name == "response.output_item.added"]
    closed = [e["item"]["id"] for name, e in events if name == "response.output_item.done"]
    assert opened == closed == [i["id"] for i in streamed.items]


def test_output_is_valid_input() -> None:
    output, _ = run([chunk(reasoning="why"), chunk(content="text"), call(0, "{}", "now"), chunk("tool_calls")])
    back = messages(input_items(output.items), None)
    assert back == [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "text"}],
            "reasoning": "why",
            "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
        }
    ]
    assert messages(output.items, None) == back
