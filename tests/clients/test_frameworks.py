"""LangChain's ChatOpenAI and LlamaIndex's OpenAILike, as their users set them up."""

from __future__ import annotations

import pytest

from tests.support.http_server import RunningServer


async def test_langchain(server: RunningServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="secret", max_retries=0, stream_usage=True)
    reply = chat.invoke([("system", "be short"), ("human", "hi")])
    assert reply.content == "hello world"
    assert reply.usage_metadata["output_tokens"] == 3
    assert "".join(chunk.content for chunk in chat.stream("hi")) == "hello world"
    assert (await chat.ainvoke("hi")).content == "hello world"
    assert [r.content for r in chat.batch(["a", "b"])] == ["hello world"] * 2
    assert chat.invoke("hi", stop=[" w"]).content == "hello"
    llm = langchain_openai.OpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    assert llm.invoke("hi") == "hello world"


async def test_llama_index(server: RunningServer) -> None:
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage

    settings = {"model": "tiny", "api_base": f"{server.url}/v1", "api_key": "secret", "context_window": 512, "max_retries": 0}
    chat = openai_like.OpenAILike(**settings, is_chat_model=True)
    assert chat.chat([ChatMessage(role="user", content="hi")]).message.content == "hello world"
    assert [r.delta for r in chat.stream_chat([ChatMessage(role="user", content="hi")])][-1] is not None
    assert (await chat.acomplete("hi")).text == "hello world"
    text = openai_like.OpenAILike(**settings, is_chat_model=False)
    assert text.complete("hi").text == "hello world"
    assert list(text.stream_complete("hi"))[-1].text == "hello world"
