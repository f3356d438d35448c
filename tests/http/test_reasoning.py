"""Reasoning whose markers are several tokens, from the template to the client: what is content is content, and a budget holds everywhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.scripts import scripted_args, token_ids
from tests.support.server_process import ServerProcess, server_process

OPENS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {{ opening }}{% endif %}"
)
THOUGHT = "mmmm</think>"
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its template begins the reasoning if it is told to; then the model thinks mmmm and says no."""
    folder = tmp_path_factory.mktemp("thinking")
    rules = [{"prompt_contains_ids": token_ids("free"), "tokens": token_ids(f"<think>{THOUGHT}no")}]
    rules += [{"prompt_contains_ids": token_ids("early"), "tokens": token_ids("mm")}]
    (folder / "template.jinja").write_text(OPENS)
    args = scripted_args(folder, default=f"{THOUGHT}no", rules=rules, chat_template=str(folder / "template.jinja"))
    with server_process(folder, dataclasses.asdict(args), reasoning_parser="think") as process:
        process.wait_ready()
        yield process


def message(served: ServerProcess, *, stream: bool, free: bool = False, says: str = "hi", **extra: Any) -> dict[str, Any]:
    """What comes of one chat: reasoning, content, and the arguments of calls."""
    body = {
        "messages": [{"role": "user", "content": "free" if free else says}],
        "max_tokens": 60,
        "chat_template_kwargs": {} if free else {"opening": "<think>\n"},
        "stream": stream,
        **extra,
    }
    reply = served.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        parts = [reply.json()["choices"][0]["message"]]
    else:
        events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]
        parts = [choice["delta"] for event in events for choice in event["choices"]]
    result = {"reasoning": "", "content": "", "arguments": ""}
    for part in parts:
        result["reasoning"] += part.get("reasoning") or ""
        result["content"] += part.get("content") or ""
        result["arguments"] += "".join(call["function"]["arguments"] for call in part.get("tool_calls") or ())
    return result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("free", [False, True], ids=["opened by the prompt", "opened by the model"])
def test_the_form_is_that_of_the_content(served: ServerProcess, stream: bool, free: bool) -> None:
    assert message(served, stream=stream, free=free) == {"reasoning": "mmmm", "content": "no", "arguments": ""}
    found = message(served, stream=stream, free=free, response_format=FORM)
    assert (found["reasoning"], json.loads(found["content"])) == ("mmmm", {"a": 1})
    found = message(served, stream=stream, free=free, tools=[TOOL], tool_choice="required")
    assert (found["reasoning"], found["content"], json.loads(found["arguments"])) == ("mmmm", "", {"a": 1})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("free", [False, True], ids=["opened by the prompt", "opened by the model"])
@pytest.mark.parametrize("budget", [0, 1, 3, 4, 5, 20])
def test_a_budget_is_held_and_leaves_no_half_of_a_marker(served: ServerProcess, stream: bool, free: bool, budget: int) -> None:
    for extra in ({}, {"response_format": FORM}):
        found = message(served, stream=stream, free=free, thinking_token_budget=budget, **extra)
        assert found["reasoning"] == "m" * min(budget, 4)
        if extra:
            assert json.loads(found["content"]) == {"a": 1}


def test_a_budget_is_held_where_a_message_is_gone_on_with(served: ServerProcess) -> None:
    given = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>Well"}]
    going_on = {"messages": given, "add_generation_prompt": False, "continue_final_message": True}
    found = message(served, stream=False, thinking_token_budget=2, response_format=FORM, **going_on)
    assert (found["reasoning"], json.loads(found["content"])) == ("mm", {"a": 1})


def test_a_budget_is_held_by_the_other_protocols(served: ServerProcess) -> None:
    shared = {"chat_template_kwargs": {"opening": "<think>\n"}}
    reply = served.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 40, "thinking_token_budget": 2, **shared}).json()
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message"]
    assert reply["output"][0]["content"][0]["text"] == "mm"
    thinking = {"type": "enabled", "budget_tokens": 2}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "thinking": thinking, **shared}
    reply = served.http.post("/v1/messages", json=body).json()
    assert reply["content"][0]["thinking"] == "mm"


def ended_early(served: ServerProcess, *, stream: bool, **extra: Any) -> tuple[dict[str, Any], str]:
    """The message, as the official client puts it together, and the finish reason of a reply whose model ends its turn in its reasoning."""
    from openai import OpenAI

    client = OpenAI(base_url=str(served.http.base_url.join("/v1")), api_key="-")
    asked: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "early"}], "max_tokens": 40, **extra}
    body = {"chat_template_kwargs": {"opening": "<think>\n"}, **asked.pop("extra_body", {})}
    if stream:
        with client.chat.completions.stream(**asked, extra_body=body) as events:
            choice: Any = events.until_done().get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked, extra_body=body).choices[0]
    return choice.message.model_dump(), choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_ends_in_its_reasoning_has_an_empty_content(served: ServerProcess, stream: bool) -> None:
    said, finish = ended_early(served, stream=stream)
    assert (said["reasoning"], said["content"], finish) == ("mm", "", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{"response_format": FORM}, {"tools": [TOOL], "tool_choice": "required"}], ids=["form", "call"])
def test_what_must_have_a_form_does_not_end_before_it(served: ServerProcess, stream: bool, extra: dict[str, Any]) -> None:
    """finish_reason stop means that the promise was kept; without a budget only max_tokens can cut it."""
    reply = served.http.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "early"}],
            "max_tokens": 40,
            "chat_template_kwargs": {"opening": "<think>\n"},
            **extra,
        },
    ).json()["choices"][0]
    assert reply["finish_reason"] == "length"
    found = message(served, stream=stream, says="early", thinking_token_budget=5, **extra)
    assert found["reasoning"].startswith("mm") and json.loads(found["content"] or found["arguments"]) == {"a": 1}
