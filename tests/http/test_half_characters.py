"""Half surrogate pairs, which JSON can escape and UTF-8 cannot carry: wherever one comes from, no request ends in a 500."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running_server

HALF = "\\ud800"
HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 250}),
    ("/v1/messages", {"messages": HI, "max_tokens": 250, "tools": [{"name": "f", "input_schema": PARAMETERS}]}),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}),
]
WRITTEN = {
    "hermes": [
        f'<tool_call>{{"name":"f","arguments":{{"a":"{HALF}"}}}}</tool_call>',
        f'<tool_call>{{"name":"f","arguments":"{{\\"a\\": \\"{HALF}\\"}}"}}</tool_call>',
        f'<tool_call>{{"name":"f{HALF}","arguments":{{}}}}</tool_call>',
        f'<tool_call>{{"function":{{"name":"f","parameters":"{HALF}"}}}}</tool_call>',
    ],
    "llama3_json": [f'{{"name":"f","parameters":{{"a":"{HALF}"}}}}', f'{{"name":"f","parameters":"{HALF}"}}'],
    "pythonic": [f'[f(a="{HALF}")]', f"[f(a={{'{HALF}': 1}})]"],
    "mistral": [f'[TOOL_CALLS][{{"name":"f","arguments":"{HALF}"}}]'],
    "deepseek_v3": [
        f'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{{"a":"{HALF}"}}\n```<｜tool▁call▁end｜>'
    ],
    "qwen3_coder": [
        f"<tool_call><function=f><parameter=a>{HALF}</parameter></function></tool_call>",
        f'<tool_call><function=f><parameter=b>"{HALF}"</parameter></function></tool_call>',
    ],
    "openai": [f'<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a":"{HALF}"}}<|call|>'],
}


@pytest.mark.parametrize("parser", list(WRITTEN))
def test_in_what_a_model_writes(checkpoint: Path, parser: str) -> None:
    with running_server(checkpoint, ServerSettings(tool_call_parser=parser)) as server:
        for text in WRITTEN[parser]:
            server.script("", text)
            for path, body in REQUESTS:
                for stream in (False, True):
                    reply = server.post(path, {**body, "stream": stream})
                    assert reply.status_code == 200, (path, text, reply.text)
                    assert '"error":{' not in reply.text, (path, text, reply.text)
                    assert "f" in reply.text


def test_in_a_template_of_a_request(checkpoint: Path) -> None:
    with running_server(checkpoint, ServerSettings(trust_request_chat_template=True)) as server:
        extra = {"chat_template_kwargs": {"chat_template": f"a{{{{ '{HALF}' }}}}b"}}
        reply = server.post("/v1/chat/completions/render", {"messages": HI, **extra})
        assert "a\ufffdb" in reply.json()["prompt"], reply.text
        for path, body in (*REQUESTS, ("/tokenize", {"messages": HI}), ("/v1/messages/count_tokens", {"messages": HI})):
            assert server.post(path, {**body, **extra, "return_prompt_text": True}).status_code == 200


@pytest.mark.parametrize(
    "wish",
    [
        {"json": f'{{"const": "{HALF}"}}'},
        {"structural_tag": f'{{"format": {{"type": "regex", "pattern": "{HALF}"}}}}'},
        {"structural_tag": f'{{"structures": [{{"begin": "{HALF}", "schema": {{}}, "end": ""}}], "triggers": ["a"]}}'},
        {"grammar": f'start: "{HALF}"'},
        {"grammar": f'root ::= "{HALF}"'},
        {"regex": HALF},
    ],
)
def test_in_a_form_given_as_text(server: RunningServer, wish: dict[str, Any]) -> None:
    reply = server.post("/v1/chat/completions", {"messages": HI, "structured_outputs": wish})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "structured_outputs"


def test_in_earlier_calls_names_of_fields_and_paths(server: RunningServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{HALF}"}}'}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    assert server.post("/v1/chat/completions", {"messages": messages, "return_prompt_text": True}).status_code == 200
    for path in ("/v1/chat/completions", "/v1/messages"):
        raw = f'{{"{HALF}": 1, "{HALF}": 2}}'.encode()
        assert server.http.post(path, content=raw, headers={"Content-Type": "application/json"}).status_code == 400
    for path in ("/v1/files/%ED%A0%80", "/v1/models/%ED%A0%80", "/v1/responses/%ED%A0%80", "/%ED%A0%80"):
        assert server.http.get(path).status_code == 404
    assert server.http.get("/v1/files?after=%ED%A0%80").status_code == 400
