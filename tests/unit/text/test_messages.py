"""Messages as clients send them."""

from __future__ import annotations

import enum
from typing import Any

import pydantic
import pytest

from octavo.errors import InvalidRequest
from octavo.frontend.text.messages import ContentFormat, normalize_messages, plain_data


def normalize(messages: Any, content_format: ContentFormat = "string") -> list[dict[str, Any]]:
    return normalize_messages(messages, content_format, developer_as_system=True)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "must be a list of messages, got str"),
        ({"role": "user"}, "must be a list of messages, got dict"),
        (None, "must be a list of messages, got NoneType"),
        ([], "at least one"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        (
            [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}],
            r"messages\[1\] has the unknown role 'wizard'\. Roles are: system, developer, user",
        ),
        ([{"role": "user"}], r"messages\[0\] \(role user\) has no content"),
        ([{"role": "user", "content": 3}], "must be a string or a list of parts, got int"),
        ([{"role": "user", "content": [3]}], r"messages\[0\]\.content\[0\] must be an object"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] has no text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\] has the type 'image_url'\. This model reads text only",
        ),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "has the type"),
        ([{"role": ["user"], "content": "x"}], "unknown role"),
        ([{"role": "assistant", "tool_calls": [3]}], "tool_calls must be a list of objects"),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\] holds a object; only JSON"),
    ],
)
def test_what_cannot_be_served_is_named(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        normalize(messages)
    assert caught.value.param == "messages"


def test_nesting_is_bounded() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="levels deep"):
        normalize([{"role": "user", "content": "x", "extra": deep}])


def test_the_callers_messages_are_not_touched() -> None:
    message = {"role": "developer", "content": [{"type": "text", "text": "a"}], "name": None}
    assert normalize([message]) == [{"role": "system", "content": "a"}]
    assert message == {"role": "developer", "content": [{"type": "text", "text": "a"}], "name": None}


def test_parts_of_every_text_kind() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"text": "c"}, "d", {"type": "refusal", "refusal": "no"}]
    assert normalize([{"role": "user", "content": parts}])[0]["content"] == "a\nb\nc\nd\nno"
    assert [p["text"] for p in normalize([{"role": "user", "content": parts}], "as given")[0]["content"]] == ["a", "b", "c", "d", "no"]
    assert normalize([{"role": "user", "content": "a"}], "openai")[0]["content"] == [{"type": "text", "text": "a"}]
    assert normalize([{"role": "user", "content": "a"}], "as given")[0]["content"] == "a"


def test_assistant_without_content_and_tool_arguments() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    cut = {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    bare = {"id": "3", "type": "function", "function": {"name": "f", "arguments": ""}}
    (message,) = normalize([{"role": "assistant", "content": None, "tool_calls": [call, cut, bare]}])
    assert message["content"] == ""
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == [{"x": "é"}, '{"x": ', {}]
    assert "tool_calls" not in normalize([{"role": "assistant", "content": "x", "tool_calls": []}])[0]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_under_every_name(name: str) -> None:
    (message,) = normalize([{"role": "assistant", "content": "x", name: "hm"}])
    assert message["reasoning"] == message["reasoning_content"] == message["thinking"] == "hm"


class Role(enum.StrEnum):
    USER = "user"


class Message(pydantic.BaseModel):
    role: str
    content: str
    name: str | None = None


def test_objects_become_plain_data() -> None:
    assert normalize([Message(role="user", content="hi")]) == [{"role": "user", "content": "hi"}]
    role = normalize([{"role": Role.USER, "content": "hi"}])[0]["role"]
    assert role == "user"
    assert type(role) is str
    assert plain_data({1: (True, None, 1.5)}, "x") == {"1": [True, None, 1.5]}


def test_calls_in_the_older_form_become_tool_calls() -> None:
    user, call, result = normalize(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "f", "content": "2"},
        ]
    )
    assert user == {"role": "user", "content": "hi"}
    assert "function_call" not in call
    assert [c["function"] for c in call["tool_calls"]] == [{"name": "f", "arguments": {"a": 1}}]
    assert (result["role"], result["tool_call_id"], result["name"]) == ("tool", call["tool_calls"][0]["id"], "f")
    assert normalize([{"role": "function", "name": "f", "content": "2"}])[0]["role"] == "function", "no call that it could answer"
    for wrong in ("f", {"arguments": "{}"}):
        with pytest.raises(InvalidRequest, match=r"messages\[0\].function_call"):
            normalize([{"role": "assistant", "function_call": wrong}])
