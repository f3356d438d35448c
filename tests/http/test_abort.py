"""POST /abort ends requests of other connections."""

from __future__ import annotations

import threading

import pytest

from tests.support.http_server import RunningServer, wait_until


@pytest.mark.parametrize("prompts", [["endless"], ["endless", "endless too"]])
def test_a_running_request_ends(server: RunningServer, prompts: list[str]) -> None:
    server.script("endless", [30] * 400, delay=0.02)
    got: list[dict[str, object]] = []
    body = {"prompt": prompts, "max_tokens": 400, "request_id": "mine"}
    reader = threading.Thread(target=lambda: got.append(server.post("/v1/completions", body).json()))
    reader.start()
    assert wait_until(lambda: server.fake.stats().running == len(prompts))
    assert server.post("/abort", {"request_id": "cmpl-mine", "request_ids": ["cmpl-other"]}).json() == {"aborted": ["cmpl-mine"]}
    reader.join(10)
    assert [choice["finish_reason"] for choice in got[0]["choices"]] == ["abort"] * len(prompts)  # type: ignore[index, attr-defined]
    assert wait_until(lambda: server.fake.stats().running == 0)


def test_unknown_ids_and_none(server: RunningServer) -> None:
    assert server.post("/abort", {"request_id": "cmpl-gone"}).json() == {"aborted": []}
    assert server.post("/abort", {}).status_code == 400
