"""OpenAI's own client on /v1/conversations, and background responses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running_server, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20) as client:
        yield client


def test_create_retrieve_update_delete(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "demo"}, items=[{"role": "user", "content": "hi"}])
    assert made.object == "conversation"
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"topic": "other"}).metadata == {"topic": "other"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "other"}
    assert client.conversations.delete(made.id).deleted is True
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_items(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    added = client.conversations.items.create(conversation.id, items=[{"role": "user", "content": c} for c in "abc"])
    assert [item.type for item in added.data] == ["message"] * 3
    listed = list(client.conversations.items.list(conversation.id, limit=2, order="asc"))
    assert [item.id for item in listed] == [item.id for item in added.data]
    newest = list(client.conversations.items.list(conversation.id))
    assert [item.id for item in newest] == [item.id for item in added.data][::-1]
    one = added.data[1]
    assert client.conversations.items.retrieve(one.id or "", conversation_id=conversation.id).id == one.id
    assert client.conversations.items.delete(one.id or "", conversation_id=conversation.id).id == conversation.id
    assert [item.id for item in client.conversations.items.list(conversation.id, order="asc")] == [added.data[0].id, added.data[2].id]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(one.id or "", conversation_id=conversation.id)


def test_responses_go_on_with_it(client: openai.OpenAI, server: RunningServer) -> None:
    conversation = client.conversations.create(
        items=[{"role": "user", "content": "first question"}, {"role": "assistant", "content": "ok"}]
    )
    first = client.responses.create(model="tiny", input="more", conversation=conversation.id)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    with client.responses.stream(model="tiny", input="again", conversation={"id": conversation.id}) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "hello world"
    prompt = server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids)
    order = [prompt.index(text) for text in ("first question", "ok", "more", "hello world", "again")]
    assert order == sorted(order)
    kinds = [(item.role, item.content[0].text) for item in client.conversations.items.list(conversation.id, order="asc")]  # type: ignore[union-attr]
    assert kinds[2:] == [("user", "more"), ("assistant", "hello world"), ("user", "again"), ("assistant", "hello world")]
    # What came back may be sent in again: it gets ids of its own.
    again = [item.model_dump(exclude_none=True) for item in first.output]
    client.conversations.items.create(conversation.id, items=again)  # type: ignore[arg-type]
    ids = [item.id for item in client.conversations.items.list(conversation.id)]
    assert len(set(ids)) == len(ids) == 7


def test_what_cannot_be(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="hi", conversation="conv_none")
    response = client.responses.create(model="tiny", input="hi")
    conversation = client.conversations.create()
    with pytest.raises(openai.BadRequestError, match="not both"):
        client.responses.create(model="tiny", input="hi", conversation=conversation.id, previous_response_id=response.id)
    with pytest.raises(openai.BadRequestError, match="conversation"):
        client.responses.create(model="tiny", input="hi", conversation=5)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]"):
        client.conversations.items.create(conversation.id, items=[{"role": "nobody", "content": "x"}])  # type: ignore[typeddict-item]
    for text in ("x", {"role": "user", "content": "x"}):
        with pytest.raises(openai.BadRequestError, match="list of items"):
            client.conversations.items.create(conversation.id, items=text)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="list of items"):
            client.conversations.create(items=text)  # type: ignore[arg-type]
    # One kind is not the other.
    for wrong in (lambda: client.responses.retrieve(conversation.id), lambda: client.conversations.retrieve(response.id)):
        with pytest.raises(openai.NotFoundError):
            wrong()
    with pytest.raises(openai.NotFoundError):
        client.conversations.delete(response.id)
    with pytest.raises(openai.BadRequestError, match=r"previous_response_id|no response"):
        client.responses.create(model="tiny", input="hi", previous_response_id=conversation.id)
    assert client.responses.retrieve(response.id).output_text == "hello world"


def test_each_key_sees_its_own(tmp_path: Path) -> None:
    with running_server(write_tiny_checkpoint(tmp_path), ServerSettings(api_key=["one", "two"])) as server:
        clients = [openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two")]
        made = clients[0].conversations.create()
        with pytest.raises(openai.NotFoundError):
            clients[1].conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            clients[1].conversations.items.create(made.id, items=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.NotFoundError):
            clients[1].conversations.delete(made.id)
        assert clients[0].conversations.retrieve(made.id).id == made.id


def test_background_and_cancel(client: openai.OpenAI, server: RunningServer) -> None:
    server.script("slowly", "hello " * 40, delay=0.02)
    made = client.responses.create(model="tiny", input="slowly", background=True)
    assert made.status == "queued"
    assert client.responses.retrieve(made.id).status == "in_progress"
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert wait_until(lambda: not server.app.state.context.live)
    time.sleep(0.1)
    assert client.responses.retrieve(made.id).status == "cancelled"
    done = client.responses.create(model="tiny", input="hi", background=True)
    assert wait_until(lambda: client.responses.retrieve(done.id).status == "completed")
    assert client.responses.retrieve(done.id).output_text == "hello world"
    assert client.responses.cancel(done.id).status == "completed"


def test_a_background_response_adds_to_its_conversation_when_it_is_done(client: openai.OpenAI, server: RunningServer) -> None:
    conversation = client.conversations.create()
    made = client.responses.create(model="tiny", input="hi", background=True, conversation=conversation.id)
    assert wait_until(lambda: client.responses.retrieve(made.id).status == "completed")
    assert len(list(client.conversations.items.list(conversation.id))) == 2


def test_one_that_is_deleted_while_a_response_goes_on_with_it(client: openai.OpenAI, server: RunningServer) -> None:
    """The response is finished; there is nothing that it could be added to."""
    server.script("later", [40] * 30, delay=0.02)
    conversation = client.conversations.create()
    with client.responses.create(model="tiny", input="later", conversation=conversation.id, max_output_tokens=30, stream=True) as events:
        next(iter(events))
        client.conversations.delete(conversation.id)
        last = list(events)[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.conversation is not None and last.response.conversation.id == conversation.id
    assert client.responses.retrieve(last.response.id).status == last.response.status
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="hi", conversation=conversation.id)
