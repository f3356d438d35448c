"""Where the text of `octavo chat` and `octavo complete` comes from: a server, or a model loaded for this command.

Both stream. `Backends` live in an event loop on a thread of its own, so that the terminal may block in the main thread and
Ctrl-C ends one answer rather than the program.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from octavo.cli.http_client import HttpClient, HttpError, error_text
from octavo.cli.parser import Namespace
from octavo.cli.progress import LoadingProgress

T = TypeVar("T")
Message = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """The next part of an answer. The last one has a finish reason."""

    text: str
    finish_reason: str | None = None
    tokens: int = 0
    """Tokens so far, when known."""


class Backend(Protocol):
    """A model that answers."""

    @property
    def name(self) -> str: ...

    def chat(self, messages: list[Message], sampling: dict[str, Any]) -> AsyncIterator[Piece]:
        """Stream the assistant's next message."""

    def complete(self, prompt: str, sampling: dict[str, Any]) -> AsyncIterator[Piece]:
        """Stream the continuation of a text."""

    async def close(self) -> None: ...


class RemoteBackend:
    """An OpenAI-compatible server."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self._client = client
        self._model = model

    @property
    def name(self) -> str:
        return f"{self._model} at {self._client.base_url}"

    @classmethod
    async def connect(cls, url: str, *, api_key: str | None, model: str | None) -> RemoteBackend:
        """Raises HttpError when nobody answers there."""
        client = HttpClient(url, api_key=api_key)
        return cls(client, model or await client.model_name())

    async def chat(self, messages: list[Message], sampling: dict[str, Any]) -> AsyncIterator[Piece]:
        async for piece in self._stream("/v1/chat/completions", {"messages": messages, **sampling}):
            yield piece

    async def complete(self, prompt: str, sampling: dict[str, Any]) -> AsyncIterator[Piece]:
        async for piece in self._stream("/v1/completions", {"prompt": prompt, **sampling}):
            yield piece

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Piece]:
        body |= {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        tokens = 0
        async for payload in self._client.stream(path, body):
            event = json.loads(payload)
            if "error" in event:
                raise HttpError(f"{self._client.base_url}: {error_text(event)}")
            if event.get("usage"):
                tokens = event["usage"].get("completion_tokens", 0)
            for choice in event.get("choices", ()):
                text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if text or choice.get("finish_reason"):
                    yield Piece(text, choice.get("finish_reason"))
        yield Piece("", None, tokens)

    async def close(self) -> None:
        await self._client.close()


class LocalBackend:
    """A model loaded for this command."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @property
    def name(self) -> str:
        return str(self._llm.checkpoint.name)

    @classmethod
    async def load(cls, args: Any) -> LocalBackend:
        """Start an engine for these settings. Raises OctavoError when it cannot."""
        from octavo.frontend.async_llm import AsyncLLM

        with LoadingProgress() as progress:
            return cls(await AsyncLLM.start(args, progress=progress))

    async def chat(self, messages: list[Message], sampling: dict[str, Any]) -> AsyncIterator[Piece]:
        tokenizer = self._llm.tokenizer
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        async for piece in self._stream({"prompt_token_ids": tokenizer.encode_chat(text)}, sampling):
            yield piece

    async def complete(self, prompt: str, sampling: dict[str, Any]) -> AsyncIterator[Piece]:
        async for piece in self._stream(prompt, sampling):
            yield piece

    async def _stream(self, prompt: Any, sampling: dict[str, Any]) -> AsyncIterator[Piece]:
        from octavo.protocol.params import RequestOutputKind, SamplingParams

        params = SamplingParams(**{"max_tokens": None, **self._llm.default_sampling_params, **sampling})
        params.output_kind = RequestOutputKind.DELTA
        tokens = 0
        async for output in self._llm.generate(prompt, params, f"cli-{uuid.uuid4().hex}"):
            completion = output.outputs[0]
            tokens += len(completion.token_ids)
            yield Piece(completion.text, completion.finish_reason, tokens)

    async def close(self) -> None:
        await self._llm.shutdown()


class Loop:
    """An event loop on its own thread, for a program that blocks in the main one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="octavo-cli", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def iterate(self, stream: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """The items of an asynchronous iterator. Leaving early, or Ctrl-C, closes it."""
        items = stream()
        turn = asyncio.Lock()  # a cancelled step needs a moment to end; closing before that is an error

        async def step() -> tuple[bool, T | None]:
            async with turn:
                try:
                    return True, await anext(items)
                except StopAsyncIteration:
                    return False, None

        async def close() -> None:
            async with turn:
                if hasattr(items, "aclose"):
                    await items.aclose()

        try:
            while (got := self.run(step()))[0]:
                yield got[1]  # type: ignore[misc]
        finally:
            self.run(close())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def open_backend(loop: Loop, options: Namespace) -> Backend:
    """The backend that the flags ask for: `--url`, else the model.

    Raises:
        OctavoError: no server there, or the model cannot be loaded.
    """
    from octavo.cli.sampling import api_key

    if url := getattr(options, "url", None):
        model = getattr(options, "model_argument", None) or getattr(options, "model", None)
        return loop.run(RemoteBackend.connect(url, api_key=api_key(options), model=model))
    from octavo.cli.flags import engine_args

    return loop.run(LocalBackend.load(engine_args(options)))
