"""Embeddings as the frameworks ask for them: LangChain's OpenAIEmbeddings and LlamaIndex's OpenAILikeEmbedding, over a whole server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server_process import ServerProcess, server_process

TEXTS = ["a man is eating food", "the stock market fell"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    from tests.support.tiny_pooling import save_pooling, write_modules

    folder = tmp_path_factory.mktemp("embedder")
    save_pooling(folder, "BertModel")
    write_modules(folder, "mean_tokens", normalize=True, max_length=16)
    engine = {"model": str(folder), "device": "cpu", "threads": 1, "served_model_name": ["tiny"]}
    with server_process(tmp_path_factory.mktemp("log"), engine) as server:
        server.wait_ready(120)
        yield server


def expected(server: ServerProcess) -> list[list[float]]:
    reply = server.http.post("/v1/embeddings", json={"input": TEXTS})
    return [item["embedding"] for item in reply.json()["data"]]


async def test_langchain(embedder: ServerProcess) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    # Without the check, texts are sent; with it, ids of OpenAI's own tokenizer, which no other model has.
    made = langchain_openai.OpenAIEmbeddings(
        model="tiny", base_url=f"{embedder.url}/v1", api_key="x", max_retries=0, check_embedding_ctx_length=False
    )
    vectors = made.embed_documents(TEXTS)
    for vector, right in zip(vectors, expected(embedder), strict=True):
        assert vector == pytest.approx(right, abs=1e-5)
    assert made.embed_query(TEXTS[0]) == pytest.approx(vectors[0], abs=1e-5)
    assert await made.aembed_query(TEXTS[1]) == pytest.approx(vectors[1], abs=1e-5)


async def test_llama_index(embedder: ServerProcess) -> None:
    like = pytest.importorskip("llama_index.embeddings.openai_like")
    made = like.OpenAILikeEmbedding(model_name="tiny", api_base=f"{embedder.url}/v1", api_key="x", max_retries=0, embed_batch_size=2)
    for vector, right in zip(made.get_text_embedding_batch(TEXTS), expected(embedder), strict=True):
        assert vector == pytest.approx(right, abs=1e-5)
    assert await made.aget_query_embedding(TEXTS[0]) == pytest.approx(expected(embedder)[0], abs=1e-5)
