"""Keys, CORS, request ids, root path, and which routes exist."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running_server

BODY = {"prompt": "x"}


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[RunningServer]:
    settings = ServerSettings(
        api_key=["alpha", "beta"],
        enable_request_id_headers=True,
        allowed_origins=["https://app.example"],
        allowed_methods=["POST"],
        allow_credentials=True,
        disable_fastapi_docs=True,
    )
    with running_server(checkpoint, settings) as server:
        yield server


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Bearer alpha2", "alpha", "Basic alpha", "Bearer \xff"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/nothing"])
def test_no_key_no_service(guarded: RunningServer, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    reply = guarded.http.post(path, json=BODY, headers=headers)
    assert reply.status_code == 401
    assert reply.json() == {"error": "Unauthorized"}


@pytest.mark.parametrize("header", ["Bearer alpha", "Bearer beta", "bearer beta"])
def test_each_key_opens(guarded: RunningServer, header: str) -> None:
    assert guarded.post("/v1/completions", BODY, headers={"Authorization": header}).status_code == 200
    assert guarded.http.get("/v1/models", headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/ping", "/version", "/metrics", "/load"])
def test_probes_need_no_key(guarded: RunningServer, path: str) -> None:
    assert guarded.http.get(path).status_code == 200


def test_stats_need_a_key(guarded: RunningServer) -> None:
    assert guarded.http.get("/stats").status_code == 401
    assert guarded.http.get("/").status_code == 200


def test_options_is_never_checked(guarded: RunningServer) -> None:
    assert guarded.http.options("/v1/completions").status_code != 401
    preflight = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    reply = guarded.http.options("/v1/completions", headers=preflight)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"


def test_cors(guarded: RunningServer) -> None:
    for headers, status in (({"Authorization": "Bearer alpha"}, 200), ({}, 401)):
        reply = guarded.post("/v1/completions", BODY, headers={"Origin": "https://app.example", **headers})
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
    other = guarded.post("/v1/completions", BODY, headers={"Origin": "https://evil.example", "Authorization": "Bearer alpha"})
    assert "access-control-allow-origin" not in other.headers


def test_request_ids(guarded: RunningServer) -> None:
    key = {"Authorization": "Bearer alpha"}
    reply = guarded.post("/v1/completions", BODY, headers={**key, "X-Request-Id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert reply.json()["id"] == "cmpl-abc-1"
    reply = guarded.post("/v1/completions", {**BODY, "request_id": "field"}, headers={**key, "X-Request-Id": "abc-1"})
    assert reply.json()["id"] == "cmpl-field"
    reply = guarded.post("/v1/completions", BODY, headers=key)
    assert reply.json()["id"] == f"cmpl-{reply.headers['x-request-id']}"
    assert guarded.http.get("/health").headers["x-request-id"]


def test_ids_are_not_sent_back_unless_asked(server: RunningServer) -> None:
    assert "x-request-id" not in server.post("/v1/completions", BODY, headers={"X-Request-Id": "abc"}).headers


def test_docs_can_be_turned_off(guarded: RunningServer, server: RunningServer) -> None:
    key = {"Authorization": "Bearer alpha"}
    assert guarded.http.get("/docs", headers=key).status_code == 404
    assert guarded.http.get("/openapi.json", headers=key).status_code == 404
    schema = server.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "temperature", "stream_options"} <= set(body["properties"])
    assert "$ref" not in str(body)


def test_models(checkpoint: Path) -> None:
    with running_server(checkpoint, served_model_names=("org/first", "second")) as server:
        data = server.http.get("/v1/models").json()["data"]
        assert [card["id"] for card in data] == ["org/first", "second"]
        assert data[0]["max_model_len"] == 512
        assert data[0]["permission"]
        assert server.http.get("/v1/models/org/first").json()["id"] == "org/first"
        assert server.http.get("/v1/models/second").json()["object"] == "model"
        reply = server.post("/v1/completions", {"model": "second", **BODY}).json()
        assert reply["model"] == "org/first"
        assert server.metric("vllm:num_requests_running", model_name="org/first") == 0


def test_reset_prefix_cache_only_in_dev_mode(checkpoint: Path, server: RunningServer) -> None:
    assert server.post("/reset_prefix_cache").status_code == 404
    with running_server(checkpoint, ServerSettings(server_dev_mode=True)) as dev:
        assert dev.post("/reset_prefix_cache").json() == {"success": True}


def test_root_path(checkpoint: Path) -> None:
    with running_server(checkpoint, ServerSettings(root_path="/llm", api_key=["k"])) as server:
        # A proxy may strip the prefix, or leave it.
        assert server.http.get("/llm/health").status_code == 200
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/llm/v1/models").status_code == 401
        assert server.http.get("/llm/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"port": 70000}, "port"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"ssl_keyfile": "/nonexistent"}, "ssl"),
        ({"ssl_keyfile": "/nonexistent", "ssl_certfile": "/nonexistent"}, "ssl_keyfile"),
        ({"api_key": [""]}, "key"),
        ({"log_format": "xml"}, "log_format"),
        ({"uvicorn_log_level": "loud"}, "uvicorn_log_level"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
    ],
)
def test_impossible_settings(values: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ServerSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "headers"), [("/v1/messages", {}), ("/v1/messages/count_tokens", {}), ("/v1/models", {"anthropic-version": "1"})]
)
def test_anthropics_clients_read_errors_in_their_shape(guarded: RunningServer, path: str, headers: dict[str, str]) -> None:
    """Also those that no route answers: no key, no such method, no such route, no such model."""
    key = {"Authorization": "Bearer alpha"}
    for reply, status, kind in (
        (guarded.http.post(path, json={}, headers=headers), 401, "authentication_error"),
        (guarded.http.put(path, json={}, headers={**headers, **key}), 405, "invalid_request_error"),
        (guarded.http.get(f"{path}/none/such", headers={**headers, **key}), 404, "not_found_error"),
    ):
        assert reply.status_code == status
        body = reply.json()
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["error"]["message"]
        assert body["request_id"].startswith("req_")


def test_a_models_card_serves_both_apis(server: RunningServer) -> None:
    listed = server.http.get("/v1/models").json()
    card = server.http.get(f"/v1/models/{listed['data'][0]['id']}").json()
    assert card == listed["data"][0]
    assert (card["object"], card["type"], card["display_name"]) == ("model", "model", card["id"])
    assert card["max_input_tokens"] == card["max_tokens"] == card["max_model_len"]
    assert int(datetime.datetime.fromisoformat(card["created_at"]).timestamp()) == card["created"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (card["id"], card["id"], False)
