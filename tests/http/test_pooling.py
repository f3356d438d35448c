"""Embeddings, scores and reranking over HTTP: whole servers over tiny models, and the refusals of one that generates."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

import httpx
import pytest

from tests.http.test_every_field import GOOD, VALUES, bodies_of, fields_of, sent, with_field
from tests.support.http_server import RunningServer
from tests.support.server_process import ServerProcess, server_process
from tests.support.tiny_pooling import save_pooling, write_modules

TEXTS = ["a man is eating food", "the stock market fell", "a cat runs"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("embedder")
    save_pooling(folder, "BertModel")
    write_modules(folder, "mean_tokens", normalize=True, max_length=16)
    engine = {"model": str(folder), "device": "cpu", "threads": 1, "served_model_name": ["tiny"], "max_waiting": 8}
    with server_process(tmp_path_factory.mktemp("log"), engine) as server:
        server.wait_ready(120)
        yield server


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("ranker")
    save_pooling(folder, "BertForSequenceClassification", num_labels=1)
    with server_process(tmp_path_factory.mktemp("log"), {"model": str(folder), "device": "cpu", "threads": 1}) as server:
        server.wait_ready(120)
        yield server


def post(server: ServerProcess, path: str, body: dict[str, object]) -> httpx.Response:
    return server.http.post(path, json=body)


def vectors(reply: httpx.Response) -> list[list[float]]:
    assert reply.status_code == 200, reply.text
    return [item["embedding"] for item in reply.json()["data"]]


def test_every_form_of_input(embedder: ServerProcess) -> None:
    reply = post(embedder, "/v1/embeddings", {"model": "tiny", "input": TEXTS})
    body = reply.json()
    assert (body["object"], body["model"], [d["index"] for d in body["data"]]) == ("list", "tiny", [0, 1, 2])
    many = vectors(reply)
    assert all(len(v) == 32 and sum(x * x for x in v) == pytest.approx(1, abs=1e-4) for v in many)
    assert vectors(post(embedder, "/v1/embeddings", {"input": TEXTS[1]}))[0] == pytest.approx(many[1], abs=1e-5)
    ids = [post(embedder, "/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == sum(map(len, ids))
    assert vectors(post(embedder, "/v1/embeddings", {"input": ids[0]}))[0] == pytest.approx(many[0], abs=1e-5)
    assert vectors(post(embedder, "/v1/embeddings", {"input": ids}))[2] == pytest.approx(many[2], abs=1e-5)


def test_more_texts_than_may_wait(embedder: ServerProcess) -> None:
    found = vectors(post(embedder, "/v1/embeddings", {"input": [TEXTS[i % 3] for i in range(100)]}))
    assert len(found) == 100
    assert found[99] == pytest.approx(found[0], abs=1e-5)
    reply = post(embedder, "/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[:1] * 2049})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "documents"


def test_base64_and_dimensions(embedder: ServerProcess) -> None:
    plain = vectors(post(embedder, "/v1/embeddings", {"input": "a cat", "dimensions": 7}))[0]
    coded = post(embedder, "/v1/embeddings", {"input": "a cat", "dimensions": 7, "encoding_format": "base64"}).json()["data"][0][
        "embedding"
    ]
    assert struct.unpack("<7f", base64.b64decode(coded)) == pytest.approx(plain, abs=1e-6)
    assert sum(x * x for x in plain) == pytest.approx(1, abs=1e-4)


def test_the_openai_client(embedder: ServerProcess) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="x", max_retries=0)
    reply = client.embeddings.create(model="tiny", input=TEXTS)
    assert reply.data[1].embedding == pytest.approx(vectors(post(embedder, "/v1/embeddings", {"input": TEXTS}))[1], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input"),
        ("/v1/embeddings", {"input": [[1, "a"]]}, "input"),
        ("/v1/embeddings", {"input": [999]}, "input"),
        ("/v1/embeddings", {"input": "cat " * 30}, "input"),
        ("/v1/embeddings", {"input": "a", "normalize": "yes"}, "normalize"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 99}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/pooling", {"input": "a", "task": "sing"}, "task"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "man"], "text_2": ["a", "man", "is"]}, "text_1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [3]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_bad_input_is_named(embedder: ServerProcess, path: str, body: dict[str, object], param: str) -> None:
    reply = post(embedder, path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_model_that_pools_says_so_when_it_is_talked_to(embedder: ServerProcess, path: str) -> None:
    """And not that it lacks a chat template: one would not help."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} if "responses" not in path else {"input": "hi"}
    reply = post(embedder, path, body)
    assert reply.status_code == 400
    assert "runs for pooling" in reply.text


TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}fast{% endif %}"


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("chatting")
    save_pooling(folder, "BertModel")
    engine = {"model": str(folder), "device": "cpu", "threads": 1, "chat_template": TEMPLATE}
    with server_process(tmp_path_factory.mktemp("log"), engine) as server:
        server.wait_ready(120)
        yield server


def test_a_conversation_is_what_its_template_makes_of_it(chatting: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a man"}, {"role": "assistant", "content": [{"type": "text", "text": "is eating"}]}]
    plain = {"add_special_tokens": False, "input": "a man is eating "}
    expected = vectors(post(chatting, "/v1/embeddings", plain))[0]
    assert vectors(post(chatting, "/v1/embeddings", {"messages": messages}))[0] == pytest.approx(expected, abs=1e-5)
    with_ends = vectors(post(chatting, "/v1/embeddings", {"messages": messages, "add_special_tokens": True}))[0]
    assert with_ends == pytest.approx(vectors(post(chatting, "/v1/embeddings", {"input": plain["input"]}))[0], abs=1e-5)
    prompted = post(chatting, "/v1/embeddings", {"messages": messages, "add_generation_prompt": True})
    assert prompted.json()["usage"]["prompt_tokens"] == 5
    tokens = post(chatting, "/pooling", {"messages": messages, "task": "token_embed"}).json()["data"][0]["data"]
    assert len(tokens) == 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "input": "a"}, "input"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "cat " * 100}]}, "messages"),
    ],
)
def test_a_bad_conversation_is_named(chatting: ServerProcess, body: dict[str, object], param: str) -> None:
    reply = post(chatting, "/v1/embeddings", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param), reply.text


def test_a_model_without_a_template_takes_no_conversation(embedder: ServerProcess) -> None:
    reply = post(embedder, "/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]})
    assert reply.status_code == 400
    assert "no chat template" in reply.json()["error"]["message"]


def test_long_input_can_be_cut(embedder: ServerProcess) -> None:
    reply = post(embedder, "/v1/embeddings", {"input": "cat " * 30, "truncate_prompt_tokens": -1})
    assert reply.json()["usage"]["prompt_tokens"] == 16


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/pooling", "/classify", "/v1/score", "/v1/rerank", "/v1/chat/completions", "/tokenize"]
)
def test_every_field_with_every_kind_of_value(embedder: ServerProcess, ranker: ServerProcess, path: str) -> None:
    for server in (embedder, ranker):
        schema = bodies_of(server.http.get("/openapi.json").json())[path]
        for field in fields_of(schema):
            for value in VALUES:
                sent(server, path, with_field(GOOD[path], field, value))
        assert server.http.get("/health").status_code == 200
    assert sent(embedder, "/v1/score", GOOD["/v1/score"]).status_code == 200


def test_what_a_model_that_pools_cannot_do(embedder: ServerProcess) -> None:
    reply = post(embedder, "/v1/completions", {"prompt": "a man"})
    assert reply.status_code == 400
    assert "runs for pooling" in reply.json()["error"]["message"]
    assert embedder.http.get("/health").status_code == 200


def test_vectors_of_tokens(embedder: ServerProcess) -> None:
    data = post(embedder, "/pooling", {"input": "a cat", "task": "token_embed"}).json()["data"][0]["data"]
    assert [len(row) for row in data] == [32] * 4  # [CLS] a cat [SEP]


def test_reranking_with_embeddings_follows_their_cosines(embedder: ServerProcess) -> None:
    scores = [item["score"] for item in post(embedder, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]]
    assert scores[0] == pytest.approx(1, abs=1e-5)
    results = post(embedder, "/v1/rerank", {"query": TEXTS[0], "documents": TEXTS, "top_n": 2}).json()["results"]
    assert [r["relevance_score"] for r in results] == pytest.approx(sorted(scores, reverse=True)[:2])
    assert results[0]["document"] == {"text": TEXTS[0]}


def test_texts_of_a_ranking_are_left_out_if_they_are_not_wanted(embedder: ServerProcess) -> None:
    body = {"query": TEXTS[0], "documents": TEXTS}
    assert {tuple(r) for r in post(embedder, "/rerank", {**body, "return_documents": False}).json()["results"]} == {
        ("index", "relevance_score")
    }
    for wish in ({"return_documents": True}, {"return_documents": None}, {}):
        assert all(r["document"]["text"] == TEXTS[r["index"]] for r in post(embedder, "/rerank", {**body, **wish}).json()["results"])
    assert post(embedder, "/rerank", {**body, "return_documents": "no"}).json()["error"]["param"] == "return_documents"


def test_errors_name_no_field_that_was_not_given(embedder: ServerProcess) -> None:
    reply = post(embedder, "/classify", {"input": "x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, None)
    assert "cannot do 'classify'" in reply.json()["error"]["message"]
    assert reply.json()["error"]["message"].startswith("tiny cannot do")
    reply = post(embedder, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert (reply.status_code, reply.json()["error"]["message"].partition(" runs for")[0]) == (400, "tiny")
    reply = post(embedder, "/pooling", {"input": "x", "task": "classify"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "task")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/pooling", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": "y"}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
def test_nothing_is_streamed(embedder: ServerProcess, path: str, body: dict[str, object]) -> None:
    reply = post(embedder, path, {**body, "stream": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")
    assert post(embedder, path, {**body, "stream": False}).status_code == 200


def test_fields_of_conversations_mean_nothing_beside_texts(embedder: ServerProcess) -> None:
    for extra in ({"documents": ["a"]}, {"documents": 5}, {"chat_template": {}}, {"add_generation_prompt": "x"}, {"zork": []}):
        for path in ("/v1/embeddings", "/pooling"):
            assert post(embedder, path, {"input": "x", **extra}).status_code == 200, extra


def test_a_model_for_pairs(ranker: ServerProcess) -> None:
    documents = [*TEXTS, {"text": "bread"}]
    results = post(ranker, "/rerank", {"query": "a man", "documents": documents}).json()["results"]
    assert sorted(r["index"] for r in results) == [0, 1, 2, 3]
    ranked = [r["relevance_score"] for r in results]
    assert ranked == sorted(ranked, reverse=True)
    assert len(set(ranked)) == 4
    scores = post(ranker, "/score", {"queries": "a man", "documents": [*TEXTS, "bread"]}).json()["data"]
    assert {r["index"]: r["relevance_score"] for r in results} == pytest.approx({s["index"]: s["score"] for s in scores})
    classes = post(ranker, "/classify", {"input": TEXTS}).json()["data"]
    assert all(c["num_classes"] == 1 and 0 < c["probs"][0] < 1 for c in classes)
    reply = post(ranker, "/v1/embeddings", {"input": "a"})
    assert reply.status_code == 400
    assert "cannot do 'embed'" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/pooling", {"input": "x"}),
        ("/classify", {"input": "x"}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
        ("/v2/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
def test_a_model_that_generates_says_how_to_pool(server: RunningServer, path: str, body: dict[str, object]) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400
    assert "--runner pooling" in reply.json()["error"]["message"]


def test_invocations(embedder: ServerProcess, ranker: ServerProcess) -> None:
    assert len(vectors(post(embedder, "/invocations", {"input": TEXTS}))) == 3
    assert post(embedder, "/invocations", {"query": TEXTS[0], "documents": TEXTS}).json()["results"]
    scored = post(ranker, "/invocations", {"text_1": TEXTS[0], "text_2": TEXTS[1]}).json()["data"]
    assert scored[0]["object"] == "score"
    assert post(embedder, "/invocations", {"prompt": "x"}).status_code == 400
