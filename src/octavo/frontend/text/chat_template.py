"""Chat templates: from messages to the text of a prompt, as the model was trained to read it.

Owns the choice of template (by name, by presence of tools, or given in the request), the shape in which contents reach it, and
the translation of everything that can go wrong into an `InvalidRequest`. No template is ever assumed: a model without one
says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jinja2

from octavo.errors import InvalidRequest
from octavo.frontend.characters import whole_characters
from octavo.frontend.parsing.formats import GENERIC, CallSyntax
from octavo.frontend.text.generic_tools import described, has_calls, written_out
from octavo.frontend.text.messages import ContentFormat, normalize_messages, plain_data
from octavo.frontend.text.template_inspection import content_format, knows_tools, reads_arguments_as_text
from octavo.frontend.text.template_sandbox import TemplateRefusal, TemplateTooExpensive, TemplateTooLarge, compile_template, render

DEFAULT = "default"
TOOL_USE = "tool_use"
MAX_TEMPLATE_CHARS = 1 << 20
MAX_SHOWN = 100
"""Characters of a template that an error quotes."""
MAX_SAID = 500
"""Characters of what a template says of messages that it does not take."""
TOO_LARGE = "rendered_prompt_too_large"
"""Code of the error about a template that built more text than it may."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
_CONTINUE = "\u2063OCTAVO-CONTINUES-HERE\u2063 "
"""Appended to the message to be continued, so that its end can be found in the rendered text."""


@dataclass(frozen=True)
class ChatTemplates:
    """The chat templates of one model."""

    named: Mapping[str, str]
    """Template sources by name. The usual one is "default"; "tool_use", if there is one, serves requests with tools."""
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    """bos_token, eos_token, ...: variables for the template."""
    content_format: Literal["auto", "string", "openai"] = "auto"
    default_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template that a request may override (--default-chat-template-kwargs)."""

    @property
    def default(self) -> str | None:
        return self.named.get(DEFAULT)

    def select(self, requested: str | None, has_tools: bool) -> str:
        """The source of the template to use.

        Args:
            requested: the name of one of the model's templates, or a template itself.

        Raises:
            InvalidRequest: the model has none, or none that is called so.
        """
        if requested is not None:
            if not isinstance(requested, str):
                raise InvalidRequest(f"chat_template must be a string, got {type(requested).__name__}.", param="chat_template")
            if requested in self.named:
                return self.named[requested]
            if "{" not in requested:
                names = ", ".join(sorted(self.named)) or "none"
                shown = requested if len(requested) <= MAX_SHOWN else requested[: MAX_SHOWN - 1] + "…"
                raise InvalidRequest(f"chat_template {shown!r} is no template, and no name of one (known: {names}).", param="chat_template")
            return requested
        if has_tools and TOOL_USE in self.named:
            return self.named[TOOL_USE]
        if DEFAULT in self.named:
            return self.named[DEFAULT]
        if len(self.named) == 1:
            return next(iter(self.named.values()))
        raise InvalidRequest(
            "This model has no chat template, so it cannot chat. Start with --chat-template FILE, or use plain prompts (/v1/completions).",
            param="messages",
            code="chat_template_missing",
        )

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        call_syntax: CallSyntax | None = GENERIC.syntax,
        hide_tools: bool = False,
    ) -> str:
        """Render a conversation. Tools that the template does not know are described in the system message (see `generic_tools`).

        Args:
            messages: dicts (or pydantic models) with role and content.
            tools: JSON-schema function descriptions, handed to the template.
            add_generation_prompt: end with what starts the assistant's turn.
            continue_final_message: end inside the last message, for the model to go on with it.
            chat_template: a template (or the name of one) instead of the model's.
            template_kwargs: more variables for the template.
            call_syntax: how calls are to be written, where the template does not know tools. None: nobody reads them, so that the model
                is told nothing.
            hide_tools: show no tools. (A template that knows tools decides for itself what it shows.)

        Raises:
            InvalidRequest: messages that cannot be served, or a template that fails or refuses them.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: set one of them to false.",
                param="continue_final_message",
            )
        source = self.select(chat_template, bool(tools))
        param = "messages" if chat_template is None else "chat_template"
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequest(f"chat_template is longer than {MAX_TEMPLATE_CHARS} characters.", param="chat_template")
        extra = plain_data({**self.default_kwargs, **(template_kwargs or {})}, "chat_template_kwargs")
        if taken := sorted(_RESERVED & extra.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(taken)}.", param="chat_template_kwargs")
        try:
            template, shape, arguments_as_text = compile_template(source), self._content_format(source), reads_arguments_as_text(source)
        except jinja2.TemplateSyntaxError as e:
            raise InvalidRequest(f"The chat template is not valid: {e.message} (line {e.lineno}).", param=param) from None
        except RecursionError:
            raise InvalidRequest("The chat template is nested too deep.", param=param) from None
        if hide_tools and not knows_tools(source):
            tools = None
        prepared = normalize_messages(messages, shape, developer_as_system="developer" not in source, arguments_as_text=arguments_as_text)
        variables = {
            **self.special_tokens,
            "tools": plain_data(tools, "tools") if tools else None,
            "documents": plain_data(documents, "documents") if documents else None,
            "add_generation_prompt": add_generation_prompt,
            **extra,
        }

        def rendered(conversation: list[dict[str, Any]]) -> str:
            if not continue_final_message:
                return _render(template, {**variables, "messages": conversation}, param)
            conversation = [*conversation[:-1], dict(conversation[-1])]
            _mark_end(conversation[-1])
            return _cut_at_mark(_render(template, {**variables, "messages": conversation}, param))

        if call_syntax is None or knows_tools(source):
            return rendered(prepared)
        if has_calls(prepared) and "tool_calls" not in source:
            prepared = written_out(prepared, call_syntax)
        if not tools:
            return rendered(prepared)
        try:
            return rendered(described(prepared, variables["tools"], call_syntax, in_system=True))
        except InvalidRequest:  # some templates take no system message
            return rendered(described(prepared, variables["tools"], call_syntax, in_system=False))

    def _content_format(self, source: str) -> ContentFormat:
        return content_format(source) if self.content_format == "auto" else self.content_format


def _render(template: jinja2.Template, variables: Mapping[str, Any], param: str) -> str:
    try:
        return whole_characters(render(template, variables))
    except TemplateRefusal as e:
        raise InvalidRequest(f"The chat template refuses these messages: {_short(e.message)}", param=param) from None
    except TemplateTooExpensive as e:
        code = TOO_LARGE if isinstance(e, TemplateTooLarge) else None
        raise InvalidRequest(f"The chat template was stopped: {e.message}.", param=param, code=code) from None
    except Exception as e:  # a template is code: anything can come out of it, and none of it is the server's fault
        raise InvalidRequest(f"The chat template failed on these messages: {_short(e) or type(e).__name__}", param=param) from None


def _short(said: object) -> str:
    """What a template says may be as long as the conversation."""
    text = " ".join(str(said)[: 4 * MAX_SAID].split())
    return text if len(text) <= MAX_SAID else f"{text[: MAX_SAID - 1]}…"


def _mark_end(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, list) and content:
        message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE}]
    elif isinstance(content, str) and content:
        message["content"] = content + _CONTINUE
    else:
        raise InvalidRequest("continue_final_message needs a last message with content to continue.", param="continue_final_message")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise InvalidRequest(
            "continue_final_message cannot be used: the chat template changes or drops the last message.", param="continue_final_message"
        )
    # A template that trimmed the mark's own last space trims messages: then the message has no trailing space either.
    return text[:at] if text[at:].startswith(_CONTINUE) else text[:at].rstrip()
