"""A conversation and everything that decides how it is written, as plain data: it is rendered here, or in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.parsing.formats import tool_format
from octavo.frontend.text.chat_template import ChatTemplates


@dataclass(frozen=True)
class Conversation:
    """What a request wants rendered. JSON values throughout."""

    messages: list[Any]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """A template (or the name of one of the model's) instead of the usual one."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None
    """How the model is said to write calls; None: its template tells."""
    hide_tools: bool = False
    """Show no tools, unless the template itself decides what it shows."""


def rendered(templates: ChatTemplates, conversation: Conversation) -> str:
    """The text of a conversation.

    Raises:
        InvalidRequest: see `ChatTemplates.render`.
    """
    form = tool_format(conversation.tool_parser, templates.select(conversation.chat_template, bool(conversation.tools)))
    return templates.render(
        conversation.messages,
        tools=conversation.tools,
        documents=conversation.documents,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        chat_template=conversation.chat_template,
        template_kwargs=conversation.template_kwargs,
        call_syntax=form.syntax if form is not None else None,
        hide_tools=conversation.hide_tools,
    )
