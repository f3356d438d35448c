"""The formats in which models write tool calls and mark their reasoning: names, parsers, grammars, and how to tell from a template."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.frontend.parsing.deepseek import deepseek
from octavo.frontend.parsing.events import Event
from octavo.frontend.parsing.harmony import HarmonyParser
from octavo.frontend.parsing.pythonic import pythonic
from octavo.frontend.parsing.qwen_xml import qwen_xml
from octavo.frontend.parsing.tagged import any_json, granite, hermes, llama_json, mistral


class Parser(Protocol):
    @property
    def cut_source(self) -> str:
        """Inside a call: its text so far."""
        ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self, *, cut_short: bool = False) -> list[Event]: ...


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written, for grammars: begin, call (separator call)*, end; a call is before, name, between, arguments, after."""

    before: str
    between: str
    after: str
    begin: str = ""
    separator: str = ""
    end: str = ""

    @property
    def is_json(self) -> bool:
        """Calls are JSON from their first character on, without a marker: an answer in JSON may begin like one."""
        return self.before.startswith("{") and not self.begin.strip("[")

    @property
    def arguments_key(self) -> str:
        """Of calls in JSON."""
        return "parameters" if '"parameters"' in self.between else "arguments"


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls."""

    name: str
    make: Callable[..., Parser]
    """Called with the names of the request's tools, and `schemas`, those of their parameters by name."""
    marks: tuple[str, ...] = ()
    """Markers that may be special tokens of the tokenizer: these must not be left out of the text."""
    syntax: CallSyntax | None = None
    """None: calls that must be made are written as generic JSON."""


def _harmony(names: Container[str], **_: Any) -> HarmonyParser:
    return HarmonyParser()


_OBJECT = CallSyntax('{"name": "', '", "arguments": ', "}", separator=", ", begin="[", end="]")

GENERIC = ToolFormat("json", any_json, ("<tool_call>",), _OBJECT)
HARMONY = ToolFormat(
    "openai",
    _harmony,
    ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>"),
    CallSyntax("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
)
_DEEPSEEK_MARKS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_LIST_END = {"begin": _DEEPSEEK_MARKS[0], "end": _DEEPSEEK_MARKS[4]}

TOOL_FORMATS: dict[str, ToolFormat] = {
    f.name: f
    for f in (
        GENERIC,
        HARMONY,
        ToolFormat(
            "hermes",
            hermes,
            ("<tool_call>", "</tool_call>"),
            CallSyntax('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"),
        ),
        ToolFormat(
            "granite",
            granite,
            ("<|tool_call|>", "<tool_call>"),
            CallSyntax('{"name": "', '", "arguments": ', "}", begin="<|tool_call|>[", separator=", ", end="]"),
        ),
        ToolFormat(
            "mistral",
            mistral,
            ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            CallSyntax('{"name": "', '", "arguments": ', "}", begin="[TOOL_CALLS][", separator=", ", end="]"),
        ),
        ToolFormat("mistral_named", mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), CallSyntax("[TOOL_CALLS]", "[ARGS]", "")),
        ToolFormat(
            "llama3_json",
            llama_json,
            ("<|python_tag|>",),
            CallSyntax('{"name": "', '", "parameters": ', "}", separator="; "),
        ),
        ToolFormat("pythonic", pythonic, ("<|python_start|>", "<|python_end|>")),
        ToolFormat("qwen3_coder", qwen_xml, ("<tool_call>", "</tool_call>")),
        ToolFormat(
            "deepseek_v3",
            deepseek,
            _DEEPSEEK_MARKS,
            CallSyntax(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", separator="\n", **_LIST_END
            ),
        ),
        ToolFormat(
            "deepseek_v31",
            deepseek,
            _DEEPSEEK_MARKS,
            CallSyntax("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", **_LIST_END),
        ),
    )
}
ALIASES = {"llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "qwen3_xml": "qwen3_coder", "qwen": "hermes", "gpt_oss": "openai"}
"""Other names in use."""


def tool_format(name: str | None, template: str | None) -> ToolFormat | None:
    """The format of a name, or (None) the one that the template shows; None for "none".

    Raises:
        KeyError: there is no format of that name.
    """
    if name == "none":
        return None
    if name is not None:
        return TOOL_FORMATS[ALIASES.get(name, name)]
    return TOOL_FORMATS[_shown(template or "")]


_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>",)),
    ("mistral_named", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("qwen3_coder", ("<function=",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("llama3_json", ("<|python_tag|>",)),
)
"""Format, and what its template holds, all of it. The first that fits."""


def _shown(template: str) -> str:
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "json")


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its reasoning."""

    name: str
    start: str
    end: str
    always: bool = False
    """The model begins with its reasoning, whether it writes `start` or not."""
    harmony: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return HARMONY.marks if self.harmony else (self.start, self.end)


_THINK = ("<think>", "</think>")
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    f.name: f
    for f in (
        ReasoningFormat("think", *_THINK),
        ReasoningFormat("deepseek_r1", *_THINK, always=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", always=True),
        ReasoningFormat("openai_gptoss", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", harmony=True),
    )
}
REASONING_ALIASES = {
    "qwen3": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "hunyuan_a13b": "think",
    "ernie45": "think",
    "minimax_m2": "deepseek_r1",
    "qwq": "deepseek_r1",
    "openai": "openai_gptoss",
    "gpt_oss": "openai_gptoss",
}


def reasoning_format(name: str | None, template: str | None) -> ReasoningFormat | None:
    """The format of a name, or (None) the one that the template shows; None if it shows none, or for "none".

    Raises:
        KeyError: there is no format of that name.
    """
    if name == "none":
        return None
    if name is not None:
        return REASONING_FORMATS[REASONING_ALIASES.get(name, name)]
    template = template or ""
    if "<|channel|>" in template:
        return REASONING_FORMATS["openai_gptoss"]
    if "[THINK]" in template:
        return REASONING_FORMATS["mistral"]
    return REASONING_FORMATS["think"] if "</think>" in template else None


def opened_by(prompt: str, reasoning: ReasoningFormat, continued: str = "") -> bool | None:
    """Whether a prompt has opened the reasoning (True), closed it (False) or says nothing.

    Args:
        continued: the text of the assistant's message that the prompt ends inside of, if it does.
    """
    tail = prompt.rstrip()
    if tail.endswith(reasoning.start):
        return True
    if tail.endswith(reasoning.end):
        return False
    if not continued:
        return None
    opened, closed = continued.rfind(reasoning.start), continued.rfind(reasoning.end)
    if opened != closed:
        return opened > closed
    # An answer without reasoning, unless the template has put the marker before it.
    return tail.removesuffix(continued.strip()).rstrip().endswith(reasoning.start)


def known_names(formats: Mapping[str, object], aliases: Mapping[str, str]) -> Sequence[str]:
    return sorted({*formats, *aliases, "none"})
