"""`octavo deploy` in a Ray cluster on this machine: one address, requests to where their prompt is cached, updates and losses without
failed requests, and more replicas where there is more work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.scripts import scripted_args, token_ids

pytest.importorskip("ray.serve", reason="needs ray[serve]")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SLOW = {"prompt_contains_ids": token_ids("slow"), "tokens": token_ids("abcde"), "cycle": True, "delay_ms": 20}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Cluster:
    """A Ray cluster, and `octavo deploy` in it as a user calls it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(self, *flags: str, timeout: float = 90, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "RAY_ADDRESS": self.address}
        command = [sys.executable, "-m", "octavo", "deploy", *flags, "--host", "127.0.0.1", "--port", str(self.port), "--proxies", "head"]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node, with room for three replicas of one core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        patch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        patch.setenv("RAY_worker_niceness", "0")  # the other tests would go first
        node = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
        try:
            yield Cluster(node.address)
        finally:
            node.shutdown()


def flags(folder: Path, says: str) -> list[str]:
    """Of a fleet whose model says that."""
    args = scripted_args(folder, default=says, rules=[SLOW])
    return [
        args.model, "--load-format", "dummy", "--device", "cpu", "--debug-scripted-model", str(args.debug_scripted_model),
        "--served-model-name", "tiny", "--max-num-seqs", "8",
    ]  # fmt: skip


def complete(client: httpx.Client, prompt: str, **more: Any) -> str:
    reply = client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0, **more})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def samples(client: httpx.Client, name: str) -> dict[str, float]:
    """Replica -> value of a metric."""
    found = re.findall(rf'^{re.escape(name)}{{replica="(\w+)"[^}}]*}} (\S+)$', client.get("/metrics").text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def engines() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "octavo.frontend.engine_process" in process.cmdline() or "octavo.engine.process" in process.cmdline():
                found.append(process)
    return found


async def stream(client: httpx.AsyncClient, prompt: str, max_tokens: int = 100) -> str:
    """A whole streamed reply, in which nothing has gone wrong."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    text, last = "", ""
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, line
                text += event["choices"][0]["text"]
            last = line or last
    assert last == "data: [DONE]"
    return text


def test_a_fleet_from_its_start_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    one, two = flags(tmp_path / "one", "one"), flags(tmp_path / "two", "two")
    fleet = ["--min-replicas", "2", "--drain-timeout", "10"]
    started = cluster.deploy(*one, *fleet)
    assert started.returncode == 0, started.stderr
    assert f"2 replicas at {cluster.url}" in started.stdout
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        replies_are_those_of_a_server(client)
        prompts_go_to_where_they_are_cached(client)
        asyncio.run(streams_and_their_ends(cluster.url))
        asyncio.run(an_engine_that_is_killed_is_a_pause(cluster.url))
        asyncio.run(a_replica_that_is_lost_is_said(cluster.url, "kill"))
        asyncio.run(two_replicas_again(cluster.url))
        asyncio.run(a_replica_that_is_lost_is_said(cluster.url, "suspend"))
        growing = [*fleet, "--max-replicas", "3", "--target-requests", "1", "--upscale-delay", "0"]
        asyncio.run(updates_fail_no_request(cluster, [*two, *growing]))
        assert complete(client, "hi") == "two"
        asyncio.run(much_work_brings_a_replica(cluster.url))
        broken = cluster.deploy(*two, *fleet, "--tokenizer", str(tmp_path / "nowhere"))
        assert broken.returncode == 1
        assert re.search(r"The fleet octavo did not start: .*nowhere", broken.stderr)
        assert "Traceback" not in broken.stderr
        assert complete(client, "hi") == "two"
        assert "fleet octavo has ended" in cluster.deploy("--delete").stdout
    assert not engines()


def test_what_a_fleet_has_left_is_in_nobodys_way_and_names_are_as_typed(cluster: Cluster, tmp_path: Path) -> None:
    """Ray Serve goes on, on the port that it was started with."""
    args = flags(tmp_path / "three", "three")
    at = args.index("--served-model-name")
    del args[at : at + 2]
    args[0] = os.path.relpath(args[0], tmp_path)
    broken = cluster.deploy(*args, "--tokenizer", str(tmp_path / "nowhere"), cwd=tmp_path)
    assert (broken.returncode, "It has been taken away again." in broken.stderr) == (1, True)
    cluster.port = free_port()
    started = cluster.deploy(*args, cwd=tmp_path)
    assert started.returncode == 0, started.stderr
    url, before = f"http://127.0.0.1:{cluster.port}", cluster.port
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == args[0]
    cluster.port = free_port()
    refused = cluster.deploy(*args, "--fleet-name", "other", cwd=tmp_path)
    assert f"Ray Serve runs in this cluster already, on port {before}, for octavo." in refused.stderr
    assert httpx.get(f"{url}/health").status_code == 200
    cluster.port = before
    assert "fleet octavo has ended" in cluster.deploy("--delete").stdout


def replies_are_those_of_a_server(client: httpx.Client) -> None:
    assert complete(client, "hi") == "one"
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.post("/v1/completions", json={"model": "other", "prompt": "hi"}).status_code == 404
    assert client.post("/v1/completions", content=b"{").status_code == 400
    assert client.get("/nowhere").status_code == 404
    kept = client.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
    assert kept.status_code == 501
    assert "keeps nothing between requests" in kept.json()["error"]["message"]
    went_on = client.post("/v1/responses", json={"model": "tiny", "input": "hi", "previous_response_id": "resp_1"})
    assert went_on.status_code == 501
    assert client.post("/abort", json={"request_ids": ["cmpl-nobody"]}).json() == {"aborted": []}
    assert client.post("/abort", json={}).status_code == 400
    large = client.post("/v1/completions", content=b"x" * (33 << 20))
    assert (large.status_code, large.json()["error"]["code"]) == (413, 413)


def prompts_go_to_where_they_are_cached(client: httpx.Client) -> None:
    before = samples(client, "vllm:prompt_tokens_total")
    assert len(before) == 2
    shared = [f"{i}" * 300 for i in range(4)]
    for turn in range(4):
        for prompt in shared:
            complete(client, prompt + f" turn {turn}")
    hits = samples(client, "vllm:prefix_cache_hits_total")
    after = samples(client, "vllm:prompt_tokens_total")
    # Every prompt but the four first is found where it was before, and both replicas have had work.
    assert sum(hits.values()) >= 12 * 288
    assert all(after[replica] > before[replica] for replica in before)


async def streams_and_their_ends(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        texts = await asyncio.gather(*(stream(client, f"slow {i}", 20) for i in range(6)))
        assert texts == ["abcde" * 4] * 6
        body = {"model": "tiny", "prompt": "slow", "max_tokens": 2000, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                break
        whole = asyncio.create_task(client.post("/v1/completions", json={**body, "stream": False}))
        async with asyncio.timeout(10):
            while not sum((await running_requests(client)).values()):
                await asyncio.sleep(0.1)
        whole.cancel()
        async with asyncio.timeout(10):  # the engine has let go of both
            while sum(running := list((await running_requests(client)).values())):
                await asyncio.sleep(0.1)
        assert len(running) == 2
        ending = asyncio.create_task(client.post("/v1/completions", json={**body, "stream": False, "request_id": "long"}))
        async with asyncio.timeout(10):
            while (await client.post("/abort", json={"request_ids": ["cmpl-long"]})).json() != {"aborted": ["cmpl-long"]}:
                await asyncio.sleep(0.1)
        assert (await ending).json()["choices"][0]["finish_reason"] == "abort"


async def running_requests(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    found = re.findall(r'^vllm:num_requests_running{replica="(\w+)"[^}]*} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


async def an_engine_that_is_killed_is_a_pause(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        streams = [asyncio.create_task(stream(client, f"slow {i}")) for i in range(4)]
        await asyncio.sleep(0.5)
        engines()[0].kill()
        assert await asyncio.gather(*streams) == ["abcde" * 20] * 4


async def updates_fail_no_request(cluster: Cluster, flags: list[str]) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        update = asyncio.create_task(asyncio.to_thread(cluster.deploy, *flags))
        long, answers = asyncio.create_task(stream(client, "slow", 300)), []
        while not update.done():
            answers.append(await stream(client, "hi", 5))
            await asyncio.sleep(0.05)
        assert update.result().returncode == 0, update.result().stderr
        assert await long == "abcde" * 60
        assert set(answers) <= {"one", "two"}
        assert {"one", "two"} <= {answers[0], await stream(client, "hi", 5)}


async def much_work_brings_a_replica(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        streams = [asyncio.create_task(stream(client, f"slow {i}", 1000)) for i in range(6)]
        async with asyncio.timeout(60):
            while len(await running_requests(client)) < 3:
                await asyncio.sleep(0.2)
        for one in streams:
            one.cancel()


async def two_replicas_again(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client, asyncio.timeout(60):
        while len(await running_requests(client)) < 2:
            await asyncio.sleep(0.2)


async def a_replica_that_is_lost_is_said(url: str, how: str) -> None:
    """Its streams end with an error; those of the others go on, and a request that had no answer yet is answered by them."""
    replica = next(p for p in psutil.Process().children(recursive=True) if "ray::ServeReplica:octavo:replica" in " ".join(p.cmdline()))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"model": "tiny", "prompt": "slow", "max_tokens": 100, "temperature": 0}
        streams = [asyncio.create_task(client.post("/v1/completions", json={**body, "stream": True})) for _ in range(4)]
        began = time.monotonic()
        wholes = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)]
        await asyncio.sleep(0.5)
        getattr(replica, how)()
        texts = [(await one).text for one in streams]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert 0 < sum("has ended. Send the request again." in text for text in texts) < len(texts)
        assert [json.loads((await one).content)["choices"][0]["text"] for one in wholes] == ["abcde" * 20] * 4
        assert time.monotonic() - began < 30
