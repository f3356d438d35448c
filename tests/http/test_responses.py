"""/v1/responses: items in and out, events, the store, previous responses, background."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from octavo.frontend.http.responses.request import INCLUDABLE
from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running_server, wait_until
from tests.support.scripts import token_ids

PATH = "/v1/responses"


def prompt_of(server: RunningServer) -> str:
    return server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids, skip_special_tokens=False)


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def create(server: RunningServer, **body: Any) -> dict[str, Any]:
    reply = server.post(PATH, {"input": "hi", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events_of(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", PATH, json={"input": "hi", **body, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        raw = reply.read().decode()
    blocks = raw.removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "item_id", "created_at", "completed_at")}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


def test_a_string(server: RunningServer) -> None:
    response = create(server, instructions="be short", metadata={"a": "b"}, temperature=0.5)
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "tiny")
    assert response["id"].startswith("resp_")
    assert text_of(response) == "hello world"
    (message,) = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"][0]["annotations"] == []
    assert response["usage"]["output_tokens"] == 3
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 3
    assert (response["temperature"], response["metadata"], response["instructions"]) == (0.5, {"a": "b"}, "be short")
    assert prompt_of(server) == "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_items(server: RunningServer) -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "12:00"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "noon"}]},
        {"role": "user", "content": "thanks"},
    ]
    create(server, input=items)
    roles = [block.split("\n", 1) for block in prompt_of(server).split("<|im_start|>")[1:-1]]
    assert [(role, rest.removesuffix("<|im_end|>\n")) for role, rest in roles] == [
        ("system", "d"),
        ("user", "u"),
        ("assistant", ""),
        ("tool", "12:00"),
        ("assistant", "noon"),
        ("user", "thanks"),
    ]


@pytest.mark.parametrize("body", [{}, {"top_logprobs": 1}, {"max_output_tokens": 1}, {"stop": " w"}])
def test_stream_tells_the_whole_story(server: RunningServer, body: dict[str, Any]) -> None:
    events = events_of(server, **body)
    names = [e["type"] for e in events]
    assert names[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert names[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    final = events[-1]["response"]
    assert "".join(d["delta"] for d in deltas) == text_of(final)
    whole = create(server, **body)
    assert without_ids({**final, "usage": 0}) == without_ids({**whole, "usage": 0})
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[0]["response"]["id"] == final["id"]
    assert events[0]["response"]["status"] == "in_progress"
    assert {e["item_id"] for e in deltas} == {final["output"][0]["id"]}


def test_logprobs(server: RunningServer) -> None:
    response = create(server, include=["message.output_text.logprobs"], top_logprobs=2)
    scores = response["output"][0]["content"][0]["logprobs"]
    assert [s["token"] for s in scores] == ["hello", " world", "<|im_end|>"]
    assert len(scores[0]["top_logprobs"]) == 2
    assert bytes(scores[1]["bytes"]) == b" world"


def test_output_limit_makes_it_incomplete(server: RunningServer) -> None:
    response = create(server, max_output_tokens=1)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert text_of(response) == "hello"
    assert events_of(server, max_output_tokens=1)[-1]["type"] == "response.incomplete"


def test_an_empty_answer_is_an_empty_message(server: RunningServer) -> None:
    server.script("silence", [])
    assert text_of(create(server, input="silence")) == ""
    assert text_of(events_of(server, input="silence")[-1]["response"]) == ""


def test_retrieve_input_items_and_delete(server: RunningServer) -> None:
    items = [{"role": "user", "content": c} for c in "abc"]
    response = create(server, input=items)
    path = f"{PATH}/{response['id']}"
    assert server.http.get(path).json() == response
    page = server.http.get(f"{path}/input_items", params={"order": "asc", "limit": 2}).json()
    assert [i["content"][0]["text"] for i in page["data"]] == ["a", "b"]
    assert page["has_more"]
    rest = server.http.get(f"{path}/input_items", params={"order": "asc", "after": page["last_id"]}).json()
    assert [i["content"][0]["text"] for i in rest["data"]] == ["c"]
    assert not rest["has_more"]
    newest = server.http.get(f"{path}/input_items", params={"limit": 1}).json()["data"]
    assert newest[0]["content"] == [{"type": "input_text", "text": "c"}]
    assert server.http.delete(path).json() == {"id": response["id"], "object": "response", "deleted": True}
    assert server.http.get(path).status_code == 404
    assert server.http.delete(path).status_code == 404


def test_store_false_keeps_nothing(server: RunningServer) -> None:
    response = create(server, store=False)
    assert server.http.get(f"{PATH}/{response['id']}").status_code == 404


@pytest.mark.parametrize("streamed", [False, True])
def test_previous_response(server: RunningServer, streamed: bool) -> None:
    first = events_of(server, input="one")[-1]["response"] if streamed else create(server, input="one")
    second = create(server, input="two", previous_response_id=first["id"], instructions="new")
    create(server, input="three", previous_response_id=second["id"])
    blocks = [b.removesuffix("<|im_end|>\n") for b in prompt_of(server).split("<|im_start|>")[1:-1]]
    assert blocks == ["user\none", "assistant\nhello world", "user\ntwo", "assistant\nhello world", "user\nthree"]
    assert second["previous_response_id"] == first["id"]


def test_previous_response_that_is_not_there(server: RunningServer) -> None:
    error = server.post(PATH, {"input": "x", "previous_response_id": "resp_nope"}).json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    first = create(server)
    second = create(server, previous_response_id=first["id"])
    server.http.delete(f"{PATH}/{first['id']}")
    assert server.post(PATH, {"input": "x", "previous_response_id": second["id"]}).status_code == 400


def test_background(server: RunningServer) -> None:
    server.script("slowly", "hello world", delay=0.05)
    queued = create(server, input="slowly", background=True)
    assert (queued["status"], queued["output"]) == ("queued", [])
    path = f"{PATH}/{queued['id']}"
    assert server.http.get(path).json()["status"] == "in_progress"
    assert wait_until(lambda: server.http.get(path).json()["status"] == "completed")
    assert text_of(server.http.get(path).json()) == "hello world"
    assert server.post(f"{path}/cancel").json()["status"] == "completed"


def test_background_is_cancelled(server: RunningServer) -> None:
    server.script("forever", token_ids("z") * 400, delay=0.02)
    queued = create(server, input="forever", background=True)
    path = f"{PATH}/{queued['id']}"
    follow_up = server.post(PATH, {"input": "x", "previous_response_id": queued["id"]})
    assert follow_up.status_code == 400
    assert server.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.http.get(path).json()["status"] == "cancelled"


def test_background_that_fails(server: RunningServer) -> None:
    server.script("breaks", "hello world", fail_at=1)
    path = f"{PATH}/{create(server, input='breaks', background=True)['id']}"
    assert wait_until(lambda: server.http.get(path).json()["status"] == "failed")
    error = server.http.get(path).json()["error"]
    assert error["code"] == "server_error"
    assert "NaN" in error["message"]


def test_only_background_responses_can_be_cancelled(server: RunningServer) -> None:
    response = create(server)
    assert server.post(f"{PATH}/{response['id']}/cancel").status_code == 400
    assert server.post(f"{PATH}/resp_nope/cancel").status_code == 404


def test_a_stream_that_breaks_ends_with_failed(server: RunningServer) -> None:
    server.script("breaks", "hello world", fail_at=1)
    events = events_of(server, input="breaks")
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert text_of(server.http.get(f"{PATH}/{events[0]['response']['id']}").json()) == ""
    assert server.post(PATH, {"input": "breaks"}).status_code == 500


def test_leaving_ends_the_request(server: RunningServer) -> None:
    server.script("forever", token_ids("z") * 400, delay=0.02)
    with server.http.stream("POST", PATH, json={"input": "forever", "stream": True}) as reply:
        next(reply.iter_bytes())
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(PATH, json={"input": "forever"}, timeout=0.3)
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_input_tokens(server: RunningServer) -> None:
    counted = server.post(f"{PATH}/input_tokens", {"input": "hi", "instructions": "be short"}).json()
    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] == create(server, instructions="be short")["usage"]["input_tokens"]


TOOL = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}


def test_tools_reach_the_template(server: RunningServer) -> None:
    create(server, tools=[TOOL], tool_choice="none")
    assert '"function": {"name": "now"' in prompt_of(server)
    other = {**TOOL, "name": "later"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "later"}]}
    reply = server.post(PATH, {"input": "hi", "tools": [TOOL, other], "tool_choice": allowed})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        ({"input": [{"role": "user", "content": 3}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": -1}, "max_tool_calls"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"truncation": "some"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"top_logprobs": 100}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs", "wishes"]}, "include"),
        ({"include": [""]}, "include"),
        ({"text": {"verbosity": "endless"}}, "text"),
        ({"input": "z" * 600}, None),
    ],
)
def test_bad_requests(server: RunningServer, body: dict[str, Any], param: str | None) -> None:
    reply = server.post(PATH, {"input": "hi", **body})
    assert reply.status_code == 400, reply.text
    if param is not None:
        assert reply.json()["error"]["param"] == param


def test_what_openai_includes_is_taken(server: RunningServer) -> None:
    assert create(server, include=list(INCLUDABLE), text={"verbosity": "low"})["status"] == "completed"


def test_long_input_is_cut_when_asked(server: RunningServer) -> None:
    assert create(server, input="z" * 600, truncation="auto", max_output_tokens=4)["status"] == "completed"


def test_bad_queries(server: RunningServer) -> None:
    response = create(server)
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "nope"}):
        reply = server.http.get(f"{PATH}/{response['id']}/input_items", params=query)
        assert reply.status_code == 400, query
        assert reply.json()["error"]["param"] == next(iter(query))


def test_keys_see_their_own_responses_only(checkpoint: Any) -> None:
    with running_server(checkpoint, ServerSettings(api_key=["one", "two"])) as server:
        one, two = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
        response = server.post(PATH, {"input": "hi"}, headers=one).json()
        assert server.http.get(f"{PATH}/{response['id']}", headers=two).status_code == 404
        assert server.http.delete(f"{PATH}/{response['id']}", headers=two).status_code == 404
        assert server.post(PATH, {"input": "x", "previous_response_id": response["id"]}, headers=two).status_code == 400
        reference = [{"type": "item_reference", "id": response["output"][0]["id"]}]
        assert [server.post(PATH, {"input": reference}, headers=key).status_code for key in (one, two)] == [200, 400]
        assert server.http.get(f"{PATH}/{response['id']}", headers=one).status_code == 200


@pytest.mark.parametrize("field", ["summary", "content"])
def test_a_reasoning_item_of_no_known_form_is_refused(server: RunningServer, field: str) -> None:
    reply = server.post("/v1/responses", {"input": [{"type": "reasoning", field: 1}]})
    assert reply.status_code == 400, reply.text
    assert f"input[0].{field}" in reply.json()["error"]["message"]
