"""Owns the table of commands, and what every command has in common: dispatch, error lines and exit codes.

Exit codes: 0 done, 1 it failed (one line on stderr says why), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast

from octavo._version import __version__
from octavo.cli import INTERRUPTED
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.config import address_space, open_files
from octavo.errors import OctavoError, debugging


class CommandModule(Protocol):
    """What a module in this package offers: its flags, and what it does. `run` returns the exit code."""

    configure: Callable[[CommandParser], None]
    run: Callable[[Namespace], int]


@dataclass(frozen=True)
class Command:
    module: str
    summary: str

    def load(self) -> CommandModule:
        return cast(CommandModule, importlib.import_module(self.module))


COMMANDS = {
    "serve": Command("octavo.cli.serve", "Serve a model over an OpenAI-compatible HTTP API."),
    "deploy": Command("octavo.cli.deploy", "A fleet of servers in a Ray cluster: autoscaling, rolling updates."),
    "chat": Command("octavo.cli.chat", "Talk to a model in the terminal."),
    "complete": Command("octavo.cli.complete", "Continue one text."),
    "generate": Command("octavo.cli.generate", "Run a file of prompts, write JSON lines."),
    "run-batch": Command("octavo.cli.run_batch", "Run a file in OpenAI's batch format; resumes where it stopped."),
    "bench throughput": Command("octavo.cli.bench.throughput", "Offline: requests and tokens a second."),
    "bench latency": Command("octavo.cli.bench.latency", "Offline: time of one batch, to the first token and between tokens."),
    "bench serve": Command("octavo.cli.bench.serve", "Load any OpenAI-compatible server and report latencies."),
    "bench kv": Command("octavo.cli.bench.kv", "How much of the KV cache is wasted, paged and contiguous."),
    "quantize": Command("octavo.cli.quantize", "Make a low-bit checkpoint of a model."),
    "eval": Command("octavo.cli.evaluate", "Perplexity on a text, and agreement with another model."),
    "plan": Command("octavo.cli.plan", "What fits: tokens and users for a model and an amount of memory."),
    "models list": Command("octavo.cli.models_list", "Models on this machine."),
    "models pull": Command("octavo.cli.models_pull", "Fetch a model, by default the bundled one."),
    "doctor": Command("octavo.cli.doctor", "Check this machine and say what to fix."),
}


def run(argv: Sequence[str]) -> int:
    """Run one command line.

    Errors that Octavo raises on purpose, and those of the operating system, become one line on stderr. `--debug` (or
    OCTAVO_DEBUG=1) shows the traceback instead.
    """
    address_space.be_frugal()
    debug = debugging(argv)
    try:
        return _dispatch(list(argv))
    except UsageError as e:
        return _fail(str(e), 2)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`octavo ... | head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:
        if debug:
            raise
        if _interrupted(e):
            return INTERRUPTED
        return _fail(str(e) if isinstance(e, OctavoError) else _unexpected(e), 1)


def _interrupted(error: BaseException | None) -> bool:
    """Whether it is what somebody made of Ctrl-C: a library that was being imported says that it is broken."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _unexpected(error: Exception) -> str:
    """A line about something that nobody raised on purpose."""
    if address_space.is_refusal(error):
        return address_space.told("to go on")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return f"unexpected {type(error).__name__}: {error} (--debug shows the traceback)"


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"octavo {__version__}")
        return 0
    if argv[0] == "--debug":
        return _dispatch(argv[1:])
    name, rest = _split(argv)
    if name not in COMMANDS:
        print(overview(name))
        return 0
    if name != "doctor":  # which says more of it
        open_files.check()
    module = COMMANDS[name].load()
    parser = CommandParser(name, COMMANDS[name].summary)
    module.configure(parser)
    return module.run(parser.parse(rest))


def _split(argv: list[str]) -> tuple[str, list[str]]:
    """The command's name and its own arguments; a bare group name such as "bench" when help on the group is wanted."""
    name = argv[0]
    if name in COMMANDS:
        return name, argv[1:]
    members = [c.partition(" ")[2] for c in COMMANDS if c.startswith(name + " ")]
    if members:
        if len(argv) == 1 or argv[1] in ("-h", "--help"):
            return name, []
        if f"{name} {argv[1]}" in COMMANDS:
            return f"{name} {argv[1]}", argv[2:]
        _unknown(f"`octavo {name}` has no command", argv[1], members)
    return _unknown("there is no command", name, sorted({c.partition(" ")[0] for c in COMMANDS}))


def _unknown(what: str, given: str, allowed: list[str]) -> NoReturn:
    near = difflib.get_close_matches(given, allowed, 1)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(allowed)}."
    raise UsageError(f"{what} {given!r}. {hint}")


def overview(group: str = "") -> str:
    """The help page: every command, or those of one group."""
    shown = {name: c for name, c in COMMANDS.items() if not group or name.startswith(group + " ")}
    width = max(len(name) for name in shown)
    lines = [f"usage: octavo {group + ' ' if group else ''}COMMAND [flags]", ""]
    if not group:
        lines += [f"Octavo {__version__}: LLM inference and serving with a paged KV cache.", ""]
    lines += [f"  {name:<{width}}  {c.summary}" for name, c in shown.items()]
    lines += ["", "`octavo COMMAND --help` lists a command's flags. `octavo --version` prints the version."]
    return "\n".join(lines)


def _fail(message: str, code: int) -> int:
    print(f"octavo: error: {message}", file=sys.stderr)
    return code
