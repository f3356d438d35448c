"""One choice of a chat reply: its text turned into message fields, whole or as deltas."""

from __future__ import annotations

from collections.abc import Callable

from octavo.frontend.http.replies import Delta, FunctionCall, FunctionDelta, Message, ToolCall, ToolCallDelta
from octavo.frontend.http.reply_plan import ReplyPlan
from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.parsing.events import CallArguments, CallStart, Event, Reasoning, Text
from octavo.frontend.parsing.reply import ReplyParser, read_whole

CUT_SHORT = ("length", "abort")
"""Finish reasons of replies that would have gone on."""


def finish_reason(reason: str | None, plan: ReplyPlan, calls: int) -> str | None:
    """A reply that stopped after calls ends with "tool_calls", unless the one call was ordered by name: also after one that the model left
    broken. Clients look there for calls, and know that arguments which nothing holds to a schema may be no JSON."""
    return "tool_calls" if reason == "stop" and calls and not plan.named else reason


def whole_message(
    output: CompletionOutput, plan: ReplyPlan, role: str, echo: str, *, include_reasoning: bool
) -> tuple[Message, str | None, str]:
    """The message of a finished choice, its finish_reason, and its reasoning, whether or not the message shows it."""
    if plan.form.plain:
        return Message(role, echo + output.text), output.finish_reason, ""
    reply = read_whole(plan.form, output.text, cut_short=output.finish_reason in CUT_SHORT)
    text = echo + reply.text
    # Null only beside calls, as OpenAI has it: a client that reads the text of a reply without calls finds one, if it is an empty one. Streams
    # begin with an empty text too.
    message = Message(role, text if text or not reply.calls else None)
    if reply.reasoning and include_reasoning:
        message.reasoning = message.reasoning_content = reply.reasoning
    if reply.calls:
        message.tool_calls = [ToolCall(plan.new_call_id(), FunctionCall(call.name, call.arguments)) for call in reply.calls]
    return message, finish_reason(output.finish_reason, plan, len(reply.calls)), reply.reasoning


class ChoiceStream:
    """Turns the pieces of one choice into deltas."""

    def __init__(self, plan: ReplyPlan, *, include_reasoning: bool) -> None:
        self._plan = plan
        self._parser = None if plan.form.plain else ReplyParser(plan.form)
        self._include_reasoning = include_reasoning
        self._new_id: Callable[[], str] = plan.new_call_id
        self._calls = 0
        self._reasoning: list[str] = []

    def delta(self, output: CompletionOutput) -> tuple[Delta | None, str | None]:
        """The delta of a piece (None: there is nothing to show yet), and the finish_reason if it is the last."""
        if self._parser is None:
            return Delta(content=output.text), output.finish_reason
        events = self._parser.push(output.text)
        if output.finish_reason is not None:
            events += self._parser.finish(cut_short=output.finish_reason in CUT_SHORT)
        delta = self._of(events)
        return delta, finish_reason(output.finish_reason, self._plan, self._calls)

    @property
    def reasoning(self) -> str:
        """The reasoning so far, whether or not deltas show it."""
        return "".join(self._reasoning)

    def _of(self, events: list[Event]) -> Delta | None:
        text = "".join(event.text for event in events if isinstance(event, Text))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        if reasoning:
            self._reasoning.append(reasoning)
        if not self._include_reasoning:
            reasoning = ""
        calls: list[ToolCallDelta] = []
        for event in events:
            match event:
                case CallStart():
                    self._calls += 1
                    calls.append(ToolCallDelta(self._calls - 1, FunctionDelta(event.name, ""), self._new_id(), "function"))
                case CallArguments():
                    last = calls[-1] if calls else None
                    if last is not None and isinstance(last.function.arguments, str):
                        last.function.arguments += event.text
                    else:
                        calls.append(ToolCallDelta(self._calls - 1, FunctionDelta(arguments=event.text)))
        if not (text or reasoning or calls):
            return None
        delta = Delta()
        if text:
            delta.content = text
        if reasoning:
            delta.reasoning = delta.reasoning_content = reasoning
        if calls:
            delta.tool_calls = calls
        return delta
