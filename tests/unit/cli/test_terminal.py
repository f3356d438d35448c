"""The chat on a terminal: a pseudo-terminal types, interrupts and leaves as a person would."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.octavo_process import environment


class Terminal:
    """A process on a pseudo-terminal, and what it has written."""

    def __init__(self, *argv: str, **env: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(TERM="dumb", **env),
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str, seconds: float = 60) -> str:
        """Wait until the output since the last call matches; returns it and starts afresh."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            try:
                self.text += os.read(self._master, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # the other end is closed
                assert re.search(pattern, self.text), f"ended without {pattern!r}: {self.text!r}"
        seen, self.text = self.text, ""
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the process as a signal


@pytest.fixture
def slow_chat(tiny: Path, tmp_path: Path) -> Iterator[Terminal]:
    """A model that says hello until the context is full, 20 tokens a second."""
    ids = Tokenizer.from_file(str(tiny / "tokenizer.json")).encode("hello ").ids
    script = tmp_path / "slow.json"
    script.write_text(json.dumps({"rules": [{"tokens": ids, "cycle": True}], "step_delay_ms": 50}))
    flags = ["--load-format", "dummy", "--device", "cpu", "--debug-scripted-model", str(script)]
    terminal = Terminal(sys.executable, "-m", "octavo", "chat", str(tiny), *flags, OCTAVO_HOME=str(tmp_path / "home"))
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(slow_chat: Terminal, tmp_path: Path) -> None:
    slow_chat.until(">>> ")
    slow_chat.type("tell me\n")
    slow_chat.until("(hello ){3}")
    slow_chat.type("\x03")
    slow_chat.until(">>> ")
    assert slow_chat.process.poll() is None
    slow_chat.type("/stats\n")
    assert "tokens in" in slow_chat.until("tokens in[^>]*>>> ")
    slow_chat.type("\x03")  # at the prompt it only drops the line
    slow_chat.until(">>> ")
    slow_chat.type("\x04")
    assert slow_chat.process.wait(timeout=30) == 0
    assert "tell me" in (tmp_path / "home" / "chat_history").read_text()
