"""From chat messages to a prompt: checks what a request may ask of the template, renders it, and turns it into token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest, OctavoError
from octavo.frontend.http.errors import clip, short_repr
from octavo.frontend.http.limits import check_count, is_large, off_loop
from octavo.frontend.http.prompts import EncodedPrompt, Truncation, check_length, check_tokenizable, encode_text
from octavo.frontend.http.schemas import ChatRequest, TokenizeRequest
from octavo.frontend.parsing.formats import tool_format
from octavo.frontend.text.chat_template import TOO_LARGE
from octavo.frontend.text.conversation_text import Conversation, rendered
from octavo.frontend.text.template_inspection import check_template, knows_tools
from octavo.frontend.text.template_sandbox import MAX_CHARS

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.http.context import ServerContext
    from octavo.frontend.http.settings import ServerSettings
    from octavo.frontend.text.chat_template import ChatTemplates

logger = logging.getLogger("octavo.server")

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"})
"""Names in chat_template_kwargs that are fields of the request itself."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


async def render(
    ctx: ServerContext, client: str, body: ChatRequest | TokenizeRequest, truncation: Truncation | None = None
) -> EncodedPrompt:
    """The conversation of `body` as text and token ids.

    Args:
        client: who asks; see `context.client_key`.
        truncation: how the ids will be cut (the text never is). Without one they must fit into the context, if a reply is to follow.

    Raises:
        InvalidRequest: the messages, or what the template says of them.
    """
    llm, settings = ctx.llm, ctx.settings
    generation_prompt = True if body.add_generation_prompt is None else body.add_generation_prompt
    if body.continue_final_message and generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true: set add_generation_prompt to false.",
            param="continue_final_message",
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if clash := sorted(RESERVED & kwargs.keys() - {"chat_template"}):
        raise InvalidRequest(
            f"chat_template_kwargs must not hold {', '.join(clash)}: use the request's own field.", param="chat_template_kwargs"
        )
    template = body.chat_template or kwargs.pop("chat_template", None)
    if template is not None and not settings.trust_request_chat_template:
        raise InvalidRequest(
            "This server does not use chat templates from requests; it can be started with --trust-request-chat-template.",
            param="chat_template",
        )
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        if body.reasoning_effort not in EFFORTS:
            raise InvalidRequest(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {short_repr(body.reasoning_effort)}.", param="reasoning_effort"
            )
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            # What templates call it.
            kwargs.setdefault("enable_thinking", False)
            kwargs.setdefault("thinking", False)
    if not body.messages:
        raise InvalidRequest("messages must not be empty.", param="messages")
    must_fit = isinstance(body, ChatRequest) and truncation is None
    check_count("messages", body.messages, "messages")
    conversation = Conversation(
        messages=body.messages,
        tools=body.tools,
        documents=body.documents,
        add_generation_prompt=generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template=template,
        template_kwargs=kwargs,
        tool_parser=settings.tool_call_parser,
        hide_tools=isinstance(body, ChatRequest) and body.tool_choice == "none",
    )
    try:
        text = await _text(ctx, client, conversation)
    except InvalidRequest as error:
        # A template may leave out what it is given (reasoning of earlier turns), so that only what it could not build is measured.
        if error.code == TOO_LARGE:
            _check_size(llm, body, must_fit=must_fit)
        raise
    except OctavoError:
        raise
    except Exception as e:
        # A template is a program of the model's author: whatever it trips over is something in these messages.
        raise InvalidRequest(
            f"The chat template cannot render these messages: {type(e).__name__}: {clip(str(e), 300)}", param="messages"
        ) from e
    # A rendered template writes its own special tokens: none are added unless asked, and BOS never twice.
    if isinstance(body, TokenizeRequest):
        check_tokenizable(llm, text, "messages")
    special = bool(body.add_special_tokens)
    ids = await encode_text(llm, text, add_special_tokens=special, must_fit=must_fit, truncation=truncation, param="messages")
    if not ids:
        raise InvalidRequest("These messages render to an empty prompt.", param="messages")
    return EncodedPrompt(ids, text)


def _check_size(llm: AsyncLLM, body: ChatRequest | TokenizeRequest, *, must_fit: bool) -> None:
    """Raises InvalidRequest when the conversation by itself is more than can be rendered: the template is not to blame then."""
    characters = _characters([body.messages, body.tools, body.documents])
    if must_fit:
        check_length(llm, characters, "messages")
    if characters > MAX_CHARS // 2:  # a template may well hold the prompt twice while it builds it
        raise InvalidRequest(
            f"The messages have {characters} characters. That is more than a chat can be rendered from here ({MAX_CHARS} characters, "
            "with all that the chat template adds): send less.",
            param="messages",
            code="context_length_exceeded",
        )


def _characters(value: Any) -> int:
    """The characters of all texts in JSON data."""
    size, rest = 0, [value]
    while rest:
        node = rest.pop()
        if isinstance(node, str):
            size += len(node)
        elif isinstance(node, dict):
            rest += node.values()
        elif isinstance(node, list):
            rest += node
    return size


async def _text(ctx: ServerContext, client: str, conversation: Conversation) -> str:
    """A conversation as its template writes it: the model's own here, one that came with the request in a process that can be killed."""
    templates = ctx.llm.tokenizer.templates
    if conversation.chat_template is not None:
        templates.select(conversation.chat_template, bool(conversation.tools))
        if conversation.chat_template not in templates.named:
            return await ctx.templates.render(templates, conversation, client)
    large = is_large(conversation.messages) or is_large(conversation.tools or conversation.documents)
    return await off_loop(large, rendered, templates, conversation)


def final_message(body: ChatRequest, role: str) -> str:
    """The text of the last message if `role` wrote it: what `echo` repeats."""
    last = body.messages[-1]
    content: Any = last.get("content") if isinstance(last, dict) and last.get("role") == role else None
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def log_notes(templates: ChatTemplates, settings: ServerSettings, defaults: Mapping[str, Any]) -> None:
    """Say at the start of a server what whoever starts it should know. (A server that does not generate has nothing of this.)

    Args:
        defaults: the sampling parameters of the model.
    """
    for note in start_notes(templates, settings):
        logger.warning(note)
    if note := defaults_note(defaults):
        logger.info(note)


def start_notes(templates: ChatTemplates, settings: ServerSettings) -> list[str]:
    """What whoever starts a server should know of its chats."""
    try:
        source = templates.select(None, True)
    except InvalidRequest:
        return [
            "This model has no chat template: /v1/chat/completions and what builds on it will refuse requests; /v1/completions works. "
            "Give a template with --chat-template FILE (chatml, say, if the model knows it)."
        ]
    form = tool_format(settings.tool_call_parser, source)
    if check_template(source) or knows_tools(source) or form is None:
        return []
    if form.syntax is None:
        return [
            f"The chat template does not mention tools, and none of a request is shown to the model in the format {form.name}. "
            "Use --tool-call-parser json, or a --chat-template FILE that knows tools."
        ]
    return [f"The chat template does not mention tools: those of a request are described in the system message ({form.name} format)."]


def defaults_note(defaults: Mapping[str, Any]) -> str:
    """Which sampling parameters are not OpenAI's where a request leaves them out; "" if none."""
    if not defaults:
        return ""
    values = ", ".join(f"{name}={value}" for name, value in sorted(defaults.items()))
    return f"Where a request says nothing, this model's own sampling parameters hold: {values} (--generation-config vllm: OpenAI's)."
