"""`CommandParser`: argparse with the manners of this command line.

* `--max_model_len` and `--max-model-len` are the same flag.
* `--x.a.b 1` adds `{"a": {"b": 1}}` to the JSON flag `--x`.
* `--config file.yaml` holds flags under their long names; the command line wins over it.
* A flag that does not exist is refused with the nearest one that does.
* Flags that were not given are absent from the namespace, so that every default lives in the settings classes.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from octavo.errors import ConfigError

Namespace = argparse.Namespace

ON_BY_DEFAULT = " On by default."
"""Ends the help of switches that are on unless turned off."""


class UsageError(Exception):
    """The command line cannot be understood: exit code 2."""


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # Every switch has a --no- twin; it is worth a word only where the switch is on by default.
        if isinstance(action, argparse.BooleanOptionalAction) and not (action.help or "").endswith(ON_BY_DEFAULT):
            return ", ".join(o for o in action.option_strings if not o.startswith("--no-"))
        return super()._format_action_invocation(action)


class CommandParser(argparse.ArgumentParser):
    """Flags of one command."""

    def __init__(self, command: str, summary: str) -> None:
        super().__init__(
            prog=f"octavo {command}",
            description=summary,
            usage=f"octavo {command} [flags]",
            formatter_class=_Formatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        self.add_argument("--debug", action="store_true", help="Show tracebacks.")
        self.add_argument("--config", metavar="FILE", help="YAML or JSON file of flags; the command line wins over it.")

    def group(self, title: str) -> argparse._ArgumentGroup:
        """The group of flags with this title, made at its first use."""
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def has(self, flag: str) -> bool:
        return flag in self._option_string_actions

    def has_dest(self, dest: str) -> bool:
        return any(action.dest == dest for action in self._actions)

    def error(self, message: str) -> NoReturn:
        raise UsageError(_plain(message.removeprefix("argument ")))

    def parse(self, argv: Sequence[str]) -> Namespace:
        """Parse the arguments after the command's name.

        Raises:
            UsageError: an unknown flag, a bad value, too many positional arguments.
        """
        namespace = Namespace()
        tokens = _join_dotted(_dashes(argv))
        config = _config_file(tokens)
        if config is not None:
            self._parse_into(self._config_tokens(config), namespace)
        self._parse_into(tokens, namespace)
        return namespace

    def _parse_into(self, tokens: list[str], namespace: Namespace) -> None:
        try:
            # Intermixed: `serve --port 8001 MODEL` and `serve MODEL --port 8001` both work.
            _, rest = self.parse_known_intermixed_args(tokens, namespace)
        except argparse.ArgumentError as e:
            self.error(str(e))
        unknown = [t.partition("=")[0] for t in rest if t.startswith("-") and len(t) > 1]
        if unknown:
            self.error(f"there is no flag {unknown[0]}. {self._suggest(unknown[0])}")
        if rest:
            self.error(f"unexpected argument {rest[0]!r}. Quote a text with spaces; `{self.prog} --help` lists the flags.")

    def _suggest(self, flag: str) -> str:
        names = [o for o, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        near = difflib.get_close_matches(flag, names, 1, cutoff=0.6)
        return f"Did you mean {near[0]}?" if near else f"`{self.prog} --help` lists the flags."

    def _config_tokens(self, path: str) -> list[str]:
        """The entries of a --config file as command line tokens."""
        tokens: list[str] = []
        for key, value in _read_config(path).items():
            flag = "--" + str(key).replace("_", "-")
            if not self.has(flag):
                raise ConfigError(f"{path}: there is no setting {key!r}. {self._suggest(flag)}")
            if value is None:
                continue
            if isinstance(value, bool):
                # Switches without a twin are off when absent.
                off = flag.replace("--", "--no-", 1)
                tokens += [flag] if value else [off] if self.has(off) else []
            elif isinstance(value, list):
                tokens += [flag, *map(str, value)] if value else []
            else:
                tokens.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
        return tokens


def _plain(message: str) -> str:
    """argparse's complaint about `--switch=true`, in other words."""
    flags, found, value = message.partition(": ignored explicit argument ")
    if not found:
        return message
    on, _, off = flags.partition("/")
    return f"{on} is a switch and takes no value, got {value}. Write {on}{f', or {off} to turn it off' if off.startswith('--no-') else ''}."


def _dashes(argv: Sequence[str]) -> list[str]:
    """Long flags with `-` for `_`. Keys after a dot and values keep theirs."""
    tokens: list[str] = []
    for i, token in enumerate(argv):
        if token == "--":
            return tokens + list(argv[i:])
        if token.startswith("--"):
            end = min((token.find(c) for c in "=." if c in token), default=len(token))
            tokens.append(token[:end].replace("_", "-") + token[end:])
        else:
            tokens.append(token)
    return tokens


def _join_dotted(argv: list[str]) -> list[str]:
    """Replace `--x.a 1 --x.b.c t` by `--x {"a": 1, "b": {"c": "t"}}`, merged into an `--x` given as JSON."""
    tokens: list[str] = []
    trees: dict[str, dict[str, Any]] = {}
    rest = iter(argv)
    for token in rest:
        name, equals, value = token.partition("=")
        if not name.startswith("--") or "." not in name:
            tokens.append(token)
            continue
        flag, *keys = name.split(".")
        if not equals:
            value = next(rest, "")
            if not value:
                raise UsageError(f"{name} needs a value.")
        node = trees.setdefault(flag, {})
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = _json_or_text(value)
    for flag, tree in trees.items():
        whole = _json_or_text(_value_of(tokens, flag) or "{}")
        if not isinstance(whole, dict):
            raise UsageError(f"{flag}: {whole!r} is not a JSON object.")
        tokens.append(f"{flag}={json.dumps(_merge(whole, tree))}")
    return tokens


def _value_of(tokens: Iterable[str], flag: str) -> str | None:
    """The last value given to `flag`, in either spelling."""
    found, take = None, False
    for token in tokens:
        if take:
            found, take = token, False
        elif token == flag:
            take = True
        elif token.startswith(flag + "="):
            found = token.partition("=")[2]
    return found


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _config_file(tokens: list[str]) -> str | None:
    return _value_of(tokens, "--config")


def _read_config(path: str) -> dict[str, Any]:
    """A file of settings: YAML (of which JSON is a part) if a YAML reader is installed, else JSON.

    Raises:
        ConfigError: unreadable, malformed or not a table of settings.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path}: {getattr(e, 'strerror', None) or e}.") from None
    try:
        import yaml
    except ImportError:
        yaml = None  # type: ignore[assignment]
    try:
        content = json.loads(text) if yaml is None else yaml.safe_load(text)
    except Exception as e:
        raise ConfigError(f"--config {path} is not valid {'JSON' if yaml is None else 'YAML'}: {' '.join(str(e).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must be a table of `flag: value` lines, not a {type(content).__name__}.")
    return content
