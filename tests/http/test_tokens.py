"""/tokenize, /detokenize, /version, /load, /stats and the dashboard page."""

from __future__ import annotations

import re

import pytest

from octavo import __version__
from tests.support.http_server import RunningServer


def test_tokenize_text(server: RunningServer) -> None:
    reply = server.post("/tokenize", {"prompt": "hello world", "return_token_strs": True}).json()
    assert reply == {"count": 2, "max_model_len": 512, "tokens": server.tokens("hello world"), "token_strs": ["hello", " world"]}
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_tokenize_chat_is_what_chat_sends(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    server.post("/v1/chat/completions", {"messages": messages})
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == server.fake.seen[-1].prompt_token_ids


@pytest.mark.parametrize("text", ["hello world", "a\nb\t\N{GRINNING FACE} é", ""])
def test_round_trip(server: RunningServer, text: str) -> None:
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_bad_bodies(server: RunningServer, path: str, body: dict[str, object], param: str) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_version_and_load(server: RunningServer) -> None:
    assert server.http.get("/version").json() == {"version": __version__}
    assert server.http.get("/load").json()["server_load"] == 0
    assert server.http.head("/health").status_code == 200
    assert server.http.post("/ping").status_code == 200


def test_dashboard_loads_nothing_from_elsewhere(server: RunningServer) -> None:
    for path in ("/", "/dashboard"):
        page = server.http.get(path)
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"(src|href)=.?(https?:)?//", page.text)
    stats = server.http.get("/stats").json()
    assert stats["model"] == "tiny"
    assert stats["engine"]["kv_blocks_total"] == 1024
