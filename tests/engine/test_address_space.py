"""`ulimit -v`: a clear sentence before anything is served, or a server that holds what it promised under any load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.ops.cpu import abi
from octavo.protocol.boot import child_environment
from tests.http.test_bundled_model import MODEL
from tests.support.http_server import wait_until
from tests.support.octavo_process import environment, free_port

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits addresses as Linux does"),
    pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built"),
]


def limited(kilobytes: int, *argv: str) -> list[str]:
    return ["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "-", *argv]


def serve(kilobytes: int, *flags: str) -> list[str]:
    return limited(kilobytes, sys.executable, "-m", "octavo", "serve", str(MODEL), "--device", "cpu", "--threads", "1", *flags)


@pytest.mark.model
@pytest.mark.skipif(not MODEL.exists(), reason=f"the bundled model is not at {MODEL}")
@pytest.mark.parametrize(
    ("kilobytes", "said"),
    [
        (50_000, r"There is not enough memory to go on: the address space of each process is limited to 48\.8 MiB \(ulimit -v\)"),
        (200_000, r"limited to 195\.3 MiB \(ulimit -v\), and .* needs at least 304\.0 MiB to start"),
        (
            400_000,
            r"No length fits into the address space of 390\.6 MiB \(ulimit -v\): raise that limit, lower what a step may take "
            r"\(\d+\.\d MiB\) with --max-num-batched-tokens and --max-num-seqs, or use a smaller model\.",
        ),
    ],
)
def test_too_little_is_said_in_a_line(kilobytes: int, said: str) -> None:
    done = subprocess.run(serve(kilobytes), capture_output=True, text=True, timeout=120, env=environment(), check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("octavo: error: ")]
    assert len(lines) == 1 and re.search(said, lines[0]), done.stderr


@contextmanager
def server(log: Path, kilobytes: int, *flags: str) -> Iterator[str]:
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(serve(kilobytes, "--port", str(port), *flags), stderr=output, env=environment())
    try:
        assert wait_until(lambda: "Listening on" in log.read_text() or process.poll() is not None, 60)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, number: int) -> tuple[int, str]:
    words = " ".join(["river", "stone", "cloud"][(number * 7 + i * i) % 3] for i in range((20, 150, 500)[number % 3]))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": words}], "max_tokens": 6}
    schema = {"type": "object", "properties": {f"a{number}": {"type": "integer"}}, "additionalProperties": False}
    wish: dict[str, Any] = (
        {"logprobs": True, "top_logprobs": 20},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"frequency_penalty": 0.4, "prompt_logprobs": 2},
        {},
    )[number % 4]
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body | wish).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.model
@pytest.mark.skipif(not MODEL.exists(), reason=f"the bundled model is not at {MODEL}")
def test_a_server_that_starts_holds_under_load(tmp_path: Path) -> None:
    """Once all requests of a step ended with 500, and those with schemas because no thread started."""
    log = tmp_path / "log"
    with server(log, 800_000, "--max-model-len", "2048") as url, ThreadPoolExecutor(24) as threads:
        replies = list(threads.map(lambda number: ask(url, number), range(24)))
    assert {status for status, _ in replies} == {200}, [text[:300] for status, text in replies if status != 200][:3]
    assert "Traceback" not in log.read_text()


@pytest.mark.model
@pytest.mark.skipif(not MODEL.exists(), reason=f"the bundled model is not at {MODEL}")
@pytest.mark.parametrize("cache", [225, 245])
def test_a_cache_that_leaves_nothing_for_steps_ends_requests_clearly_and_no_server(tmp_path: Path, cache: int) -> None:
    """The user insists on a cache that takes nearly all addresses: steps shrink, or requests end with a sentence; the next ones are served.

    Once the grammar engine ended the process (225), and a thread that found no memory for its first step was waited for (245).
    """
    log = tmp_path / "log"
    with server(log, 560_000, "--max-model-len", "2048", "--kv-cache-memory-bytes", str(cache << 20)) as url:
        with ThreadPoolExecutor(8) as threads:
            replies = list(threads.map(lambda number: ask(url, number), range(24)))
        again = ask(url, 3)
    assert {status for status, _ in replies} <= {200, 503}, [reply for reply in replies if reply[0] not in (200, 503)][:3]
    assert all("gives no more memory" in text for status, text in replies if status == 503)
    assert again[0] == 200, again
    assert "the engine process was ended" not in log.read_text()
    assert "in two halves" in log.read_text() or any(status == 503 for status, _ in replies), "the limit was never felt"


DEEP = """
import threading
from octavo.config import address_space
address_space.be_frugal()
from octavo.grammar import stack
from octavo.grammar.stack import on_deep_stack

running, most = [], []

def work(number):
    running.append(number)
    most.append(len(running))
    threading.Event().wait(0.05)
    running.remove(number)
    return number

found = []
threads = [threading.Thread(target=lambda i=i: found.append(on_deep_stack(work, i))) for i in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(stack.STACK_BYTES >> 20, sorted(found), max(most))
stack.STACK_BYTES = 1 << 40
try:
    on_deep_stack(work, 1)
except MemoryError as error:
    print(error)
print(threading.stack_size())
"""


TIGHT = """
import mmap, sys
from octavo.config import address_space
address_space.be_frugal()
from octavo.grammar import stack

assert not address_space.lacks(1 << 20) and address_space.lacks(1 << 40)
for spare in range(0, 64, 4):
    with mmap.mmap(-1, address_space.limit() - address_space.used() - stack.STACK_BYTES - (spare << 10)):
        try:
            stack.on_deep_stack(int, "7")
        except MemoryError:
            continue
        sys.exit("a thread was begun with next to nothing left")
print(stack.on_deep_stack(int, "7"))
"""


def test_no_thread_is_begun_that_could_not_take_its_first_step() -> None:
    """Python waits for such a thread forever: it has its stack, and no memory to say that it runs."""
    run = subprocess.run(
        limited(700_000, sys.executable, "-c", TIGHT), capture_output=True, text=True, env=child_environment(), timeout=60, check=False
    )
    assert run.stdout == "7\n", run.stderr


def test_deep_stacks_take_turns_where_addresses_are_scarce() -> None:
    run = subprocess.run(
        limited(700_000, sys.executable, "-c", DEEP), capture_output=True, text=True, env=child_environment(), timeout=60, check=True
    )
    assert run.stdout.splitlines() == ["64 [0, 1, 2, 3, 4, 5] 1", "The system gives no stack for the grammar engine.", "0"]
