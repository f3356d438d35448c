"""A silent stream gets comments, which clients skip; one that speaks gets none."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from octavo.errors import ConfigError
from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import running_server

COMMENT = ": keep-alive"
HI = [{"role": "user", "content": "hi"}]


def test_a_silent_stream_is_kept_alive(checkpoint: Path) -> None:
    with running_server(checkpoint, ServerSettings(sse_keep_alive=0.05)) as server:
        server.script("", "hello world", delay=0.4)
        for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/messages", {"messages": HI, "max_tokens": 9})):
            with server.http.stream("POST", path, json={**body, "stream": True}) as reply:
                lines = list(reply.iter_lines())
            assert lines.count(COMMENT) >= 2
            assert lines[0] == COMMENT  # while the first token is waited for
            events = [block for block in "\n".join(lines).split("\n\n") if block]
            assert all(block.startswith(("data: ", "event: ", COMMENT)) for block in events)
            assert len(events) > events.count(COMMENT) + 2
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            chunks = client.chat.completions.create(model="tiny", messages=HI, stream=True)  # type: ignore[arg-type]
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello world"


def test_it_can_be_turned_off(checkpoint: Path) -> None:
    with running_server(checkpoint, ServerSettings(sse_keep_alive=0)) as server:
        server.script("", "hello world", delay=0.1)
        with server.http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as reply:
            assert COMMENT not in list(reply.iter_lines())
    with pytest.raises(ConfigError):
        ServerSettings(sse_keep_alive=-1)
