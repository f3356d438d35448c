"""Flags from settings classes: every field of a dataclass made with `config.args.setting` becomes one flag.

Also the small vocabulary of value types (sizes, JSON, choices, ranges) that the commands share.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from octavo.cli.parser import ON_BY_DEFAULT, CommandParser, Namespace
from octavo.config.sizes import parse_size
from octavo.errors import ConfigError, NotYet

S = TypeVar("S")


def parsed_by(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` for argparse, which keeps only the messages of its own error class."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (ConfigError, ValueError) as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return convert


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number.") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number.") from None


def positive_int(text: str) -> int:
    """A count: a whole number of at least 1. For use as an argparse type."""
    try:
        value = parse_size(text)
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1.")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. For use as an argparse type."""
    try:
        value = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {e}.") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object.")
    return value


class _StoreList(argparse.Action):
    """One or more values; a single JSON list is read as that list."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        if len(values) == 1 and values[0].startswith("["):
            try:
                values = [str(v) for v in json.loads(values[0])]
            except ValueError as e:
                raise argparse.ArgumentError(self, f"{values[0]!r} is not a JSON list: {e}.") from None
        setattr(namespace, self.dest, values)


@dataclass(frozen=True)
class SettingKind:
    """A field's type, as a command line sees it."""

    base: type
    """bool, int, float, str, dict or list."""
    words: bool
    """Accepts a word as well (`auto`) where `base` is a number."""


def kind_of(hint: Any) -> SettingKind:
    """The command-line kind of a type annotation such as `int | str | None`."""
    members = list(typing.get_args(hint)) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else [hint]
    bases = [typing.get_origin(m) or m for m in members if m is not type(None)]
    bases = [str if b is typing.Literal else list if b is tuple else b for b in bases]
    for base in (bool, dict, list, int, float, str):
        if base in bases:
            return SettingKind(base, str in bases and base in (int, float))
    raise TypeError(f"No flag can be made for {hint}.")


def _number_type(kind: SettingKind, size: bool) -> Callable[[str], Any]:
    parse: Callable[[str], Any] = parse_size if size else _int if kind.base is int else _float

    def convert(text: str) -> Any:
        return text if kind.words and text.isalpha() else parse(text)

    return parsed_by(convert)


def flag_names(field: dataclasses.Field[Any]) -> list[str]:
    """`--long-name`, its aliases, and the short form."""
    names = [field.name, *field.metadata["aliases"]]
    short = field.metadata["short"]
    return (["-" + short] if short else []) + ["--" + n.lstrip("-").replace("_", "-") for n in names]


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def add_settings(parser: CommandParser, settings: type, *, skip: Container[str] = ()) -> None:
    """Add a flag for each field of a settings class, unless another class has given one of that name already."""
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if field.name in skip or parser.has_dest(field.name) or "group" not in field.metadata:
            continue
        _add_setting(parser, field, kind_of(hints[field.name]))


def _add_setting(parser: CommandParser, field: dataclasses.Field[Any], kind: SettingKind) -> None:
    meta = field.metadata
    names = [n for n in flag_names(field) if not parser.has(n)]
    default = default_of(field)
    text = meta["help"]
    if kind.base is not bool and default not in (None, "", {}, []):
        text += f" Default: {' '.join(default) if isinstance(default, list) else default}."
    elif default is True:
        text += ON_BY_DEFAULT
    if meta["status"] == "not yet":
        text += " Not available yet."
    keywords: dict[str, Any] = {"dest": field.name, "help": text.replace("%", "%%")}
    if kind.base is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif kind.base is dict:
        keywords |= {"type": json_object, "metavar": "JSON"}
    elif kind.base is list:
        keywords |= {"action": _StoreList, "nargs": "+", "metavar": "X"}
    elif kind.base is str:
        keywords |= {"metavar": "TEXT"}
        if meta["choices"]:
            keywords |= {"type": choice(meta["choices"], meta["foreign"] or {}), "metavar": "{" + ",".join(meta["choices"]) + "}"}
    else:
        keywords |= {"type": _number_type(kind, meta["size"]), "metavar": "N"}
    parser.group(meta["group"]).add_argument(*names, **keywords)


def choice(allowed: tuple[str, ...], foreign: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], str]:
    """One of a few words. For use as an argparse type.

    Args:
        foreign: words that other engines know, and what to say of them.
    """

    def convert(text: str) -> str:
        if text in allowed:
            return text
        if text in foreign:
            raise argparse.ArgumentTypeError(f"{text}: {foreign[text]}")
        import difflib

        near = difflib.get_close_matches(text.lower(), allowed, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}.{hint}")

    return convert


def build(settings: type[S], namespace: Namespace) -> S:
    """An instance of a settings class from the flags that were given."""
    given = vars(namespace)
    return settings(**{f.name: given[f.name] for f in dataclasses.fields(settings) if f.name in given})  # type: ignore[arg-type]


def check_status(settings: Any) -> None:
    """Warn about settings that have no effect here.

    Raises:
        NotYet: a setting asks for something that Octavo does not do yet.
    """
    for f in dataclasses.fields(settings):
        status = f.metadata.get("status", "works")
        if status == "works" or getattr(settings, f.name) == default_of(f):
            continue
        flag = flag_names(f)[-1]
        if status == "not yet":
            raise NotYet(f"{flag} is not available yet: {f.metadata['help']}")
        print(f"octavo: warning: {flag} is ignored: {f.metadata['help']}", file=sys.stderr)


def add_engine_settings(parser: CommandParser, *, skip: Container[str] = (), positional: bool = True) -> None:
    """All engine flags, those known from vLLM that have no setting here, and (optionally) the model as first argument."""
    from octavo.cli.foreign_flags import add_foreign_flags
    from octavo.config.args import EngineArgs

    if positional:
        parser.usage = f"{parser.prog} [MODEL] [flags]"
        parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="The same as --model.")
    add_settings(parser, EngineArgs, skip=skip)
    add_foreign_flags(parser)


def engine_args(namespace: Namespace) -> Any:
    """`EngineArgs` from the flags, and warnings about flags that do nothing here."""
    from octavo.cli.foreign_flags import check_foreign_flags
    from octavo.config.args import EngineArgs

    check_foreign_flags(namespace)
    positional = getattr(namespace, "model_argument", None)
    named = getattr(namespace, "model", None)
    if positional and named and positional != named:
        raise ConfigError(f"Two models were given: {positional!r} and --model {named!r}. Give one.")
    if positional:
        namespace.model = positional
    return build(EngineArgs, namespace)
