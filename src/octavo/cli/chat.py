"""`octavo chat`: talk to a model. With a terminal it is a small line editor with /commands; with a pipe, each line is one turn."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.cli.backends import Backend, Loop, Message, Piece, open_backend
from octavo.cli.flags import add_engine_settings
from octavo.cli.parser import CommandParser, Namespace
from octavo.cli.sampling import add_sampling_flags, add_server_flags, sampling_options
from octavo.config.home import octavo_home
from octavo.errors import InvalidRequest, OctavoError


def configure(parser: CommandParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="System message.")
    add_sampling_flags(parser)
    add_server_flags(parser)
    add_engine_settings(parser, skip=("seed",))


def run(options: Namespace) -> int:
    sampling = sampling_options(options)
    loop = Loop()
    try:
        backend = open_backend(loop, options)
        try:
            chat = Chat(backend, sampling, stream=lambda m, s: loop.iterate(lambda: backend.chat(m, s)))
            chat.set_system(getattr(options, "system", ""))
            return chat.converse(interactive=sys.stdin.isatty())
        finally:
            loop.run(backend.close())
    finally:
        loop.stop()


class Leave(Exception):
    """The user wants to go."""


@dataclass
class Chat:
    """One conversation: its messages, its sampling parameters, and the commands that change them."""

    backend: Backend
    sampling: dict[str, Any]
    stream: Callable[[list[Message], dict[str, Any]], Iterator[Piece]]
    """Streams the answer to messages."""
    messages: list[Message] = field(default_factory=list)
    last: str = "Nothing was generated yet."

    def converse(self, *, interactive: bool) -> int:
        """Read turns until the input ends. Returns the exit code: 1 if a turn failed in a pipe."""
        failed = False
        if interactive:
            print(f"{self.backend.name}. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.", file=sys.stderr)
        with _line_editing() if interactive else contextlib.nullcontext():
            while True:
                try:
                    text = _read_turn(">>> " if interactive else "")
                    if text.strip():
                        self.take(text)
                except (EOFError, Leave):
                    return int(failed and not interactive)
                except KeyboardInterrupt:
                    if not interactive:
                        raise
                    print(file=sys.stderr)
                except OctavoError as e:
                    failed = True
                    print(f"octavo: error: {e}", file=sys.stderr)

    def take(self, text: str) -> None:
        """One line of input: a command or something to say."""
        if not text.startswith("/"):
            self.say(text)
            return
        name, _, argument = text[1:].strip().partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            raise InvalidRequest(f"There is no command /{name}. /help lists them; a message cannot start with a slash.")
        command[0](self, argument.strip())

    def say(self, text: str) -> None:
        """Add a user message and print the answer as it comes. Without an answer the message is taken back."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        answered = False
        try:
            answered = self._answer()
        finally:
            if not answered:
                self.messages = before

    def _answer(self) -> bool:
        parts: list[str] = []
        start, first, tokens = time.perf_counter(), 0.0, 0
        try:
            for piece in self.stream(list(self.messages), dict(self.sampling)):
                if piece.text and not parts:
                    first = time.perf_counter() - start
                parts.append(piece.text)
                tokens = max(tokens, piece.tokens)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        finally:
            if parts:
                sys.stdout.write("\n")
                sys.stdout.flush()
        seconds = time.perf_counter() - start
        rate = f", {tokens / seconds:.1f} tokens/s" if tokens else ""
        self.last = f"First text after {first * 1000:.0f} ms, {tokens or 'unknown'} tokens in {seconds:.1f} s{rate}."
        answer = "".join(parts)
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        return bool(answer)

    def set_system(self, text: str) -> None:
        rest = [m for m in self.messages if m["role"] != "system"]
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def _clear(self, _: str) -> None:
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def _undo(self, _: str) -> None:
        """Drop the last question and its answer."""
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def _retry(self, _: str) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise InvalidRequest("There is no question to ask again.")
        self._answer()

    def _set(self, argument: str) -> None:
        from octavo.protocol.params import SamplingParams

        if not argument:
            print(", ".join(f"{k}={v}" for k, v in self.sampling.items()) or "All sampling parameters are the model's defaults.")
            return
        name, _, value = argument.replace("=", " ", 1).partition(" ")
        if name not in SamplingParams.__struct_fields__:
            raise InvalidRequest(f"There is no sampling parameter {name!r}.")
        changed = dict(self.sampling)
        if value.strip():
            try:
                changed[name] = json.loads(value)
            except ValueError:
                changed[name] = value.strip()
        else:
            changed.pop(name, None)
        SamplingParams(**changed)
        self.sampling = changed

    def _system(self, argument: str) -> None:
        self.set_system(argument)

    def _save(self, argument: str) -> None:
        path = _path(argument)
        path.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(f"Saved {len(self.messages)} messages to {path}.", file=sys.stderr)

    def _load(self, argument: str) -> None:
        path = _path(argument)
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            self.messages = [{"role": str(m["role"]), "content": m["content"]} for m in messages]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InvalidRequest(f"{path} is not a saved conversation ({type(e).__name__}: {e}).") from None

    def _stats(self, _: str) -> None:
        print(self.last)

    def _help(self, _: str) -> None:
        for name, (_command, text) in COMMANDS.items():
            print(f"  /{name:<8} {text}")
        print('  """       starts and ends a message of several lines')

    def _exit(self, _: str) -> None:
        raise Leave


COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str]] = {
    "help": (Chat._help, "this list"),
    "system": (Chat._system, "TEXT sets the system message; nothing removes it"),
    "set": (Chat._set, "NAME VALUE sets a sampling parameter (/set temperature 0); /set NAME resets it"),
    "retry": (Chat._retry, "answer the last question again"),
    "undo": (Chat._undo, "forget the last question and answer"),
    "clear": (Chat._clear, "forget everything but the system message"),
    "save": (Chat._save, "FILE writes the conversation as JSON"),
    "load": (Chat._load, "FILE goes on from a saved conversation"),
    "stats": (Chat._stats, "timings of the last answer"),
    "exit": (Chat._exit, "leave (so does Ctrl-D)"),
}


def _path(argument: str) -> Path:
    words = shlex.split(argument)
    if len(words) != 1:
        raise InvalidRequest("Give one file name.")
    return Path(words[0]).expanduser()


def _read_turn(prompt: str) -> str:
    """One line, or several between triple quotes.

    Raises:
        EOFError: the input has ended.
    """
    line = input(prompt)
    if not line.startswith('"""'):
        return line
    lines = [line[3:]]
    while not lines[-1].endswith('"""'):
        lines.append(input("... " if prompt else ""))
    lines[-1] = lines[-1][:-3]
    return "\n".join(lines)


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Line editing and a history kept between sessions, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    home = octavo_home()
    history = home / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            home.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)
