"""What a fleet cannot answer, since the next request goes to another replica."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs ray")

from octavo.fleet.ingress import kept_elsewhere


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/files", b""),
        ("/v1/files/file-1/content", b""),
        ("/v1/batches", b"{}"),
        ("/v1/conversations", b"{}"),
        ("/v1/responses/resp_1", b""),
        ("/v1/responses/resp_1/cancel", b""),
        ("/v1/responses", b'{"previous_response_id": "resp_1"}'),
        ("/v1/responses", b'{"background": true}'),
    ],
)
def test_what_would_be_kept_is_refused(path: str, body: bytes) -> None:
    assert "keeps nothing between requests" in (kept_elsewhere(path, body) or "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", b'{"input": "hi"}'),
        ("/v1/responses", b"{"),
        ("/v1/responses", b"[]"),
        ("/v1/chat/completions", b"{}"),
        ("/v1/filesystem", b""),
    ],
)
def test_everything_else_is_for_a_replica(path: str, body: bytes) -> None:
    assert kept_elsewhere(path, body) is None
