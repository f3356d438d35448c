"""LangChain's ChatOpenAI and LlamaIndex's OpenAILike, as their users set them up."""

from __future__ import annotations

import pydantic
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


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


def test_langchain_tools_and_structured_output(server: RunningServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.tools import tool

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    chat = langchain_openai.ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    server.script("weather?", CALL)
    server.script("person?", '{"name": "Ann", "age": 30}')
    reply = chat.bind_tools([weather]).invoke("weather?")
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("weather", {"city": "Paris"})]
    assert weather.invoke(reply.tool_calls[0]).content == "sunny in Paris"
    merged = None
    for chunk in chat.bind_tools([weather], tool_choice="any").stream("weather?"):
        merged = chunk if merged is None else merged + chunk
    assert [call["args"] for call in merged.tool_calls] == [{"city": "Paris"}]
    assert chat.with_structured_output(Person, method="json_schema").invoke("person?") == Person(name="Ann", age=30)
    server.script("function?", '<tool_call>{"name": "Person", "arguments": {"name": "Bo", "age": 3}}</tool_call>')
    assert chat.with_structured_output(Person, method="function_calling").invoke("function?") == Person(name="Bo", age=3)
    assert chat.with_structured_output(Person, method="json_mode").invoke("person?") == Person(name="Ann", age=30)


def test_instructor(server: RunningServer) -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    server.script("person?", '{"name": "Ann", "age": 30}')
    server.script("function?", '<tool_call>{"name": "Person", "arguments": {"name": "Bo", "age": 3}}</tool_call>')
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as plain:
        for mode, prompt, name in ((instructor.Mode.JSON_SCHEMA, "person?", "Ann"), (instructor.Mode.TOOLS, "function?", "Bo")):
            client = instructor.from_openai(plain, mode=mode)
            person = client.chat.completions.create(
                model="tiny", response_model=Person, messages=[{"role": "user", "content": prompt}], max_retries=0
            )
            assert person.name == name


async def test_litellm(server: RunningServer) -> None:
    litellm = pytest.importorskip("litellm")
    common = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "secret", "max_retries": 0}
    server.script("weather?", CALL)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    reply = litellm.completion(messages=[{"role": "user", "content": "weather?"}], tools=tools, **common)
    assert reply.choices[0].message.tool_calls[0].function.name == "weather"
    stream = await litellm.acompletion(messages=[{"role": "user", "content": "hi"}], stream=True, **common)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello world"
