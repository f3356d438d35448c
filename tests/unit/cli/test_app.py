"""Dispatch, error lines, exit codes, and what starting costs: seen from outside, as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.cli import app, main
from octavo.cli.app import COMMANDS
from octavo.errors import ConfigError

HEAVY = ("torch", "numpy", "transformers", "pydantic", "fastapi", "uvicorn", "rich", "tokenizers", "huggingface_hub", "zmq")


def octavo(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-m", "octavo", *argv], capture_output=True, text=True, timeout=120, env=env, check=False)


def test_help_lists_every_command() -> None:
    done = octavo("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_a_help_page_that_needs_nothing_heavy(name: str) -> None:
    code = (
        "import sys\nfrom octavo.cli import main\n"
        f"try: main({[*name.split(), '--help']!r})\nexcept SystemExit as e: assert e.code == 0\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: octavo {name}")
    assert "HEAVY []" in done.stdout


def test_version() -> None:
    from octavo import __version__

    assert octavo("--version").stdout == f"octavo {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "code", "part"),
    [
        (["srve"], 2, "there is no command 'srve'. Did you mean serve?"),
        (["bench", "troughput"], 2, "`octavo bench` has no command 'troughput'. Did you mean throughput?"),
        (["bench", "zzz"], 2, "There are: throughput, latency, serve, kv."),
        (["serve", "--no-such-flag"], 2, "there is no flag --no-such-flag"),
        (["serve", "--dtype", "flaot16"], 2, "Did you mean float16?"),
        (["serve", "--kv-cache-dtype", "fp8_e5m2"], 2, "fp8_e5m2: its two mantissa bits are too coarse for keys and values. Use fp8_e4m3."),
        (["serve", "--kv-cache-dtype", "fp9"], 2, "'fp9' is not one of auto, float32, float16, bfloat16, fp8, fp8_e4m3. Did you mean"),
        (["run-batch"], 2, "needs an input and an output file"),
        (["complete", "x", "--temperature", "-1"], 1, "temperature must be non-negative"),
        (["serve", "m", "--rope-theta", "1"], 1, "--rope-theta is not available yet"),
        (["run-batch", "-i", "/nowhere.jsonl", "-o", "/tmp/x"], 1, "/nowhere.jsonl: No such file or directory"),
        (["chat", "--url", "http://127.0.0.1:9"], 1, "Cannot reach http://127.0.0.1:9"),
        (["chat", "--url", "ftp://x"], 1, "is not the address of a server"),
        (["plan", "/nowhere/model"], 1, "/nowhere/model"),
    ],
)
def test_errors_are_one_line_and_have_an_exit_code(argv: list[str], code: int, part: str) -> None:
    done = octavo(*argv)
    assert done.returncode == code
    assert done.stderr.startswith("octavo: error: ")
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def _raising(error: BaseException) -> app.CommandModule:
    class Module:
        @staticmethod
        def configure(parser: object) -> None:
            pass

        @staticmethod
        def run(options: object) -> int:
            raise error

    return Module  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("No."), 1, "octavo: error: No.\n"),
        (KeyboardInterrupt(), 130, ""),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), 1, "octavo: error: x.txt: No such file or directory\n"),
        (ZeroDivisionError("oh"), 1, "octavo: error: unexpected ZeroDivisionError: oh (--debug shows the traceback)\n"),
    ],
)
def test_every_exception_of_a_command_has_its_exit(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OCTAVO_DEBUG", raising=False)
    monkeypatch.setattr(app.Command, "load", lambda self: _raising(error))
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == line


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.Command, "load", lambda self: _raising(ConfigError("No.")))
    with pytest.raises(ConfigError):
        main(["doctor", "--debug"])
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    with pytest.raises(ConfigError):
        main(["doctor"])


def test_a_closed_pipe_ends_quietly() -> None:
    command = f"{sys.executable} -m octavo serve --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("usage: octavo serve")


@pytest.mark.parametrize("where", ["octavo/cli/app.py", "octavo/cli/streams.py", "octavo/config/args.py"])
def test_ctrl_c_while_a_command_is_imported_exits_130_without_a_word(where: str, tmp_path: Path) -> None:
    """It comes when the file is read."""
    assert _interrupted(
        tmp_path,
        f"""
def read(event, args):
    if event == "open" and str(args[0]).replace(".pyc", ".py").replace("__pycache__/", "").replace(".cpython-311", "").endswith({where!r}):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(read)
""",
    ) == (130, "")


def test_ctrl_c_that_a_library_makes_an_error_of_exits_130_without_a_word(tmp_path: Path) -> None:
    assert _interrupted(
        tmp_path,
        """
def load(command):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except BaseException:
        raise ImportError("this library is broken")
import octavo.cli.app
octavo.cli.app.Command.load = load
""",
    ) == (130, "")


def test_ctrl_c_in_an_exec_exits_130_and_not_by_the_signal(tmp_path: Path) -> None:
    """Python would end itself with SIGINT, though it was caught."""
    assert _interrupted(
        tmp_path,
        """
import octavo.cli.app
octavo.cli.app.Command.load = lambda command: exec("os.kill(os.getpid(), signal.SIGINT); time.sleep(10)")
""",
    ) == (130, "")


def _interrupted(folder: Path, prepare: str) -> tuple[int, str]:
    """Exit code and stderr of `octavo serve`, started as a module after some preparation."""
    code = f"import os, signal, sys, time\nfrom octavo.cli import main\n{prepare}\nsys.argv = ['octavo', 'serve']\nsys.exit(main())"
    (folder / "command.py").write_text(code)
    done = subprocess.run([sys.executable, "-m", "command"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_ctrl_c_exits_130_without_a_word(tmp_path: Path) -> None:
    """`models pull` waits for the lock that we hold; Ctrl-C ends it."""
    import fcntl

    from octavo.checkpoint import bundled

    folder = tmp_path / "models"
    folder.mkdir()
    with (folder / f".{bundled.FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "models", "pull"],
            env={**os.environ, "OCTAVO_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: "flock" in Path(f"/proc/{process.pid}/wchan").read_text() or _has_lock_file_open(process.pid))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert (out, "Traceback" in err) == ("", False)


def _has_lock_file_open(pid: int) -> bool:
    return any(_target(link).endswith(".lock") for link in Path(f"/proc/{pid}/fd").iterdir())


def _target(link: Path) -> str:
    """Where a process's descriptor leads, or nothing if it was closed since it was listed."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def wait_until(true: object, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
