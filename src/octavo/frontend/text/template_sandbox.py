"""The Jinja environment that chat templates run in: sandboxed, with the extras templates expect, and bounded.

Templates come with a checkpoint and their arguments come from requests, so neither may touch the machine, run for ever or
fill the memory: loops, calls and repetition count against a `RenderBudget`.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.filters import do_center, do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 5.0
MAX_CHARS = 1 << 24
"""Longest rendered prompt, and longest string or list a template may build."""
MAX_WIDTH = 10_000
MAX_BITS = 1 << 12
MAX_SLOW_CHARS = 1 << 16
"""For filters that take their time, inside of which no clock is looked at."""
_NUMBER = re.compile(r"\d{8,}")
_BUDGET = "_render_budget"
_TICK = "_counted"


class TemplateTooExpensive(jinja2.TemplateError):
    """A template ran past its time or size."""


class TemplateTooLarge(TemplateTooExpensive):
    """A template built more text than a prompt may have: maybe because it was given that much."""


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called raise_exception(message)."""


class RenderBudget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateTooExpensive(f"it ran for more than {MAX_SECONDS:g} seconds")


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Run a template.

    Raises:
        TemplateTooExpensive: past the bounds of this module.
        TemplateRefusal: by the template's own raise_exception.
        Exception: anything else that goes wrong in a template.
    """
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate({**variables, _BUDGET: RenderBudget()}):
            size += len(piece)
            if size > MAX_CHARS:
                raise TemplateTooLarge(f"it made more than {MAX_CHARS} characters")
            pieces.append(piece)
    except MemoryError:
        raise TemplateTooExpensive("it needed more memory than there is") from None
    return "".join(pieces)


@lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """`source` compiled; raises jinja2.TemplateSyntaxError."""
    return _environment().from_string(source)


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of `source`; raises jinja2.TemplateSyntaxError."""
    return _environment().parse(source)


@cache
def _environment() -> _TemplateEnvironment:
    return _TemplateEnvironment()


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters.update({"tojson": _tojson, "center": _center, "indent": _indent, _TICK: _counted})
        self.filters.update({name: _bounded(self.filters[name]) for name in ("join", "replace", "sum", "wordwrap", "format", "urlize")})
        self.globals.update({"raise_exception": _raise_exception, "strftime_now": _strftime_now})
        self.globals.pop("lipsum", None)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):  # every turn of every loop is counted
            loop.iter = nodes.Filter(loop.iter, _TICK, [], [], None, None, lineno=loop.lineno)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _tick(context)
        if not isinstance(obj, Macro):  # range(n), text.ljust(n), text.format(width=n)
            for value in (*args, *kwargs.values()):
                if isinstance(value, int) and value > MAX_CHARS:
                    raise TemplateTooExpensive(f"it called a function with the number {value}")
            owner, name = getattr(getattr(obj, "__wrapped__", obj), "__self__", None), getattr(obj, "__name__", "")
            if isinstance(owner, str) and name in ("format", "format_map"):
                _check_format(owner, ())
            if isinstance(owner, str) and (size := _METHODS.get(name)) is not None:
                _check_size(size(owner, *args, **kwargs))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _tick(context)
        if operator == "**":
            if not all(isinstance(v, (int, float)) and abs(v) < 2**16 for v in (left, right)) or abs(right) > 64:
                raise TemplateTooExpensive("it raised a number to a power that is too large")
        elif operator == "%":
            if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            if operator == "*" and left.bit_length() + right.bit_length() > MAX_BITS:
                raise TemplateTooExpensive(f"it multiplied numbers to one of more than {MAX_BITS} bits")
        elif operator == "+":
            _check_size(_length(left) + _length(right))
        elif _length(left) or _length(right):
            _check_size((_length(left) or left) * (_length(right) or right))
        return super().call_binop(context, operator, left, right)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _replaced(text: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    """Characters of a text in which `old` has been replaced."""
    if not isinstance(old, str) or not isinstance(new, str):
        return len(str(text))
    found = str(text).count(old)
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    return len(str(text)) + found * (len(new) - len(old))


def _joined(separator: Any, parts: Any = ()) -> int:
    """Characters of what a text joins; iterators are bounded by what made them."""
    if not isinstance(parts, (list, tuple, str)):
        return 0
    return sum(map(_written, parts)) + len(str(separator)) * max(len(parts) - 1, 0)


_METHODS: dict[str, Callable[..., int]] = {
    "replace": _replaced,
    "join": _joined,
    "expandtabs": lambda text, tabsize=8: len(text) + text.count("\t") * (tabsize if isinstance(tabsize, int) else 8),
    "translate": lambda text, table=None: (
        len(text) * max((_length(v) for v in table.values()), default=1) if isinstance(table, dict) else 0
    ),
}
"""How long the result of a text's method will be, for those that can make much of little."""


def _written(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(str(value))


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Widths stand in the text itself, or come as numbers."""
    widths = [int(digits[:20]) for digits in _NUMBER.findall(text)]
    for width in (*widths, *(abs(v) for v in values if isinstance(v, int) and "*" in text)):
        if width > MAX_CHARS:
            raise TemplateTooExpensive(f"it formatted a text to a width of {width}")


def _bounded(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja that can make much of little, or take long over it, with a bound on what it may make."""
    name = plain.__name__.removeprefix("do_").removeprefix("sync_")
    skip = 1 if hasattr(plain, "jinja_pass_arg") else 0

    @functools.wraps(plain)  # Jinja's notes on how it is called, too
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[skip], list(args[skip + 1 :])
        if name == "replace":
            _check_size(_replaced(value, *(rest or [kwargs.get("old", "")]), **{k: v for k, v in kwargs.items() if k != "old"}))
        elif name == "join":
            separator = rest[0] if rest else kwargs.get("d", "")
            if not isinstance(value, (list, tuple, str)):
                args = (*args[:skip], value := list(value), *rest)
            _check_size(_joined(separator, value))
        elif name == "format":
            _check_format(str(value), (*rest, *kwargs.values()))
        elif name in ("wordwrap", "urlize") and len(str(value)) > MAX_SLOW_CHARS:
            raise TemplateTooExpensive(f"it gave more than {MAX_SLOW_CHARS} characters to the filter {name}")
        elif name == "sum" and isinstance(value, (list, tuple)):
            # Lists are added one by one, each time to a new one: half of all their lengths, for every list.
            _check_size(sum(map(_length, value)) * max(1, len(value) // 2))
        return plain(*args, **kwargs)

    return bounded


def _check_size(size: Any) -> None:
    if isinstance(size, int) and size > MAX_CHARS:
        raise TemplateTooLarge(f"it built a string or list of {size} elements, more than {MAX_CHARS}")


def _tick(context: Context) -> None:
    budget = context.get(_BUDGET)
    if isinstance(budget, RenderBudget):
        budget.tick()


@pass_context
def _counted(context: Context, values: Iterable[Any]) -> Iterable[Any]:
    return _ticking(context, values) if values is not None and not isinstance(values, jinja2.Undefined) else values


def _ticking(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _tick(context)
        yield value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own tojson escapes HTML characters, which a model would read as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _center(value: str, width: int = 80) -> str:
    return do_center(value, min(width, MAX_WIDTH))


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    return do_indent(value, min(width, MAX_WIDTH) if isinstance(width, int) else width, first, blank)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
