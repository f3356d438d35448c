"""Tools over HTTP: auto, required, named and none; streamed as whole; cut short; with reasoning. The fake engine ignores grammars, so
what a model would be held to is read off the request that reaches it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.frontend.http.settings import ServerSettings
from octavo.frontend.parsing.formats import TOOL_FORMATS
from tests.support.http_server import RunningServer, running_server

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(server: RunningServer, answer: str, **body: Any) -> dict[str, Any]:
    server.script("", answer)
    reply = server.post(PATH, {"messages": HI, "tools": [WEATHER, NOW], **body})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def streamed(server: RunningServer, answer: str, **body: Any) -> dict[str, Any]:
    """The stream put together as clients do."""
    server.script("", answer)
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish = None
    for event in server.events(PATH, {"messages": HI, "tools": [WEATHER, NOW], **body}):
        choice = event["choices"][0]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"id": call["id"], "type": call["type"], "function": {"name": call["function"]["name"], "arguments": ""}}
                )
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
        finish = choice["finish_reason"] or finish
    return {"message": message, "finish_reason": finish}


def told(choice: dict[str, Any]) -> tuple[Any, ...]:
    """What matters of a choice, whole or streamed."""
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return message.get("content") or "", message.get("reasoning") or "", calls, choice["finish_reason"]


def test_a_call(server: RunningServer) -> None:
    choice = ask(server, CALL)
    call = choice["message"]["tool_calls"][0]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("answer", "body", "expected"),
    [
        ("hello world", {}, ("hello world", "", [], "stop")),
        ("Wait. " + CALL + CALL, {}, ("Wait.", "", [("weather", '{"city": "Paris"}')] * 2, "tool_calls")),
        (CALL + CALL, {"parallel_tool_calls": False}, ("", "", [("weather", '{"city": "Paris"}')], "tool_calls")),
        ('<tool_call>{"name": "now"}</tool_call>', {}, ("", "", [("now", "{}")], "tool_calls")),
        (CALL, {"tool_choice": "none"}, (CALL, "", [], "stop")),
        (CALL, {"tool_choice": "required"}, ("", "", [("weather", '{"city": "Paris"}')], "tool_calls")),
        (CALL, {"tool_choice": NAMED}, ("", "", [("weather", '{"city": "Paris"}')], "stop")),
        ("no call", {"tool_choice": "required"}, ("no call", "", [], "stop")),
        ("no call", {"tool_choice": NAMED}, ("no call", "", [], "stop")),
        ("a <tool_ca", {}, ("a <tool_ca", "", [], "stop")),
        (CALL, {"stop": "Pa"}, (CALL[: CALL.index("Pa")], "", [], "stop")),
        (CALL, {"max_tokens": 12}, (CALL[:13], "", [], "length")),
    ],
)
def test_streamed_as_whole(server: RunningServer, answer: str, body: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert told(ask(server, answer, **body)) == expected
    assert told(streamed(server, answer, **body)) == expected


def test_arguments_are_streamed(server: RunningServer) -> None:
    server.script("", CALL, delay=0.002)
    events = server.events(PATH, {"messages": HI, "tools": [WEATHER]})
    pieces = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert len(pieces) > 5
    assert all("id" not in piece for piece in pieces[1:])


def test_a_call_cut_by_length_keeps_what_there_is(server: RunningServer) -> None:
    cut = CALL.index("Pa") + 2
    expected = ("", "", [("weather", '{"city": "Pa')], "length")
    assert told(ask(server, CALL, max_tokens=len(server.tokens(CALL[:cut])))) == expected
    assert told(streamed(server, CALL, max_tokens=len(server.tokens(CALL[:cut])))) == expected


@pytest.mark.parametrize(
    ("written", "body", "expected"),
    [
        ('<tool_call>\n{"na', {}, ('<tool_call>\n{"na', "", [], "length")),
        ('<tool_call>\n{"na', {"tool_choice": "required"}, ("", "", [], "length")),
        ('<tool_call>\n{"na', {"tool_choice": NAMED}, ("", "", [("weather", "")], "length")),
        ('<tool_call>\n{"name": "weather", "ar', {}, ("", "", [("weather", "")], "length")),
        ('<tool_call>\n{"name": "weather", "arguments": {"ci', {"stop": "zzz"}, ("", "", [("weather", '{"ci')], "length")),
        ("<tool_c", {"tool_choice": "required"}, ("", "", [], "length")),
    ],
)
def test_a_call_cut_by_length(server: RunningServer, written: str, body: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """With its name known it is a call; before that it is text where the model was free to write one, and nothing where it was not."""
    count = len(server.tokens(written))
    whole = written + "x" * 20
    assert server.tokens(whole)[:count] == server.tokens(written)
    assert told(ask(server, whole, max_tokens=count, **body)) == expected
    assert told(streamed(server, whole, max_tokens=count, **body)) == expected


def grammar_of(server: RunningServer) -> str:
    constraint = server.fake.seen[-1].sampling.constraint
    return "" if constraint is None else constraint.grammar


def test_what_the_model_is_held_to(server: RunningServer) -> None:
    ask(server, CALL)
    assert grammar_of(server) == ""
    ask(server, CALL, tool_choice="required")
    assert "weather" in grammar_of(server)
    assert "now" in grammar_of(server)
    ask(server, CALL, tool_choice=NAMED)
    assert "weather" in grammar_of(server)
    assert '"now"' not in grammar_of(server)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    ask(server, CALL, tools=[strict])
    assert "FREE" in grammar_of(server)
    ask(server, CALL, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}})
    assert '"now"' not in grammar_of(server)
    ask(server, '{"a": 1}', response_format={"type": "json_object"})
    assert "start: answer | " in grammar_of(server)


def test_a_strict_schema_that_cannot_be_enforced_names_its_path(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    reply = server.post(PATH, {"messages": HI, "tools": [tool]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools"
    assert "tools[0].function.parameters" in reply.json()["error"]["message"]
    assert "$.properties.a" in reply.json()["error"]["message"]
    del tool["function"]["strict"]  # type: ignore[attr-defined]
    assert server.post(PATH, {"messages": HI, "tools": [tool], "tool_choice": "required"}).status_code == 200


def test_logprobs_and_token_ids_are_all_there_though_text_is_held_back(server: RunningServer) -> None:
    server.script("", CALL)
    events = server.events(PATH, {"messages": HI, "tools": [WEATHER], "logprobs": True, "return_token_ids": True})
    ids = [i for e in events for i in e["choices"][0].get("token_ids") or []]
    scored = [entry for e in events for entry in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert len(ids) == len(scored) == len(server.tokens(CALL)) + 1


THINKING = "<think>\nHm.\n</think>\n\nFine. " + CALL


def test_reasoning(checkpoint: Any) -> None:
    with running_server(checkpoint, ServerSettings(reasoning_parser="qwen3", tool_call_parser="hermes")) as server:
        expected = ("Fine.", "Hm.", [("weather", '{"city": "Paris"}')], "tool_calls")
        assert told(ask(server, THINKING)) == expected
        assert told(streamed(server, THINKING)) == expected
        assert told(ask(server, THINKING, include_reasoning=False)) == ("Fine.", "", expected[2], "tool_calls")
        assert told(streamed(server, THINKING, include_reasoning=False)) == ("Fine.", "", expected[2], "tool_calls")
        assert "reasoning" not in ask(server, "plain")["message"]


def test_parsers_can_be_turned_off(checkpoint: Any) -> None:
    with running_server(checkpoint, ServerSettings(reasoning_parser="none", tool_call_parser="none")) as server:
        assert told(ask(server, THINKING)) == (THINKING, "", [], "stop")


def test_tokens_of_the_reasoning_are_counted(checkpoint: Any) -> None:
    """The same in streams and whole replies, of one choice or several, shown or not, and under the names of both APIs."""
    with running_server(checkpoint, ServerSettings(reasoning_parser="qwen3")) as server:
        server.script("", "<think>\nhello world\n</think>\n\nFine.")
        counted = len(server.tokens("hello world"))
        for fields, times in (({}, 1), ({"include_reasoning": False}, 1), ({"n": 2}, 2)):
            whole = server.post(PATH, {"messages": HI, **fields}).json()["usage"]
            assert whole["completion_tokens_details"] == {"reasoning_tokens": counted * times}
            assert counted * times < whole["completion_tokens"]
            events = server.events(PATH, {"messages": HI, **fields, "stream_options": {"include_usage": True}})
            assert events[-1]["usage"]["completion_tokens_details"] == whole["completion_tokens_details"]
        usage = server.post("/v1/responses", {"input": "x"}).json()["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": counted}
        server.script("", "Fine.")
        assert server.post(PATH, {"messages": HI}).json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_no_reasoning_effort_turns_thinking_off_in_templates(checkpoint: Any) -> None:
    with running_server(checkpoint, ServerSettings(trust_request_chat_template=True)) as server:
        template = "{{ enable_thinking is defined and not enable_thinking }} {{ reasoning_effort }}"
        server.post(PATH, {"messages": HI, "chat_template": template, "reasoning_effort": "none"})
        assert server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids) == "True none"


def test_an_unknown_reasoning_effort_is_refused_with_those_there_are(server: RunningServer) -> None:
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        assert server.post(PATH, {"messages": HI, "reasoning_effort": effort}).status_code == 200
    for path, body, param in (
        (PATH, {"messages": HI, "reasoning_effort": "zzz"}, "reasoning_effort"),
        ("/v1/responses", {"input": "x", "reasoning": {"effort": "zzz"}}, "reasoning.effort"),
        ("/v1/messages", {"messages": HI, "max_tokens": 3, "output_config": {"effort": "zzz"}}, "output_config.effort"),
    ):
        reply = server.post(path, body)
        assert reply.status_code == 400, reply.text
        message = reply.json()["error"]["message"]
        assert message.startswith(f"{param} must be one of none, minimal, low, medium, high, xhigh, max")
        assert reply.json()["error"].get("param", param) == param


@pytest.mark.parametrize("names", [['a"b'], [""], ["a b"], ["a\n"], ["é"], ["x" * 129], ["f", "g", "f"]])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_names_that_cannot_be_called_and_names_given_twice(server: RunningServer, names: list[str], choice: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    reply = server.post(PATH, {"messages": HI, "tools": tools, "tool_choice": choice})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "tools"
    assert f"tools[{len(names) - 1}].function.name" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("field", "value"), [("strict", "yes"), ("strict", 1), ("description", 5)])
def test_fields_of_tools_are_taken_at_their_word(server: RunningServer, field: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", field: value}}
    reply = server.post(PATH, {"messages": HI, "tools": [tool]})
    assert reply.status_code == 400, reply.text
    assert f"tools[0].function.{field} must be" in reply.json()["error"]["message"]
    assert server.post(PATH, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", field: None}}]}).status_code == 200


def test_earlier_calls_must_be_calls(server: RunningServer) -> None:
    for function in (5, None, {"name": 3}):
        messages = [*HI, {"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]
        reply = server.post(PATH, {"messages": messages})
        assert reply.status_code == 400, reply.text
        assert "messages[1].tool_calls[0].function" in reply.json()["error"]["message"]


def test_usual_names_are_fine(server: RunningServer) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("get-time", "ns.get_time", "x" * 128, "7")]
    assert server.post(PATH, {"messages": HI, "tools": tools, "tool_choice": "required"}).status_code == 200


@pytest.mark.parametrize(
    "parameters",
    [True, False, {"type": "string"}, {"type": ["array", "null"]}, {"anyOf": [{"type": "string"}, {"type": "integer"}]}, [], "x"],
)
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_parameters_must_be_an_object(server: RunningServer, parameters: Any, choice: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    reply = server.post(PATH, {"messages": HI, "tools": [NOW, tool], "tool_choice": choice})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "tools"
    assert "tools[1].function.parameters" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "parameters", [None, {}, {"properties": {}}, {"type": ["object", "null"]}, {"anyOf": [PARAMETERS, {"type": "null"}]}]
)
def test_parameters_of_objects(server: RunningServer, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert server.post(PATH, {"messages": HI, "tools": [tool], "tool_choice": "required"}).status_code == 200


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
JSON_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"zip": {"type": "integer"}}}},
}


@pytest.mark.parametrize("wish", [{"response_format": JSON_FORMAT}, {"structured_outputs": {"json": JSON_FORMAT["json_schema"]["schema"]}}])  # type: ignore[index]
@pytest.mark.parametrize("tool", [WEATHER, STRICT])
def test_json_and_tools_are_an_answer_of_that_form_or_calls(server: RunningServer, wish: dict[str, Any], tool: dict[str, Any]) -> None:
    ask(server, CALL, tools=[tool], **wish)
    grammar = grammar_of(server)
    assert "start: answer | " in grammar
    assert "zip" in grammar
    assert "weather" in grammar


def test_json_and_tools_in_a_format_without_a_grammar(checkpoint: Any) -> None:
    with running_server(checkpoint, ServerSettings(tool_call_parser="pythonic")) as server:
        ask(server, "{}", tools=[STRICT], response_format=JSON_FORMAT)
        assert "start: answer | " in grammar_of(server)
        assert "weather" in grammar_of(server)


REGEX = {"regex": "a+"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required", "structured_outputs": REGEX}, "structured_outputs"),
        ({"tool_choice": "required", "structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"tool_choice": NAMED, "guided_regex": "a+"}, "guided_regex"),
        ({"tool_choice": NAMED, "response_format": {"type": "regex", "pattern": "a+"}}, "response_format"),
        ({"tools": [STRICT], "structured_outputs": REGEX}, "structured_outputs"),
        ({"tools": [STRICT], "response_format": {"type": "regex", "pattern": "a+"}}, "response_format"),
        ({"tool_choice": "required", "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"tool_choice": NAMED, "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"tools": [STRICT], "use_beam_search": True, "n": 2}, "use_beam_search"),
    ],
)
def test_wishes_that_would_have_to_be_dropped_are_refused(server: RunningServer, body: dict[str, Any], param: str) -> None:
    reply = server.post(PATH, {"messages": HI, "tools": [WEATHER], **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert "combined" in reply.json()["error"]["message"]


def test_functions_are_tools_in_an_older_form(server: RunningServer) -> None:
    """Shown to the model and read like tools; answered as who sends them expects."""
    older = {"messages": HI, "functions": [WEATHER["function"], NOW["function"]]}
    server.script("", CALL)
    choice = server.post(PATH, older).json()["choices"][0]
    shown = server.fake.seen[-1].prompt_token_ids
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert "tool_calls" not in choice["message"]
    server.post(PATH, {"messages": HI, "tools": [WEATHER, NOW]})
    assert server.fake.seen[-1].prompt_token_ids == shown

    events = [e["choices"][0] for e in server.events(PATH, older)]
    deltas = [e["delta"]["function_call"] for e in events if "function_call" in e["delta"]]
    assert [d["name"] for d in deltas if "name" in d] == ["weather"]
    assert "".join(d.get("arguments", "") for d in deltas) == '{"city": "Paris"}'
    assert not any("tool_calls" in e["delta"] for e in events)
    assert events[-1]["finish_reason"] == "function_call"

    named = server.post(PATH, {**older, "function_call": {"name": "weather"}}).json()["choices"][0]
    assert named["message"]["function_call"]["name"] == "weather"
    assert named["finish_reason"] == "stop"
    off = server.post(PATH, {**older, "function_call": "none"}).json()["choices"][0]
    assert "function_call" not in off["message"]
    server.script("", CALL + CALL)
    assert server.post(PATH, older).json()["choices"][0]["message"]["function_call"]["name"] == "weather"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"functions": [NOW["function"]], "tools": [NOW]}, "functions", "cannot be combined with tools"),
        ({"functions": [NOW["function"]], "tool_choice": "auto"}, "functions", "cannot be combined with tool_choice"),
        ({"function_call": "auto"}, "function_call", "needs functions"),
        ({"function_call": "required", "functions": [NOW["function"]]}, "function_call", "must be none, auto"),
        ({"function_call": {"nome": "now"}, "functions": [NOW["function"]]}, "function_call", "must be none, auto"),
        ({"function_call": {"name": "later"}, "functions": [NOW["function"]]}, "function_call", "not among functions"),
        ({"functions": []}, "functions", "empty"),
        ({"functions": [{"name": "a b"}]}, "functions", "functions[0].name"),
        ({"functions": [{"name": "a", "parameters": {"type": 5}}]}, "functions", "functions[0].parameters"),
    ],
)
def test_errors_about_functions_are_told_in_their_words(server: RunningServer, body: dict[str, Any], param: str, said: str) -> None:
    reply = server.post(PATH, {"messages": HI, **body})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert said in reply.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "part", [{"$ref": "#/$defs/gone"}, {"type": "string", "pattern": "["}, {"$ref": "#/properties/a"}], ids=["lost", "pattern", "endless"]
)
def test_bad_parameters_are_refused_whatever_the_choice(server: RunningServer, part: Any, choice: str) -> None:
    parameters = {"type": "object", "properties": {"ok": {"type": "null"}, "a": part}, "required": ["a"]}
    tools = [WEATHER, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice, "max_tokens": 1}
    for _ in range(2):
        reply = server.post("/v1/chat/completions", body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == "tools"
        assert "tools[1].function.parameters: the JSON schema cannot be used: at $.properties.a: " in error["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_pattern_that_looks_ahead_is_left_out_unless_the_tool_is_strict(server: RunningServer, choice: str) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=a)a$"}}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tool_choice": choice, "max_tokens": 1}
    assert server.post("/v1/chat/completions", {**body, "tools": [{"type": "function", "function": function}]}).status_code == 200
    strict = server.post("/v1/chat/completions", {**body, "tools": [{"type": "function", "function": {**function, "strict": True}}]})
    assert strict.status_code == 400
    assert "$.properties.a" in strict.json()["error"]["message"]


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_strict_tools_are_guarded_in_every_format(checkpoint: Any, name: str) -> None:
    with running_server(checkpoint, ServerSettings(tool_call_parser=name)) as server:
        ask(server, "Fine.", tools=[STRICT])
        assert "FREE" in grammar_of(server)
        assert "weather" in grammar_of(server)


def test_a_strict_schema_that_a_format_cannot_hold_is_refused(checkpoint: Any) -> None:
    schema = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with running_server(checkpoint, ServerSettings(tool_call_parser="qwen3_coder")) as server:
        reply = server.post(PATH, {"messages": HI, "tools": [tool]})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "tools"
        assert "format of a string" in reply.json()["error"]["message"]
        tool["function"]["strict"] = False  # type: ignore[index]
        assert server.post(PATH, {"messages": HI, "tools": [tool]}).status_code == 200


def test_channels_with_strict_tools_are_held_from_their_beginning(checkpoint: Any) -> None:
    settings = ServerSettings(tool_call_parser="openai", reasoning_parser="openai_gptoss")
    with running_server(checkpoint, settings) as server:
        ask(server, "<|channel|>final<|message|>Fine.", tools=[STRICT])
        constraint = server.fake.seen[-1].sampling.constraint
        assert constraint is not None
        assert (constraint.reasoning_end_ids, constraint.reasoning_end) == ([], "")
        refused = server.post(PATH, {"messages": HI, "tools": [STRICT], "thinking_token_budget": 5})
        assert refused.json()["error"]["param"] == "thinking_token_budget"
        assert "strict tools" in refused.json()["error"]["message"]


@pytest.mark.parametrize("read", [ask, lambda server, answer: streamed(server, answer)])
@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ('<tool_call>{"name": "weather", "arguments": {"city": "Paris"}', '{"city": "Paris"}'),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Par', '{"city": "Par'),
    ],
)
def test_a_call_that_the_model_left_broken_ends_as_a_call(server: RunningServer, read: Any, answer: str, arguments: str) -> None:
    """By itself, without a limit: clients look for calls where finish_reason says so, and would see an empty answer otherwise."""
    assert told(read(server, answer)) == ("", "", [("weather", arguments)], "tool_calls")


def test_channels_that_must_call_are_held_from_their_beginning(checkpoint: Any) -> None:
    settings = ServerSettings(tool_call_parser="openai", reasoning_parser="openai_gptoss")
    with running_server(checkpoint, settings) as server:
        for choice in ("required", NAMED):
            ask(server, "<|channel|>commentary to=functions.weather<|message|>{}", tool_choice=choice, thinking_token_budget=5)
            constraint = server.fake.seen[-1].sampling.constraint
            assert constraint is not None
            assert constraint.reasoning_start == "<|channel|>analysis<|message|>"
            assert constraint.reasoning_end == "<|end|><|start|>assistant"


def test_a_format_beside_strict_tools_in_channels(checkpoint: Any) -> None:
    """The marks are no tokens of this tokenizer: then no grammar can tell messages apart."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    with running_server(checkpoint, ServerSettings(tool_call_parser="openai", reasoning_parser="openai_gptoss")) as server:
        reply = server.post(PATH, {"messages": HI, "tools": [STRICT], "response_format": wanted})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
        assert server.post(PATH, {"messages": HI, "tools": [WEATHER], "response_format": wanted}).status_code == 200
