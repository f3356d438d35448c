"""Whatever is wrong with what `octavo serve` is given, it ends with one line that says so, before a client could reach it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.octavo_process import environment, free_port


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo", "serve", "--device", "cpu", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(HF_HUB_OFFLINE="1"), check=False)


def assert_one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("octavo: error: ")]
    assert len(errors) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == errors[0]
    for part in parts:
        assert part in errors[0]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        yield s.getsockname()[1]


def test_a_port_in_use(taken_port: int, tiny: Path) -> None:
    assert_one_line(serve(str(tiny), "--port", str(taken_port)), f"Port {taken_port} is already in use", "--port")


def test_an_unknown_model() -> None:
    assert_one_line(serve("no-such-owner/no-such-model", "--port", str(free_port())), "no-such-owner/no-such-model")
    assert_one_line(serve("/no/such/folder", "--port", str(free_port())), "/no/such/folder", "there is no such file or folder")


def test_files_that_are_not_what_they_should_be(tmp_path: Path, tiny: Path) -> None:
    junk, folder = tmp_path / "junk.gguf", tmp_path / "broken"
    junk.write_bytes(b"junk" * 100)
    folder.mkdir()
    (folder / "config.json").write_text("{broken")
    assert_one_line(serve(str(junk), "--port", str(free_port())), "junk.gguf", "not a GGUF file")
    assert_one_line(serve(str(folder), "--port", str(free_port())), "config.json", "not valid JSON")


def test_truncated_weights(tmp_path: Path, tiny: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [300, 32], "data_offsets": [0, 38400]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 100)
    assert_one_line(serve(str(folder), "--port", str(free_port())), "model.safetensors")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--gpu-memory-utilization", "7"], "--gpu-memory-utilization must be greater than 0 and at most 1"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--cpu-offload-gb", "2"], "--cpu-offload-gb"),
        (["--chat-template", "/no/such/template"], "/no/such/template"),
        (["--ssl-keyfile", "/no/such/key"], "TLS needs both"),
    ],
)
def test_settings_that_cannot_be(flags: list[str], part: str, tiny: Path) -> None:
    assert_one_line(serve(str(tiny), "--load-format", "dummy", "--port", str(free_port()), *flags), part)


def test_a_cache_too_small_for_the_longest_request_says_what_would_fit(tiny: Path) -> None:
    flags = ["--load-format", "dummy", "--port", str(free_port()), "--kv-cache-memory-bytes", "20k"]
    assert_one_line(serve(str(tiny), *flags), "512", "--max-model-len")
