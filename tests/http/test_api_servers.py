"""Several API servers over one engine, as processes: whichever answers, the server is one."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from octavo.errors import ConfigError
from octavo.frontend.http.settings import ServerSettings
from tests.http.test_server import FOREVER, gone
from tests.support.http_server import parse_events, wait_until
from tests.support.server_process import ServerProcess, scripted_engine, server_process
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_pooling import save_pooling, write_modules

SCRIPT = {
    "rules": [{"prompt_contains_ids": [3, 3], "tokens": [30, 31, 32, 33, 34], "cycle": True, "delay_ms": 10}],
    "default": [40, 41],
}
TOKENS = 60
SLOW = {"prompt": [3, 3], "max_tokens": TOKENS, "ignore_eos": True}
"""Takes more than half a second."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("long"), max_model_len=4096)


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tmp_path = tmp_path_factory.mktemp("running")
    engine = scripted_engine(checkpoint, tmp_path, SCRIPT, max_num_seqs=64)
    with server_process(tmp_path, engine, api_server_count=2, state_dir=str(tmp_path / "state"), log_format="json") as server:
        server.wait_ready()
        yield server


@pytest.fixture
def fresh(checkpoint: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    engine = scripted_engine(checkpoint, tmp_path, SCRIPT, max_num_seqs=64)
    with server_process(tmp_path, engine, api_server_count=2) as server:
        server.wait_ready()
        yield server


def api_servers(server: ServerProcess) -> list[int]:
    return [pid for pid in server.children() if "api_servers" in command_of(pid)]


def command_of(pid: int) -> str:
    """Empty for a process that has ended since it was seen."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def engine(server: ServerProcess) -> int:
    (pid,) = [pid for pid in server.children() if "octavo.engine" in command_of(pid)]
    return pid


def served_by(server: ServerProcess, connection: httpx.Client) -> int:
    """Which process has this connection's other end."""
    connection.get("/live")
    (ours,) = [
        c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == httpx.URL(server.url).port and is_of(connection, c)
    ]
    for pid in api_servers(server):
        if any(c.raddr and c.raddr.port == ours.laddr.port for c in psutil.Process(pid).net_connections()):
            return pid
    raise AssertionError("nobody has it")


def is_of(connection: httpx.Client, found: Any) -> bool:
    sock = connection._transport._pool._connections[0]._connection._network_stream.get_extra_info("socket")  # type: ignore[attr-defined]
    return bool(found.laddr.port == sock.getsockname()[1])


def connection_to(server: ServerProcess, pid: int) -> httpx.Client:
    """A connection that this API server has taken."""
    for _ in range(64):
        connection = httpx.Client(base_url=server.url, timeout=30)
        if served_by(server, connection) == pid:
            return connection
        connection.close()
    raise AssertionError(f"process {pid} takes no connections")


def stream(url: str, body: dict[str, Any], seen: Callable[[], None] = lambda: None) -> str:
    """The whole text of a completion."""
    raw = ""
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=30) as response:
        assert response.status_code == 200, response.read()
        for piece in response.iter_text():
            seen()
            raw += piece
    return "".join(c["text"] for e in parse_events(raw) for c in e["choices"])


def test_both_serve_and_every_stream_gets_its_own_tokens(running: ServerProcess) -> None:
    expected = running.http.post("/v1/completions", json=SLOW).json()["choices"][0]["text"]
    busy = {pid: psutil.Process(pid).cpu_times().user for pid in api_servers(running)}
    with ThreadPoolExecutor(40) as pool:
        texts = list(pool.map(lambda n: stream(running.url, {**SLOW, "max_tokens": TOKENS + n % 3}), range(40)))
    assert all(text.startswith(expected) for text in texts)
    assert len({len(text) for text in texts}) == 3
    assert len(busy) == 2
    assert all(psutil.Process(pid).cpu_times().user > before for pid, before in busy.items())


def samples(server: ServerProcess) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def counters(server: ServerProcess) -> dict[str, float]:
    return {name: value for name, value in samples(server).items() if name.split("{")[0].endswith(("_total", "_count", "_bucket", "_sum"))}


def test_what_to_know_is_said_at_the_start_by_one_for_all(tmp_path: Path) -> None:
    engine = scripted_engine(write_tiny_checkpoint(tmp_path / "model", chat=False), tmp_path, SCRIPT)
    with server_process(tmp_path, engine, api_server_count=2) as server:
        server.wait_ready()
        assert server.log.count("This model has no chat template") == 1


def test_metrics_are_those_of_all(running: ServerProcess) -> None:
    one, two = (connection_to(running, pid) for pid in api_servers(running))
    name = "vllm:e2e_request_latency_seconds_count"

    def count(connection: httpx.Client) -> float:
        (line,) = [x for x in connection.get("/metrics").text.splitlines() if x.startswith(name)]
        return float(line.rsplit(" ", 1)[1])

    before = count(one)
    for connection in (one, two, two):
        assert connection.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
    assert count(one) == count(two) == before + 3
    text = one.get("/metrics").text
    assert text.count("# TYPE vllm:generation_tokens_total") == 1
    assert text.count("# TYPE process_cpu_seconds_total") == 1


def test_load_and_abort_reach_every_api_server(running: ServerProcess) -> None:
    one, two = (connection_to(running, pid) for pid in api_servers(running))
    replies: list[httpx.Response] = []

    def ask(connection: httpx.Client, name: str) -> threading.Thread:
        body = {**FOREVER, "request_id": name}
        thread = threading.Thread(target=lambda: replies.append(connection.post("/v1/completions", json=body)))
        thread.start()
        return thread

    threads = [ask(one, "first"), ask(two, "second")]
    assert wait_until(lambda: running.http.get("/load").json() == {"server_load": 2, "running": 2, "waiting": 0})
    ids = ["cmpl-first", "cmpl-second", "cmpl-none"]
    assert running.http.post("/abort", json={"request_ids": ids}).json() == {"aborted": ["cmpl-first", "cmpl-second"]}
    for thread in threads:
        thread.join(10)
    assert [reply.json()["choices"][0]["finish_reason"] for reply in replies] == ["abort", "abort"]
    assert wait_until(lambda: running.http.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0})


def test_responses_are_kept_for_all(running: ServerProcess) -> None:
    one, two = (connection_to(running, pid) for pid in api_servers(running))
    made = one.post("/v1/responses", json={"model": "", "input": "hello"}).json()
    assert two.get(f"/v1/responses/{made['id']}").json() == made
    again = two.post("/v1/responses", json={"input": "more", "previous_response_id": made["id"]})
    assert again.status_code == 200, again.text
    assert one.delete(f"/v1/responses/{made['id']}").json()["deleted"] is True
    assert two.get(f"/v1/responses/{made['id']}").status_code == 404
    conversation = one.post("/v1/conversations", json={}).json()["id"]
    for connection in (one, two, one):
        assert connection.post("/v1/responses", json={"input": "hi", "conversation": conversation}).status_code == 200
    assert len(two.get(f"/v1/conversations/{conversation}/items").json()["data"]) == 6


def test_batches_are_run_once_whoever_takes_them(running: ServerProcess) -> None:
    one, two = (connection_to(running, pid) for pid in api_servers(running))
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": "/v1/completions", "body": {"model": "", "prompt": "hello"}} for n in range(20)
    ]
    content = "\n".join(json.dumps(line) for line in lines)
    for taker, other in ((one, two), (two, one)):
        file = taker.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()
        request = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = other.post("/v1/batches", json=request).json()
        assert wait_until(lambda: taker.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed", 15)  # noqa: B023
        done = other.get(f"/v1/batches/{batch['id']}").json()
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        output = taker.get(f"/v1/files/{done['output_file_id']}/content").text.splitlines()
        assert sorted(json.loads(line)["custom_id"] for line in output) == sorted(line["custom_id"] for line in lines)


def test_a_dead_engine_is_a_pause_for_the_streams_of_all(running: ServerProcess) -> None:
    expected = running.http.post("/v1/completions", json=SLOW).json()["choices"][0]["text"]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(12) as pool:
        texts = [pool.submit(stream, running.url, SLOW, begun.release) for _ in range(12)]
        for _ in range(24):
            assert begun.acquire(timeout=10)
        os.kill(engine(running), signal.SIGKILL)
        assert [text.result(30) for text in texts] == [expected] * 12
    assert wait_until(lambda: running.http.get("/ready").status_code == 200)


def test_a_killed_api_server_takes_only_its_own_requests_along(fresh: ServerProcess) -> None:
    expected = fresh.http.post("/v1/completions", json=SLOW).json()["choices"][0]["text"]
    victim, survivor = api_servers(fresh)
    with closing(connection_to(fresh, victim)) as lost, closing(connection_to(fresh, survivor)) as kept:
        kept.get("/metrics")
        before = counters(fresh)
        ended: list[bool] = []
        answers: list[str] = []

        def cut_off() -> None:
            try:
                lost.post("/v1/completions", json=FOREVER)
            except httpx.TransportError:
                ended.append(True)

        threads = [
            threading.Thread(target=cut_off),
            threading.Thread(target=lambda: answers.append(kept.post("/v1/completions", json=SLOW).json()["choices"][0]["text"])),
        ]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: fresh.http.get("/load").json()["running"] == 2)
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join(20)
        assert ended == [True]
        assert answers == [expected]
        assert wait_until(lambda: len(api_servers(fresh)) == 2 and victim not in api_servers(fresh))
        # Its request does not go on in the engine, and connections are taken again by both.
        assert wait_until(lambda: kept.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0})
        for pid in api_servers(fresh):
            with closing(connection_to(fresh, pid)) as connection:
                assert connection.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
        after = counters(fresh)
    assert all(after[name] >= value for name, value in before.items() if name.startswith(("vllm:", "http_")))
    assert "Another takes its place" in fresh.log


def test_one_that_takes_anothers_place_reads_the_tokenizer_of_the_start(tmp_path: Path) -> None:
    """Also where its files have become others: the engine, the other API servers and streams under way are those of the start."""
    model = write_tiny_checkpoint(tmp_path / "model")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}before {{ m.content }}{% endfor %}")
    chat = {"messages": [{"role": "user", "content": "the other"}]}
    with server_process(
        tmp_path,
        scripted_engine(model, tmp_path, SCRIPT, chat_template=str(template)),
        api_server_count=2,
        state_dir=str(tmp_path / "state"),
    ) as server:
        server.wait_ready()
        before = [server.http.post("/tokenize", json=body).json()["tokens"] for body in ({"prompt": "the other"}, chat)]
        other = json.loads((model / "tokenizer.json").read_text())
        other["model"]["merges"] = []
        (model / "tokenizer.json").write_text(json.dumps(other))
        template.write_text("{% for m in messages %}after {{ m.content }}{% endfor %}")
        victim, survivor = api_servers(server)
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: bool(set(api_servers(server)) - {victim, survivor}))
        (newcomer,) = set(api_servers(server)) - {victim, survivor}
        with closing(connection_to(server, newcomer)) as connection:
            found = [connection.post("/tokenize", json=body).json()["tokens"] for body in ({"prompt": "the other"}, chat)]
        assert found == before


def test_a_damaged_tokenizer_is_told_of_by_its_own_name(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    with server_process(tmp_path, scripted_engine(model, tmp_path, SCRIPT), api_server_count=2) as server:
        assert server.wait() == 1
        assert f"{model}/tokenizer.json cannot be read as a tokenizer" in server.log
        assert "Traceback" not in server.log


def test_a_beam_search_whose_server_dies_frees_its_blocks(checkpoint: Path, tmp_path: Path) -> None:
    config = scripted_engine(checkpoint, tmp_path, {"default": [40] * 4000, "step_delay_ms": 5}, enable_prefix_caching=False)
    with server_process(tmp_path, config, api_server_count=2) as server:
        server.wait_ready()
        victim, survivor = api_servers(server)
        with closing(connection_to(server, victim)) as lost, closing(connection_to(server, survivor)) as kept:

            def cut_off() -> None:
                body = {"prompt": [40] * 200, "use_beam_search": True, "n": 4, "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
                with pytest.raises(httpx.TransportError):
                    lost.post("/v1/completions", json=body)

            thread = threading.Thread(target=cut_off)
            thread.start()
            assert wait_until(lambda: kept.get("/stats").json()["engine"]["kv_blocks_used"] > 10)
            time.sleep(0.2)  # some turns, with beams that are held
            os.kill(victim, signal.SIGKILL)
            thread.join(20)

            def used() -> int:
                kept.post("/v1/completions", json={"prompt": [50], "max_tokens": 1})  # a step, and with it fresh counters
                return int(kept.get("/stats").json()["engine"]["kv_blocks_used"])

            assert wait_until(lambda: used() <= 1), used()


def test_one_that_hangs_does_not_hold_up_the_metrics_of_all(fresh: ServerProcess) -> None:
    victim, survivor = api_servers(fresh)
    with closing(connection_to(fresh, victim)) as one, closing(connection_to(fresh, survivor)) as other:
        assert one.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
        name = 'vllm:request_success_total{engine="0",finished_reason="stop"'

        def count() -> float:
            (line,) = [x for x in other.get("/metrics").text.splitlines() if x.startswith(name)]
            return float(line.rsplit(" ", 1)[1])

        before = count()
        os.kill(victim, signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert count() == before >= 1
            assert time.monotonic() - started < 5
            assert other.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
        finally:
            os.kill(victim, signal.SIGCONT)
        assert count() == before + 1


def test_one_that_hangs_for_long_is_replaced(checkpoint: Path, tmp_path: Path) -> None:
    config = scripted_engine(checkpoint, tmp_path, SCRIPT, engine_hang_timeout=2.0)
    with server_process(tmp_path, config, api_server_count=2) as server:
        server.wait_ready()
        victim, survivor = api_servers(server)
        with closing(connection_to(server, survivor)) as kept:
            time.sleep(2.5)
            assert api_servers(server) == [victim, survivor], "silence is no hang: they are asked"
            os.kill(victim, signal.SIGSTOP)
            assert wait_until(lambda: gone(victim) and len(api_servers(server)) == 2, 15)
            assert kept.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
        assert "it is killed" in server.log


def test_one_that_a_signal_has_stopped_is_replaced_in_seconds(checkpoint: Path, tmp_path: Path) -> None:
    with server_process(tmp_path, scripted_engine(checkpoint, tmp_path, SCRIPT), api_server_count=2) as server:
        server.wait_ready()
        victim, survivor = api_servers(server)
        with closing(connection_to(server, survivor)) as kept:
            os.kill(victim, signal.SIGSTOP)
            assert wait_until(lambda: gone(victim) and len(api_servers(server)) == 2, 20)
            assert kept.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
        assert f"(process {victim}) has been stopped for " in server.log
        assert "was ended by SIGKILL; 0 of its requests" in server.log, "it was us: nobody need think of memory"


@pytest.mark.parametrize("api_server_count", [1, 2])
def test_the_caches_size_is_that_of_the_replicas_that_are_left(checkpoint: Path, tmp_path: Path, api_server_count: int) -> None:
    config = scripted_engine(checkpoint, tmp_path, SCRIPT, data_parallel_size=2, engine_restarts=0)
    with server_process(tmp_path, config, api_server_count=api_server_count) as server:
        server.wait_ready()

        def blocks() -> tuple[int, int, int]:
            text = server.http.get("/metrics").text
            found = re.search(r'^vllm:cache_config_info{.*num_gpu_blocks="(\d+)"', text, re.M)
            assert found is not None
            return int(found[1]), *(int(server.metric(f"octavo:{name}")) for name in ("kv_blocks_total", "replicas"))  # type: ignore[return-value]

        whole, usable, replicas = blocks()
        assert (usable, replicas) == (whole - 2, 2), "before the first request"
        victim = next(p for p in psutil.Process(server.process.pid).children() if "octavo.engine.process" in p.cmdline())
        victim.kill()
        assert wait_until(lambda: blocks() == (whole // 2, whole // 2 - 1, 1)), blocks()
        assert server.http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200


def test_a_background_response_whose_server_dies_has_failed(checkpoint: Path, tmp_path: Path) -> None:
    config = scripted_engine(checkpoint, tmp_path, {"default": [40] * 4000, "step_delay_ms": 20})
    with server_process(tmp_path, config, api_server_count=2) as server:
        server.wait_ready()
        victim, survivor = api_servers(server)
        with closing(connection_to(server, victim)) as lost, closing(connection_to(server, survivor)) as kept:
            made = lost.post("/v1/responses", json={"input": "hello", "background": True, "max_output_tokens": 2000}).json()
            where = f"/v1/responses/{made['id']}"
            assert kept.get(where).json()["status"] == "in_progress"
            os.kill(victim, signal.SIGKILL)
            assert wait_until(lambda: kept.get(where).json()["status"] == "failed", 20)
            assert "ended" in kept.get(where).json()["error"]["message"]
            assert wait_until(lambda: kept.get("/load").json()["running"] == 0)


def test_ctrl_c_lets_requests_finish_and_leaves_nobody(fresh: ServerProcess) -> None:
    pids = fresh.children()
    assert len(pids) == 3
    expected = fresh.http.post("/v1/completions", json=SLOW).json()["choices"][0]["text"]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(stream, fresh.url, SLOW, begun.release) for _ in range(8)]
        for _ in range(16):
            assert begun.acquire(timeout=10)
        fresh.signal(signal.SIGINT)
        assert [text.result(30) for text in texts] == [expected] * 8
    assert fresh.wait() == 0
    assert wait_until(lambda: all(gone(pid) for pid in pids))
    assert "Traceback" not in fresh.log
    assert len(re.findall(r"Stopping: \d+ requests", fresh.log)) == 1, "one process says it for all"


def test_the_second_ctrl_c_ends_what_runs(fresh: ServerProcess) -> None:
    pids = fresh.children()
    body = {**FOREVER, "stream": True}
    with httpx.stream("POST", f"{fresh.url}/v1/completions", json=body, timeout=30) as response:
        pieces = response.iter_text()
        next(pieces)
        fresh.signal(signal.SIGINT)
        time.sleep(0.3)
        started = time.monotonic()
        fresh.signal(signal.SIGINT)
        rest = "".join(pieces)
    assert '"error"' in rest
    assert rest.endswith("data: [DONE]\n\n")
    assert fresh.wait(10) == 0
    assert time.monotonic() - started < 5
    assert wait_until(lambda: all(gone(pid) for pid in pids))


def test_nobody_outlives_a_killed_main_process(fresh: ServerProcess) -> None:
    pids = fresh.children()
    fresh.signal(signal.SIGKILL)
    fresh.wait()
    assert wait_until(lambda: all(gone(pid) for pid in pids), 10)


def test_the_queue_is_bounded_over_all(checkpoint: Path, tmp_path: Path) -> None:
    config = scripted_engine(checkpoint, tmp_path, SCRIPT, max_num_seqs=2, max_waiting=2)
    with server_process(tmp_path, config, api_server_count=2) as server:
        server.wait_ready()
        clients = [httpx.Client(base_url=server.url, timeout=30) for _ in range(4)]
        threads = [
            threading.Thread(target=c.post, args=("/v1/completions",), kwargs={"json": {**FOREVER, "max_tokens": 300}}) for c in clients
        ]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: server.http.get("/load").json()["server_load"] == 4)
        for pid in api_servers(server):
            with closing(connection_to(server, pid)) as connection:
                refused = connection.post("/v1/completions", json={"prompt": "hello"})
                assert refused.status_code == 429, refused.text
                assert int(refused.headers["retry-after"]) >= 1
        server.signal(signal.SIGINT)
        server.signal(signal.SIGINT)
        for thread in threads:
            thread.join(20)


def test_over_a_unix_socket(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with server_process(tmp_path, scripted_engine(checkpoint, tmp_path, SCRIPT), api_server_count=2, uds=str(path)) as server:
        server.wait_ready()
        assert server.http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not path.exists()


def test_embeddings(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_pooling(folder, "BertModel")
    write_modules(folder, "mean_tokens", normalize=True, max_length=16)
    with server_process(tmp_path, {"model": str(folder), "device": "cpu", "threads": 1}, api_server_count=2) as server:
        server.wait_ready(120)
        replies = []
        for pid in api_servers(server):
            with closing(connection_to(server, pid)) as connection:
                replies.append(
                    connection.post("/v1/embeddings", json={"input": ["a cat runs", "the stock market fell", "a cat runs"]}).json()
                )
        assert replies[0]["data"] == replies[1]["data"]
        vectors = [row["embedding"] for row in replies[0]["data"]]
        assert vectors[0] == vectors[2] != vectors[1]
        assert server.http.get("/load").json()["server_load"] == 0


def test_two_servers_do_not_share_a_port(running: ServerProcess, checkpoint: Path, tmp_path: Path) -> None:
    port = httpx.URL(running.url).port
    with server_process(tmp_path, scripted_engine(checkpoint, tmp_path, SCRIPT), api_server_count=2, port=port) as other:
        assert other.wait() == 1
        assert f"Port {port} is already in use" in other.log


def test_an_engine_that_cannot_start_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    config = {**scripted_engine(checkpoint, tmp_path, SCRIPT), "debug_scripted_model": "/nonexistent.json"}
    with server_process(tmp_path, config, api_server_count=3) as server:
        assert server.wait() == 1
        assert "nonexistent.json" in server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("count", [0, -1, 65, True])
def test_a_bad_count_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="api_server_count must be between 1 and 64"):
        ServerSettings(api_server_count=count)
