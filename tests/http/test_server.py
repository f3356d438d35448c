"""The server as a process, over the real engine core: start, errors at start, signals, crashes, sockets, logs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.http.test_disconnect import reset
from tests.support.http_server import parse_events, wait_until
from tests.support.server_process import ServerProcess, scripted_engine, server_process
from tests.support.tiny_checkpoint import write_tiny_checkpoint

SLOW = {"rules": [{"prompt_contains_ids": [3, 3], "tokens": [30], "cycle": True, "delay_ms": 10}], "default": [40, 41]}
FOREVER = {"prompt": [3, 3], "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("long"), max_model_len=4096)


@pytest.fixture(scope="module")
def running(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tmp_path = tmp_path_factory.mktemp("running")
    with server_process(tmp_path, scripted_engine(long_checkpoint, tmp_path, SLOW, max_num_seqs=4), log_format="json") as server:
        server.wait_ready()
        yield server


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def command_of(pid: int) -> str:
    """Empty for a process that has ended since it was seen."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_idle(server: ServerProcess) -> bool:
    return server.metric("vllm:num_requests_running") == 0 and server.metric("octavo:kv_blocks_used") == 0


def test_answers_and_counts(running: ServerProcess) -> None:
    reply = running.http.post("/v1/completions", json={"prompt": "hello", "logprobs": 2, "echo": True}).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 4
    assert running.http.get("/ready").json()["ready"] is True
    assert running.metric("vllm:request_success_total") >= 1
    assert running.metric("vllm:time_to_first_token_seconds_count") >= 1
    assert running.metric("vllm:iteration_tokens_total_count") >= 1


def test_one_json_line_for_each_request(running: ServerProcess) -> None:
    running.http.post("/v1/completions", json={"prompt": "hello", "request_id": "logged"})

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in running.log.splitlines() if '"cmpl-logged"' in line]

    assert wait_until(lambda: len(lines()) == 1)
    line = lines()[0]
    assert line["reason"] == "stop"
    assert (line["prompt_tokens"], line["output_tokens"]) == (1, 3)
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    assert line["client"].startswith("127.0.0.1:")
    assert all(json.loads(x) for x in running.log.splitlines())
    assert "/metrics" not in running.log


@pytest.mark.parametrize("api_servers", [1, 2])
def test_a_server_without_an_engine_says_so_and_ends(api_servers: int, long_checkpoint: Path, tmp_path: Path) -> None:
    """For whoever supervises it: an exit code, a sentence, and 503 until then."""
    engine = scripted_engine(long_checkpoint, tmp_path, SLOW, engine_restarts=1)
    with server_process(tmp_path, engine, api_server_count=api_servers) as server:
        server.wait_ready()

        def engines() -> list[int]:
            return [pid for pid in server.children() if "octavo.engine.process" in command_of(pid)]

        (first,) = engines()
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: any(pid != first for pid in engines()), 30)
        assert wait_until(lambda: server.http.get("/ready").json()["ready"], 30)
        (second,) = engines()
        replies: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: replies.append(server.http.post("/v1/completions", json=FOREVER)))
        waiting.start()
        assert wait_until(lambda: server.http.get("/load").json()["running"] == 1)
        os.kill(second, signal.SIGKILL)
        assert wait_until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/ready").json()["reason"].startswith("The engine is gone: the engine process was ended by SIGKILL")
        waiting.join(10)
        assert (replies[0].status_code, "The engine is gone" in replies[0].text) == (503, True)
        assert server.wait() == 1
        last = server.log.splitlines()[-1]
        assert last.startswith("octavo: error: The engine is gone: ") and last.endswith("so it is not restarted.")
        assert "Traceback" not in server.log


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("abrupt", [False, True])
def test_a_killed_client_frees_its_blocks(running: ServerProcess, stream: bool, abrupt: bool) -> None:
    url = httpx.URL(running.url)
    sock = socket.create_connection(("127.0.0.1", url.port))
    data = json.dumps({**FOREVER, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    assert wait_until(lambda: running.metric("vllm:num_requests_running") == 1)
    reset(sock) if abrupt else sock.close()
    assert wait_until(lambda: is_idle(running), 2.0)


def test_clients_that_leave_while_queued(running: ServerProcess) -> None:
    url = httpx.URL(running.url)
    data = json.dumps(FOREVER).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    socks = []
    for _ in range(8):
        sock = socket.create_connection(("127.0.0.1", url.port))
        sock.sendall(head.encode() + data)
        socks.append(sock)
    assert wait_until(lambda: running.metric("vllm:num_requests_running") == 4 and running.metric("vllm:num_requests_waiting") == 4)
    for sock in reversed(socks):
        sock.close()
    assert wait_until(lambda: is_idle(running) and running.metric("vllm:num_requests_waiting") == 0, 2.0)
    assert running.http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200


def test_beam_search(running: ServerProcess) -> None:
    body = {"prompt": "hello", "use_beam_search": True, "n": 2, "max_tokens": 4, "temperature": 0}
    reply = running.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert [c["index"] for c in reply.json()["choices"]] == [0, 1]
    with running.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        events = parse_events(response.read().decode())
    assert [c["text"] for e in events for c in e["choices"]] == [c["text"] for c in reply.json()["choices"]]
    running.http.post("/v1/completions", json={"prompt": "hello"})  # a step, and with it fresh counters
    assert wait_until(lambda: is_idle(running), 2.0)


def test_repeated_prompts_hit_the_prefix_cache(running: ServerProcess) -> None:
    body = {"prompt": list(range(10, 90)), "max_tokens": 1}
    running.http.post("/v1/completions", json=body)
    usage = running.http.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 64
    assert running.metric("vllm:prefix_cache_hits_total") >= 64


def test_port_in_use_is_one_line_at_once(long_checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with server_process(tmp_path, scripted_engine(long_checkpoint, tmp_path, SLOW), port=port) as server:
            assert server.wait() == 1
            assert server.log.count("\n") == 1
            assert f"Port {port} is already in use" in server.log


@pytest.mark.parametrize(
    ("engine", "server", "words"),
    [
        ({"debug_scripted_model": "/nonexistent.json"}, {}, "nonexistent.json"),
        ({"model": "/nonexistent/model"}, {}, "nonexistent"),
        ({}, {"host": "999.1.1.1"}, "999.1.1.1"),
        ({}, {"uds": "/nonexistent/dir/sock"}, "sock"),
    ],
)
def test_errors_at_start_are_one_line(
    long_checkpoint: Path, tmp_path: Path, engine: dict[str, Any], server: dict[str, Any], words: str
) -> None:
    with server_process(tmp_path, {**scripted_engine(long_checkpoint, tmp_path, SLOW), **engine}, **server) as process:
        assert process.wait() == 1
        assert "Traceback" not in process.log
        assert words in process.log.splitlines()[-1]
        assert process.log.splitlines()[-1].startswith("octavo: error: ")


def test_sigterm_lets_requests_finish(long_checkpoint: Path, tmp_path: Path) -> None:
    with server_process(tmp_path, scripted_engine(long_checkpoint, tmp_path, SLOW), shutdown_timeout=20) as server:
        server.wait_ready()
        engine = server.children()
        assert engine
        replies: list[httpx.Response] = []
        body = {**FOREVER, "max_tokens": 60}
        thread = threading.Thread(target=lambda: replies.append(server.http.post("/v1/completions", json=body)))
        thread.start()
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
        server.signal(signal.SIGTERM)
        time.sleep(0.15)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=1).close()
        thread.join(20)
        assert replies[0].json()["usage"]["completion_tokens"] == 60
        assert server.wait() == 0
        assert wait_until(lambda: all(gone(pid) for pid in engine))
        assert "Traceback" not in server.log


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("api_servers", [1, 2])
def test_a_signal_while_the_engine_loads(checkpoint: Path, number: signal.Signals, code: int, api_servers: int) -> None:
    command = [
        sys.executable, "-m", "octavo", "serve", str(checkpoint), "--load-format", "dummy", "--device", "cpu", "--port", "0",
        "--api-server-count", str(api_servers),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert wait_until(lambda: len(psutil.Process(process.pid).children()) == (3 if api_servers > 1 else 1), 30)
            engine = psutil.Process(process.pid).children()
            for child in engine:
                child.suspend()  # it loads for as long as we like
            assert wait_until(lambda: _catches(process.pid, signal.SIGTERM), 30), "the server's own handlers are there"
            process.send_signal(number)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, "Traceback" in out) == (code, False), out
    assert wait_until(lambda: not any(child.is_running() for child in engine))


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_draining_is_bounded_and_a_second_signal_ends_it(long_checkpoint: Path, tmp_path: Path, signals: list[signal.Signals]) -> None:
    timeout = 1 if len(signals) == 1 else 60
    with server_process(tmp_path, scripted_engine(long_checkpoint, tmp_path, SLOW), shutdown_timeout=timeout) as server:
        server.wait_ready()
        engine = server.children()
        whole: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: whole.append(httpx.post(f"{server.url}/v1/completions", json=FOREVER, timeout=60)))
        thread.start()
        with server.http.stream("POST", "/v1/completions", json={**FOREVER, "stream": True}) as response:
            chunks = response.iter_raw()  # kept: when it is collected, the connection closes
            raw = next(chunks)
            assert wait_until(lambda: server.metric("vllm:num_requests_running") == 2)
            for number in signals:
                assert server.process.poll() is None
                server.signal(number)
                time.sleep(0.3)
            raw += b"".join(chunks)
        began = time.monotonic()
        assert server.wait() == 0, server.log
        assert time.monotonic() - began < 10
        thread.join(10)
        assert wait_until(lambda: all(gone(pid) for pid in engine))
    # Both clients are told, and so is the log, without a traceback.
    assert "shut down" in parse_events(raw.decode())[-1]["error"]["message"]
    assert (whole[0].status_code, "shut down" in whole[0].json()["error"]["message"]) == (503, True)
    assert "Traceback" not in server.log
    assert "2 requests" in server.log


def test_a_client_that_does_not_read_cannot_hold_up_the_end(long_checkpoint: Path, tmp_path: Path) -> None:
    flood = {"default": [30], "rules": [{"tokens": [30], "cycle": True}]}
    with server_process(tmp_path, scripted_engine(long_checkpoint, tmp_path, flood), shutdown_timeout=1) as server:
        server.wait_ready()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", httpx.URL(server.url).port))
        data = json.dumps({**FOREVER, "max_tokens": 4000, "n": 8, "stream": True, "logprobs": 5}).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        sock.sendall(f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(1)
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait() == 0, server.log
        assert time.monotonic() - began < 10
        sock.close()


def test_the_engine_dies_with_a_killed_server(long_checkpoint: Path, tmp_path: Path) -> None:
    with server_process(tmp_path, scripted_engine(long_checkpoint, tmp_path, SLOW)) as server:
        server.wait_ready()
        engine = server.children()
        server.signal(signal.SIGKILL)
        server.wait()
        assert wait_until(lambda: all(gone(pid) for pid in engine))


def test_a_killed_engine_is_a_pause_for_streams(long_checkpoint: Path, tmp_path: Path) -> None:
    with server_process(tmp_path, scripted_engine(long_checkpoint, tmp_path, SLOW)) as server:
        server.wait_ready()
        first_engine = server.children()[0]
        with server.http.stream("POST", "/v1/completions", json={**FOREVER, "max_tokens": 80, "stream": True}) as response:
            chunks = response.iter_raw()
            raw = next(chunks)
            os.kill(first_engine, signal.SIGKILL)
            raw += b"".join(chunks)
        events = parse_events(raw.decode())
        assert len("".join(e["choices"][0]["text"] for e in events)) == 80
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.http.get("/health").status_code == 200
        assert first_engine not in server.children()


def test_unix_socket(long_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with server_process(tmp_path, scripted_engine(long_checkpoint, tmp_path, SLOW), uds=str(path)) as server:
        server.wait_ready()
        assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not path.exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls(long_checkpoint: Path, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    engine = scripted_engine(long_checkpoint, tmp_path, SLOW)
    with server_process(tmp_path, engine, ssl_keyfile=str(key), ssl_certfile=str(cert)) as server:
        server.wait_ready()
        assert server.url.startswith("https://")
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, verify=ssl.create_default_context(cafile=str(cert)))
        assert reply.status_code == 200
    cert.write_text("not a certificate")
    with server_process(tmp_path, engine, ssl_keyfile=str(key), ssl_certfile=str(cert)) as server:
        assert server.wait() == 1
        assert "TLS" in server.log.splitlines()[-1]
        assert "Traceback" not in server.log


def test_a_batch_survives_a_killed_server(long_checkpoint: Path, tmp_path: Path) -> None:
    engine = scripted_engine(long_checkpoint, tmp_path, {**SLOW, "step_delay_ms": 20}, max_num_seqs=4)
    state = str(tmp_path / "state")
    lines = [json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{i}"}}) for i in range(40)]
    with server_process(tmp_path, engine, state_dir=state, batch_concurrency=2) as server:
        server.wait_ready()
        file = server.http.post("/v1/files", files={"file": ("in.jsonl", "\n".join(lines))}, data={"purpose": "batch"}).json()
        batch = server.http.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": "/v1/completions"}).json()
        path = f"/v1/batches/{batch['id']}"
        output = Path(state) / "files" / f"file-output-{batch['id'].removeprefix('batch_')}"
        assert wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3)
        server.signal(signal.SIGKILL)
        server.wait()
    answered = output.read_bytes().count(b"\n")
    assert 3 <= answered < 40
    with server_process(tmp_path, engine, state_dir=state, batch_concurrency=2) as server:
        server.wait_ready()
        assert wait_until(lambda: server.http.get(path).json()["status"] == "completed", 20)
        done = server.http.get(path).json()
        assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        rows = [json.loads(line) for line in server.http.get(f"/v1/files/{done['output_file_id']}/content").text.splitlines()]
        assert sorted(row["custom_id"] for row in rows) == sorted(str(i) for i in range(40))
