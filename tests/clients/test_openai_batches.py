"""OpenAI's own client on /v1/files and /v1/batches."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import openai
import pytest

from tests.support.http_server import RunningServer, wait_until


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20) as client:
        yield client


def requests(count: int) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(count)]
    return "\n".join(json.dumps(line) for line in lines).encode()


def test_a_batch_from_upload_to_download(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", requests(5)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"name": "nightly"}
    )
    assert batch.status == "validating"
    assert wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed) == (5, 5)
    assert done.output_file_id is not None
    assert done.error_file_id is None
    rows = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert {row["custom_id"] for row in rows} == {f"r{i}" for i in range(5)}
    assert rows[0]["response"]["body"]["choices"][0]["message"]["content"] == "hello world"
    assert batch.id in [b.id for b in client.batches.list(limit=1)]


def test_files(client: openai.OpenAI) -> None:
    file = client.files.create(file=io.BytesIO(b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert client.files.retrieve(file.id).bytes == 2
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert file.id in [f.id for f in client.files.list(purpose="batch", limit=2)]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_cancel(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("hold", [30] * 400, delay=0.02)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hold", "max_tokens": 400}}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert wait_until(lambda: client.batches.retrieve(batch.id).status == "cancelled")


async def test_async(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20) as client:
        file = await client.files.create(file=("in.jsonl", requests(1)), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert (await client.batches.retrieve(batch.id)).input_file_id == file.id
        assert batch.id in [b.id async for b in client.batches.list(limit=1)]


def test_errors_become_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises(openai.BadRequestError):
        client.batches.create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_x")
