"""Structured output over HTTP: every spelling of the wish, and refusals that say where a schema is wrong."""

from __future__ import annotations

import importlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.grammar import library
from tests.support.grammars import matches
from tests.support.http_server import RunningServer
from tests.support.server_process import scripted_engine, server_process

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "regex", "pattern": "a+"}},
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True, "regex": None}},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "(\\n {0,4})?[ \\t]{0,2}"}},
        {"structured_outputs": {"regex": "[a-z]{3}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json": SCHEMA},
        {"guided_json": True},
        {"guided_regex": "a+"},
        {"guided_choice": ["yes"]},
        {"guided_grammar": 'start: "a"', "guided_decoding_backend": "outlines"},
    ],
)
@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (TEXT, {"prompt": "x"})])
def test_every_spelling_reaches_the_engine(server: RunningServer, path: str, body: dict[str, Any], extra: dict[str, Any]) -> None:
    reply = server.post(path, {**body, **extra})
    assert reply.status_code == 200, reply.text
    sampling = server.fake.seen[-1].sampling
    assert sampling.constraint is not None
    assert sampling.constraint.grammar
    assert sampling.structured_outputs is None


def test_plain_text_is_not_constrained(server: RunningServer) -> None:
    for extra in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": None}):
        assert server.post(CHAT, {**HI, **extra}).status_code == 200
        assert server.fake.seen[-1].sampling.constraint is None


@pytest.mark.parametrize(
    ("extra", "param", "part"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}, "response_format", "at $"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"strict": True, "schema": {"properties": {"a": {"items": {"not": {}}}}}},
                }
            },
            "response_format",
            "$.properties.a.items",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"strict": "no", "schema": {}}}}, "response_format", "strict must be"),
        ({"structured_outputs": {"json": {}, "best_effort": 1}}, "structured_outputs", "best_effort must be"),
        ({"structured_outputs": {"regex": "abc\\"}}, "structured_outputs", "ends in a backslash"),
        ({"structured_outputs": {"json": {"type": "string", "pattern": "^\\"}}}, "structured_outputs", "at $: the regular expression ends"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "any_text", "foo": 1}}}}, "structured_outputs", "at format.foo"),
        (
            {"structured_outputs": {"json": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?=x)"}]}}},
            "structured_outputs",
            "$.anyOf[1]",
        ),
        (
            {"guided_json": {"properties": {"a": {"$ref": "#/$defs/q"}}, "$defs": {"q": {"uniqueItems": True}}}},
            "guided_json",
            "$.$defs.q",
        ),
        ({"guided_json": {"$ref": "#/$defs/missing"}}, "guided_json", "missing"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
        ({"structured_outputs": {"json": None}}, "structured_outputs", "exactly one of json"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "exactly one of json"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "no field 'regexp'"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs", "object"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "non-empty"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "nothing"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs", "grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "non-empty"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "strings"),
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs", "exactly one"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "[a-z]"}},
            "structured_outputs",
            "whitespace_pattern must match nothing",
        ),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "((("}}, "structured_outputs", "regular expression"),
        ({"structured_outputs": {"yaml": "x"}}, "structured_outputs", "yaml"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "format"),
        (
            {"structured_outputs": {"structural_tag": {"format": {"type": "sequence", "elements": [{"type": "?"}]}}}},
            "structured_outputs",
            "elements[0]",
        ),
        ({"structured_outputs": {"choice": ["a"]}, "guided_regex": "b"}, "guided_regex", "Only one"),
        ({"structured_outputs": {"choice": ["a"]}, "use_beam_search": True, "n": 2}, "use_beam_search", "combined"),
        ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text can match"),
        (
            {"guided_json": {"type": "object", "properties": {"a": {"pattern": r"^[^\s\S]$", "type": "string"}}, "required": ["a"]}},
            "guided_json",
            "at $.properties.a: ",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "response_format", "no text can match"),
        ({"structured_outputs": {"grammar": 'start: start "a"'}}, "structured_outputs", "grammar cannot be used: no text can match"),
        ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs", "regex cannot be used: no text can match"),
        ({"guided_regex": r"a[^\s\S]"}, "guided_regex", "no text can match"),
        ({"structured_outputs": {"grammar": 'start: "ab" X\nX: /[^\\s\\S]/'}}, "structured_outputs", "no text can match"),
        ({"guided_json": {"type": "string", "pattern": r"[^\s\S]"}}, "guided_json", "at $: Unsatisfiable"),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (TEXT, {"prompt": "x"})])
def test_what_cannot_be_done_is_refused_with_its_place(
    server: RunningServer, path: str, body: dict[str, Any], extra: dict[str, Any], param: str, part: str
) -> None:
    good = {"structured_outputs": {"choice": ["yes"]}}
    assert server.post(path, {**body, **good}).status_code == 200
    reply = server.post(path, {**body, **extra})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert part in error["message"]
    assert len(error["message"]) < 1000
    assert server.post(path, {**body, **good}).status_code == 200


SET = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["tags"],
    "minProperties": 9,
}


def test_a_schema_that_is_not_strict_is_kept_as_far_as_can_be(server: RunningServer) -> None:
    """As OpenAI has it: only `strict: true` promises the whole schema. Clients send such a one for a set of integers."""

    def asked(path: str, body: dict[str, Any]) -> str:
        reply = server.post(path, body)
        assert reply.status_code == 200, reply.text
        return str(server.fake.seen[-1].sampling.constraint.grammar)

    def format_of(**more: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SET, **more}}}

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for strict in ({}, {"strict": False}, {"strict": None}):
        grammar = asked(CHAT, {**HI, **format_of(**strict)})
        assert matches(grammar, '{"tags":[1,1]}')
        assert not matches(grammar, '{"tags":["x"]}')
        assert not matches(grammar, "{}")
        assert server.post(CHAT, {**HI, **format_of(**strict), "tools": [tool]}).status_code == 200
    assert matches(
        asked("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SET}}}), '{"tags":[1]}'
    )
    assert matches(asked(CHAT, {**HI, "structured_outputs": {"json": SET, "best_effort": True}}), '{"tags":[1,1]}')
    for body in (
        format_of(strict=True),
        {**format_of(strict=True), "tools": [tool]},
        {"structured_outputs": {"json": SET}},
        {"guided_json": SET},
    ):
        reply = server.post(CHAT, {**HI, **body})
        assert (reply.status_code, "at $" in reply.text) == (400, True)


def test_a_server_without_the_engine_says_what_to_install(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    reply = server.post(CHAT, {**HI, "structured_outputs": {"choice": ["never asked before"]}})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "NotImplementedError"
    assert "octavo[structured]" in reply.json()["error"]["message"]
    tool = {"type": "function", "function": {"name": "asked_nowhere_else"}}
    assert server.post(CHAT, {**HI, "tools": [tool]}).status_code == 200
    assert server.post(CHAT, {**HI, "tools": [tool], "tool_choice": "required"}).status_code == 400


def test_an_engine_that_is_too_old_is_named(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_too_old", lambda: "1.6.1")
    reply = server.post(CHAT, {**HI, "structured_outputs": {"choice": ["nor this one"]}})
    assert reply.status_code == 400
    assert "needs llguidance 1.9 or newer; this server has 1.6.1" in reply.json()["error"]["message"]


def test_the_vocabulary_is_what_the_tokens_stand_for(server: RunningServer) -> None:
    assert server.post(CHAT, {**HI, "structured_outputs": {"choice": ["yes"]}}).status_code == 200
    vocabulary = server.fake.vocabulary()  # type: ignore[attr-defined]
    ids = server.tokens("hello world")
    assert b"".join(vocabulary.tokens[i] for i in ids) == b"hello world"
    assert vocabulary.eos == [2]
    assert vocabulary.special == [0, 1, 2]
    assert "model" in json.loads(vocabulary.tokenizer_json)


NEVER = {"$ref": "#"}
FORMAT = {"type": "json_schema", "name": "n", "schema": NEVER}


@pytest.mark.parametrize(
    ("path", "extra", "part"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": NEVER}}]}, "tools[0].function.parameters"),
        ("/v1/responses", {"input": "x", "text": {"format": FORMAT}}, "no text can match"),
        ("/v1/messages", {"max_tokens": 4, "output_config": {"format": FORMAT}}, "no text can match"),
        (
            "/v1/messages",
            {"max_tokens": 4, "tools": [{"name": "f", "input_schema": NEVER}], "tool_choice": {"type": "any"}},
            "input_schema",
        ),
    ],
)
def test_a_grammar_without_any_text_is_refused_by_every_endpoint(
    server: RunningServer, path: str, extra: dict[str, Any], part: str
) -> None:
    body = {**({} if "input" in extra else HI), **({"tool_choice": "required"} if path == CHAT else {}), **extra}
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    assert part in reply.json()["error"]["message"]
    assert "Bias" not in reply.text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "objekt"}, "{field}.schema: the JSON schema cannot be used: at $"),
        (None, "{field} of type json_schema needs schema"),
    ],
)
@pytest.mark.parametrize(
    ("path", "field", "body"),
    [("/v1/responses", "text.format", {"input": "x"}), ("/v1/messages", "output_config.format", {"max_tokens": 4, **HI})],
)
def test_errors_name_the_field_that_the_client_gave(
    server: RunningServer, path: str, field: str, body: dict[str, Any], schema: Any, said: str
) -> None:
    holder = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    reply = server.post(path, {**body, **({"text": holder} if "input" in body else {"output_config": holder})})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert said.format(field=field) in error["message"]
    assert "response_format" not in reply.text
    assert error.get("param", field) == field


def test_errors_of_tools_name_their_fields_as_the_client_has_them(server: RunningServer) -> None:
    tool = {"name": "f", "input_schema": NEVER}
    body: dict[str, Any] = {"max_tokens": 4, **HI, "tools": [tool], "tool_choice": {"type": "any"}}
    assert "tools[0].input_schema: " in server.post("/v1/messages", body).json()["error"]["message"]
    body = {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": NEVER}], "tool_choice": "required"}
    assert "tools[0].parameters: " in server.post("/v1/responses", body).json()["error"]["message"]
    assert server.post("/v1/responses", {"input": "z" * 2000}).json()["error"]["param"] == "input"


ENDLESS = "start: A\nA: " + " & ".join(f"/(a{{{prime}}})*b/" for prime in (101, 103, 107, 109))
"""A check of this takes hours."""


def test_checks_that_never_end_cost_only_their_senders(checkpoint: Path, tmp_path: Path) -> None:
    """Several of them, at both of two API servers: each ends with a 400 or a 429, and meanwhile other requests are served at once."""
    with server_process(tmp_path, scripted_engine(checkpoint, tmp_path, {"default": [40, 41]}), api_server_count=2) as server:
        server.wait_ready()

        def ask(structured_outputs: dict[str, Any]) -> httpx.Response:
            with httpx.Client(base_url=server.url, timeout=300) as client:  # a connection of its own: to either of the servers
                return client.post(TEXT, json={"prompt": "x", "max_tokens": 3, "structured_outputs": structured_outputs})

        for number in range(8):  # whatever starts with the first
            assert ask({"choice": [f"choice {number}"]}).status_code == 200
        with ThreadPoolExecutor(8) as threads:
            bombs = [threads.submit(ask, {"grammar": f"{ENDLESS}\n// {i}"}) for i in range(6)]
            worst = served = 0.0
            while not all(bomb.done() for bomb in bombs):
                begun = time.monotonic()
                assert ask({"choice": [f"{served} served"]}).status_code == 200
                worst, served = max(worst, time.monotonic() - begun), served + 1
            replies = [bomb.result() for bomb in bombs]
        assert worst < 5.0
        assert served > 5
        assert {reply.status_code for reply in replies} <= {400, 429}, [reply.text for reply in replies]
        assert "checking it was stopped" in replies[0].json()["error"]["message"] or replies[0].headers["retry-after"]
        assert ask({"regex": "[a-z]{1,999}"}).status_code == 200  # which needs a process


def test_lists_that_leave_nothing_of_a_grammar(server: RunningServer) -> None:
    reply = server.post(TEXT, {"prompt": "x", "allowed_token_ids": [5], "structured_outputs": {"regex": "[a-z]+"}})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "allowed_token_ids"
    assert "no token is left" in reply.json()["error"]["message"]
