"""Builds replies of /v1/completions: in one piece, or as chunks. Owns echo, its logprobs, and text offsets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from msgspec import UNSET

from octavo.frontend.http.generation import Generation, UsageCounter
from octavo.frontend.http.logprobs import CompletionScores, TokenNames, joined, prompt_logprobs
from octavo.frontend.http.prompts import EncodedPrompt
from octavo.frontend.http.replies import Completion, CompletionChoice, PromptProgress
from octavo.frontend.http.sse import event
from octavo.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput


@dataclass(frozen=True)
class CompletionOptions:
    """What one request wants its reply to look like."""

    id: str
    created: int
    model: str
    fingerprint: str
    n: int
    prompts: tuple[EncodedPrompt, ...]
    echo_texts: tuple[str, ...] | None
    """The prompts as text, with `echo`."""
    prompt_only: bool
    """`echo` with max_tokens 0: score the prompt; the one token that the engine makes on the way is not part of the reply."""
    logprobs: bool
    skip_special_tokens: bool
    names: TokenNames
    prompt_logprobs: bool
    """The extension of that name was asked for."""
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    usage_details: bool


class _Choice:
    """What has been sent of one choice."""

    def __init__(self, scores: CompletionScores) -> None:
        self.begun = False
        self.scores = scores


class CompletionWriter:
    """One reply. `whole` or `stream`, once."""

    def __init__(self, options: CompletionOptions) -> None:
        self._o = options
        self._usage = UsageCounter(details=options.usage_details)
        self._choices = [
            _Choice(CompletionScores(options.names, prompt, skip_special_tokens=options.skip_special_tokens))
            for prompt in options.prompts
            for _ in range(options.n)
        ]
        self._prompt_rows: dict[int, list[PositionLogprobs | None] | None] = {}

    async def whole(self, generation: Generation) -> Completion:
        """The reply in one piece: every output of the generation is a finished one."""
        choices: dict[int, CompletionChoice] = {}
        async for number, output in generation.results():
            for choice in self._choices_of(number, output):
                choices[choice.index] = choice
        return self._reply([choices[index] for index in sorted(choices)])

    def without_engine(self) -> Completion:
        """The reply of a request that only wants its prompts back, unscored."""
        self._usage.prompt_tokens = sum(len(p.token_ids) for p in self._o.prompts)
        return self._reply([choice for number in range(len(self._o.prompts)) for choice in self._prompt_only_choices(number)])

    def _reply(self, choices: list[CompletionChoice]) -> Completion:
        o = self._o
        return Completion(o.id, o.created, o.model, choices, usage=self._usage.usage(), system_fingerprint=o.fingerprint)

    async def stream_without_engine(self) -> AsyncIterator[bytes]:
        """`without_engine` as chunks."""
        o = self._o
        reply = self.without_engine()
        for choice in reply.choices:
            last = choice is reply.choices[-1] and not o.include_usage
            yield event(Completion(o.id, o.created, o.model, [choice], system_fingerprint=o.fingerprint if last else UNSET))
        if o.include_usage:
            yield self._totals()

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        o = self._o
        left = len(self._choices)
        async for number, output in generation.results():
            if output.prompt_progress is not None:
                chunk = Completion(o.id, o.created, o.model, [CompletionChoice(number * o.n, "")])
                chunk.prompt_progress = PromptProgress.of(output.prompt_progress)
                yield event(chunk)
            for choice in self._choices_of(number, output):
                left -= choice.finish_reason is not None
                chunk = Completion(o.id, o.created, o.model, [choice])
                if o.continuous_usage:
                    chunk.usage = self._usage.usage()
                if left == 0 and not o.include_usage:
                    chunk.system_fingerprint = o.fingerprint
                yield event(chunk)
        if o.include_usage:
            yield self._totals()

    def _totals(self) -> bytes:
        return event(self._reply([]))

    def _choices_of(self, number: int, output: RequestOutput) -> list[CompletionChoice]:
        """The news in one output of the engine, as choices of the reply."""
        o = self._o
        if number not in self._prompt_rows:
            self._prompt_rows[number] = output.prompt_logprobs
        if o.prompt_only:
            self._usage.add(number, output, prompt_only=True)
            return self._prompt_only_choices(number) if output.finished else []
        self._usage.add(number, output)
        return [self._choice(number, c) for c in output.outputs if c.token_ids or c.text or c.finish_reason is not None]

    def _choice(self, number: int, output: CompletionOutput) -> CompletionChoice:
        o = self._o
        index = number * o.n + output.index
        state = self._choices[index]
        choice = CompletionChoice(index, output.text, finish_reason=output.finish_reason)
        begins, state.begun = not state.begun, True
        if begins:
            self._begin(choice, number)
        if o.logprobs:
            pieces = [state.scores.prompt(self._prompt_rows.get(number))] if begins and o.echo_texts is not None else []
            pieces.append(state.scores.outputs(output.token_ids, output.logprobs or ()))
            choice.logprobs = joined(pieces)
        if o.return_token_ids:
            choice.token_ids = list(output.token_ids)
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        return choice

    def _begin(self, choice: CompletionChoice, number: int) -> None:
        """What only the first piece of a choice has."""
        o = self._o
        if o.echo_texts is not None:
            choice.text = o.echo_texts[number] + choice.text
        if o.return_token_ids:
            choice.prompt_token_ids = o.prompts[number].token_ids
        if o.prompt_logprobs:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_rows.get(number))

    def _prompt_only_choices(self, number: int) -> list[CompletionChoice]:
        """The prompt itself as the text of every choice, scored when logprobs were asked for."""
        o = self._o
        choices = []
        for i in range(o.n):
            choice = CompletionChoice(number * o.n + i, "", finish_reason="length", stop_reason=None)
            self._begin(choice, number)
            if o.logprobs:
                choice.logprobs = self._choices[choice.index].scores.prompt(self._prompt_rows.get(number))
            if o.return_token_ids:
                choice.token_ids = []
            choices.append(choice)
        return choices
