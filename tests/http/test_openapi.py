"""The served OpenAPI document against the server: every route, generated requests, never a 5xx (but for what says it is not there yet)."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.generation import GenerationMode

from tests.support.http_server import RunningServer

EXAMPLES = 4
QUICK = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)


def test_the_document_names_every_route(server: RunningServer) -> None:
    paths = set(server.http.get("/openapi.json").json()["paths"])
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/conversations",
        "/v1/conversations/{conversation_id}/items",
        "/v1/files",
        "/v1/batches",
        "/abort",
        "/tokenize",
    ):
        assert path in paths
    assert "/v1/audio/speech" not in paths


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_generated_requests_never_break_it(server: RunningServer, mode: GenerationMode) -> None:
    document = server.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    tried: dict[str, set[int]] = {}

    def check(operation: Any) -> None:
        @QUICK
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            reply = case.call(base_url=server.url, timeout=20)
            tried.setdefault(operation.label, set()).add(reply.status_code)
            assert reply.status_code < 500, (operation.label, reply.status_code, reply.text[:500], case.body)
            if reply.status_code >= 400 and reply.request.method != "HEAD" and reply.headers.get("content-type") == "application/json":
                assert json.loads(reply.text)["error"], reply.text

        send()

    for result in schema.get_all_operations():
        operation = result.ok()
        described = document["paths"][operation.path][operation.method]
        if mode is GenerationMode.NEGATIVE and not {"requestBody", "parameters"} & described.keys():
            continue  # nothing about it can be wrong
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # an id in a path can be anything
            check(operation)
    assert len(tried) >= 15
    wanted = 200 if mode is GenerationMode.POSITIVE else 400
    assert sum(wanted in statuses for statuses in tried.values()) >= 8, tried
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert server.metric("vllm:num_requests_running") == 0
