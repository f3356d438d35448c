"""Builds replies of /v1/chat/completions: in one piece, or as chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from msgspec import UNSET

from octavo.frontend.http.chat_choice import ChoiceStream, whole_message
from octavo.frontend.http.generation import Generation, UsageCounter
from octavo.frontend.http.limits import LARGE, off_loop
from octavo.frontend.http.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from octavo.frontend.http.older_tools import older_delta, older_finish, older_message
from octavo.frontend.http.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    PromptLogprobs,
    PromptProgress,
    Usage,
)
from octavo.frontend.http.reply_plan import ReplyPlan
from octavo.frontend.http.sse import event
from octavo.frontend.outputs import CompletionOutput, RequestOutput


@dataclass(frozen=True)
class ChatOptions:
    """What one request wants its reply to look like."""

    id: str
    created: int
    model: str
    fingerprint: str
    n: int
    role: str
    echo_text: str
    """With `echo`: the last message, when it is the one being continued or has the replying role."""
    prompt_text: str
    prompt_token_ids: list[int]
    top_logprobs: int | None
    """None: no logprobs."""
    names: TokenNames
    prompt_logprobs: bool
    return_token_ids: bool
    return_prompt_text: bool
    include_usage: bool
    continuous_usage: bool
    usage_details: bool
    plan: ReplyPlan
    include_reasoning: bool
    older_calls: bool = False
    """Calls are told as `function_call`, as clients that send `functions` expect."""


class ChatWriter:
    """One reply. `whole` or `stream`, once."""

    def __init__(self, options: ChatOptions) -> None:
        self._o = options
        self._usage = UsageCounter(details=options.usage_details)
        self._streams = [ChoiceStream(options.plan, include_reasoning=options.include_reasoning) for _ in range(options.n)]

    async def whole(self, generation: Generation) -> ChatCompletion:
        """The reply in one piece: every output of the generation is a finished one."""
        o = self._o
        choices: dict[int, ChatChoice] = {}
        scores: PromptLogprobs | None = None
        reasonings: list[str] = []
        async for number, output in generation.results():
            self._usage.add(number, output)
            scores = prompt_logprobs(output.prompt_logprobs)
            for c in output.outputs:
                message, finish, reasoning = whole_message(c, o.plan, o.role, o.echo_text, include_reasoning=o.include_reasoning)
                reasonings.append(reasoning)
                if o.older_calls:
                    older_message(message)
                    finish = older_finish(finish)
                choice = ChatChoice(c.index, message, self._logprobs(c), finish, c.stop_reason)
                if o.return_token_ids:
                    choice.token_ids = list(c.token_ids)
                choices[c.index] = choice
        await self._count_reasoning(reasonings)
        return ChatCompletion(
            o.id,
            o.created,
            o.model,
            [choices[index] for index in sorted(choices)],
            self._usage.usage(),
            system_fingerprint=o.fingerprint,
            prompt_logprobs=scores if o.prompt_logprobs else UNSET,
            prompt_token_ids=o.prompt_token_ids if o.return_token_ids else UNSET,
            prompt_text=o.prompt_text if o.return_prompt_text else UNSET,
        )

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The reply as events."""
        async for chunk in self.chunks(generation):
            yield event(chunk)

    def usage(self) -> Usage:
        """The tokens counted so far."""
        return self._usage.usage()

    async def chunks(self, generation: Generation) -> AsyncIterator[ChatChunk]:
        """First the role of every choice, then what is new, then the totals if asked for."""
        o = self._o
        left, begun = o.n, False
        async for number, output in generation.results():
            self._usage.add(number, output)
            if not begun:
                begun = True
                for chunk in self._opening():
                    yield chunk
            if output.prompt_progress is not None:
                chunk = self._chunk(ChatChunkChoice(0, Delta()))
                chunk.prompt_progress = PromptProgress.of(output.prompt_progress)
                yield chunk
            for choice in self._news(output):
                left -= choice.finish_reason is not None
                chunk = self._chunk(choice)
                if left == 0 and not o.include_usage:
                    chunk.system_fingerprint = o.fingerprint
                yield chunk
        await self._count_reasoning([stream.reasoning for stream in self._streams])
        if o.include_usage:
            yield ChatChunk(o.id, o.created, o.model, [], usage=self._usage.usage(), system_fingerprint=o.fingerprint)

    async def _count_reasoning(self, texts: list[str]) -> None:
        """Count its tokens by its text, which is the same for streams and whole replies and for every way of marking it. The markers
        around it are not counted."""
        tokenizer = self._o.names.tokenizer
        if self._o.plan.form.reasoning is None or tokenizer is None:
            return

        def count() -> int:
            return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts if text)

        self._usage.reasoning_tokens = await off_loop(sum(map(len, texts)) > LARGE, count)

    def _opening(self) -> list[ChatChunk]:
        o = self._o
        chunks = [self._chunk(ChatChunkChoice(i, Delta(o.role, ""))) for i in range(o.n)]
        if o.return_token_ids:
            chunks[0].prompt_token_ids = o.prompt_token_ids
        if o.echo_text:
            chunks += [self._chunk(ChatChunkChoice(i, Delta(content=o.echo_text))) for i in range(o.n)]
        return chunks

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        chunk = ChatChunk(self._o.id, self._o.created, self._o.model, [choice])
        if self._o.continuous_usage:
            chunk.usage = self._usage.usage()
        return chunk

    def _news(self, output: RequestOutput) -> list[ChatChunkChoice]:
        choices = []
        for c in output.outputs:
            if not (c.token_ids or c.text or c.finish_reason is not None):
                continue
            delta, finish = self._streams[c.index].delta(c)
            if self._o.older_calls:
                finish = older_finish(finish)
                if delta is not None:
                    older_delta(delta)
            choice = ChatChunkChoice(c.index, delta or Delta(), self._logprobs(c), finish)
            if c.finish_reason is not None:
                choice.stop_reason = c.stop_reason
            elif delta is None and choice.logprobs is None and not self._o.return_token_ids and not self._o.continuous_usage:
                continue  # held back until it is known what it is
            if self._o.return_token_ids:
                choice.token_ids = list(c.token_ids)
            choices.append(choice)
        return choices

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if self._o.top_logprobs is None or output.logprobs is None:
            return None
        return chat_logprobs(self._o.names, output.token_ids, output.logprobs, self._o.top_logprobs)
