"""What the log says: formats, filters, one line an event, prompts only when asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.frontend.http.settings import ServerSettings
from octavo.observe.logs import AccessFilter, JsonFormatter, TextFormatter, configure_logging
from tests.support.http_server import running_server, wait_until


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    r = logging.LogRecord("octavo.request", logging.INFO, __file__, 1, message, args, None)
    r.__dict__.update(extra)
    return r


@pytest.fixture
def _restored_logging() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("octavo", "uvicorn", "uvicorn.error", "uvicorn.access")]
    before = [(log, list(log.handlers), log.level, log.propagate) for log in loggers]
    yield
    for log, handlers, level, propagate in before:
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


def test_text_is_one_line() -> None:
    line = TextFormatter().format(record("path %s", "/a\nFAKE ERROR line", id="x", error="two\nlines"))
    assert "\n" not in line
    assert line.endswith("id=x error=two\\nlines")


def test_json_is_one_object_with_the_fields() -> None:
    event = json.loads(JsonFormatter().format(record("done\n", id="x", total_ms=1.5)))
    assert (event["level"], event["logger"], event["message"], event["id"], event["total_ms"]) == (
        "info",
        "octavo.request",
        "done\n",
        "x",
        1.5,
    )


@pytest.mark.parametrize(
    ("path", "status", "shown"),
    [
        ("/health", 200, False),
        ("/metrics?x=1", 200, False),
        ("/health", 503, True),
        ("/v1/completions", 200, False),
        ("/v1/completions", 400, True),
        ("/v1/models", 200, True),
        ("/quiet", 500, False),
    ],
)
def test_access_lines(path: str, status: int, shown: bool) -> None:
    r = record('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", path, "1.1", status)
    assert AccessFilter(["/quiet"]).filter(r) is shown


@pytest.mark.usefixtures("_restored_logging")
def test_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    configure_logging("json", "warning")
    logging.getLogger("octavo.server").info("quiet")
    logging.getLogger("octavo.server").warning("loud")
    logging.getLogger("uvicorn.error").warning("from uvicorn")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["loud", "from uvicorn"]
    bad = tmp_path / "log.json"
    bad.write_text("{")
    with pytest.raises(ConfigError, match="log_config_file"):
        configure_logging("text", "info", str(bad))


@pytest.mark.parametrize("verbose", [False, True])
def test_prompts_are_logged_only_when_asked(checkpoint: Path, caplog: pytest.LogCaptureFixture, verbose: bool) -> None:
    caplog.set_level("DEBUG", logger="octavo")
    settings = ServerSettings(enable_log_requests=verbose, enable_log_outputs=verbose, max_log_len=12)
    with running_server(checkpoint, settings) as server:
        server.script("", "hello world")
        server.post("/v1/completions", {"prompt": "my secret prompt that is long", "odd_field": 1})
        server.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert wait_until(lambda: sum(r.__dict__.get("reason") == "stop" for r in caplog.records) == 2)
    assert ("my secret pr" in caplog.text) is verbose
    assert "that is long" not in caplog.text
    assert ("'hello world'" in caplog.text) is verbose
    assert caplog.text.count("odd_field") == 1


def test_an_unknown_field_is_told_once_by_name(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="octavo")  # what a server shows unless it is asked for less
    with running_server(checkpoint) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            for _ in range(2):
                server.post(path, {**body, "odd_field": 1, f"odd{len(path)}": "a secret"})
    told = [r.getMessage() for r in caplog.records if "Unknown request fields" in r.getMessage()]
    assert len(told) == 2
    assert "odd_field" in told[0]
    assert "odd_field" not in told[1]
    assert "a secret" not in caplog.text


def test_an_unknown_query_parameter_is_told_once_by_name(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="octavo")
    with running_server(checkpoint) as server:
        for path in ("/v1/models", "/v1/files", "/v1/models/tiny", "/health", "/nowhere"):
            for _ in range(2):
                server.http.get(path, params={"zork": "a secret", "limit": "3"})
        server.http.get("/v1/files", params={"purpose": "batch", "order": "asc"})
        server.http.post("/v1/completions", params={"api-version": "1"}, json={"prompt": "x"})
    told = [r.getMessage() for r in caplog.records if "Unknown query parameters" in r.getMessage()]
    assert len(told) == 2
    assert "zork" in told[0] and "limit" in told[0]
    assert "api-version" in told[1]
    assert "a secret" not in caplog.text


def test_a_refused_request_says_why(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="octavo.request")
    with running_server(checkpoint) as server:
        server.post("/v1/completions", {"prompt": "x", "stop_token_ids": [10**9]})
    refused = [r for r in caplog.records if r.name == "octavo.request"]
    assert len(refused) == 1
    assert refused[0].__dict__["reason"] == "error"
    assert "stop_token_ids" in refused[0].__dict__["error"]
