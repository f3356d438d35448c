"""Agents: a framework that calls tools until it has its answer, with nothing changed but the base URL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http_server import RunningServer

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def script(server: RunningServer) -> None:
    """The model calls the tool when it is asked, and answers once it has read its result (the newest rule wins)."""
    server.fake.rules[1:] = []
    server.script("What is the weather", CALL)
    server.script("sunny in Paris", "It is sunny.")


async def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.mark.parametrize("stream", [False, True])
async def test_autogen(server: RunningServer, stream: bool) -> None:
    pytest.importorskip("autogen_agentchat")
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.messages import ToolCallExecutionEvent, ToolCallRequestEvent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    script(server)
    info: Any = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(model="tiny", base_url=f"{server.url}/v1", api_key="secret", model_info=info, max_retries=0)
    try:
        agent = AssistantAgent(
            "agent", client, tools=[weather], system_message="Use tools.", reflect_on_tool_use=True, model_client_stream=stream
        )
        result = await agent.run(task="What is the weather in Paris?")
    finally:
        await client.close()
    calls = [m.content[0] for m in result.messages if isinstance(m, ToolCallRequestEvent)]
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Paris"}')]
    results = [m.content[0] for m in result.messages if isinstance(m, ToolCallExecutionEvent)]
    assert [(r.content, r.is_error, r.call_id == calls[0].id) for r in results] == [("sunny in Paris", False, True)]
    assert result.messages[-1].to_text() == "It is sunny."


async def test_llama_index(server: RunningServer) -> None:
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.agent.workflow import FunctionAgent, ToolCall
    from llama_index.core.tools import FunctionTool

    script(server)
    settings: Any = {"model": "tiny", "api_base": f"{server.url}/v1", "api_key": "secret", "context_window": 512, "max_retries": 0}
    llm = openai_like.OpenAILike(**settings, is_chat_model=True, is_function_calling_model=True)
    tool = FunctionTool.from_defaults(async_fn=weather, name="weather")
    called = llm.get_tool_calls_from_response(await llm.achat_with_tools([tool], user_msg="What is the weather in Paris?"))
    assert [(call.tool_name, call.tool_kwargs) for call in called] == [("weather", {"city": "Paris"})]
    agent = FunctionAgent(tools=[tool], llm=llm, system_prompt="Use tools.")
    handler = agent.run("What is the weather in Paris?")
    seen = [event async for event in handler.stream_events() if type(event) is ToolCall]
    assert [(event.tool_name, event.tool_kwargs) for event in seen] == [("weather", {"city": "Paris"})]
    assert str(await handler) == "It is sunny."
