"""Reasoning as each client finds it: under the name that it reads, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running_server
from tests.support.tiny_checkpoint import write_tiny_checkpoint

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = write_tiny_checkpoint(tmp_path_factory.mktemp("thinker"))
    with running_server(folder, ServerSettings(api_key=["secret"], reasoning_parser="qwen3")) as server:
        server.script("", "<think>why</think>yes")
        yield server


def test_openai(thinker: RunningServer) -> None:
    import openai

    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="secret", max_retries=0) as client:
        message = client.chat.completions.create(model="tiny", messages=HI).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(model="tiny", messages=HI, stream=True)]
    for name in ("reasoning", "reasoning_content"):
        assert (message.model_extra or {})[name] == "why"
        assert "".join((delta.model_extra or {}).get(name) or "" for delta in deltas) == "why"
    assert message.content == "".join(delta.content or "" for delta in deltas) == "yes"


async def test_autogen(thinker: RunningServer) -> None:
    pytest.importorskip("autogen_ext.models.openai")
    from autogen_core.models import CreateResult, UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "r1"}
    client = OpenAIChatCompletionClient(model="tiny", base_url=f"{thinker.url}/v1", api_key="secret", model_info=info, max_retries=0)
    try:
        asked = [UserMessage(content="hi", source="user")]
        whole = await client.create(asked)
        streamed = [part async for part in client.create_stream(asked)][-1]
    finally:
        await client.close()
    assert (whole.thought, whole.content) == ("why", "yes")
    assert isinstance(streamed, CreateResult)
    assert (streamed.thought, streamed.content) == ("why", "yes")


def test_llama_index(thinker: RunningServer) -> None:
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.base.llms.types import ChatMessage, ThinkingBlock

    settings: Any = {"model": "tiny", "api_base": f"{thinker.url}/v1", "api_key": "secret", "context_window": 512, "max_retries": 0}
    chat = openai_like.OpenAILike(**settings, is_chat_model=True)
    for reply in (chat.chat([ChatMessage(content="hi")]), [*chat.stream_chat([ChatMessage(content="hi")])][-1]):
        assert [block.content for block in reply.message.blocks if isinstance(block, ThinkingBlock)] == ["why"]
        assert reply.message.content == "yes"


def test_litellm(thinker: RunningServer) -> None:
    litellm = pytest.importorskip("litellm")
    common: Any = {"model": "openai/tiny", "api_base": f"{thinker.url}/v1", "api_key": "secret", "max_retries": 0, "messages": HI}
    message = litellm.completion(**common).choices[0].message
    assert (message.reasoning_content, message.content) == ("why", "yes")
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**common, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "why"
