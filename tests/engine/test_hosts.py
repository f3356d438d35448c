"""One model on two hosts, which are network namespaces: the tokens of one process, and what happens when a host is lost or is not right."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from octavo import LLM, SamplingParams
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_models import save_tiny
from tests.support.two_hosts import Host, Program, two_hosts, unplug

pytestmark = pytest.mark.slow
PROMPTS = [[5, 6, 7], list(range(40, 75)), [9] * 21]
COMMON = ["--device", "cpu", "--threads", "1", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4", "--max-model-len", "512",
          "--kv-cache-dtype", "float32"]  # fmt: skip
SIZES = {"tensor": ["-tp", "2"], "pipeline": ["-pp", "2"], "both": ["-tp", "2", "-pp", "2"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tokenizer = write_tiny_checkpoint(tmp_path / "tokenizer")
    vocab = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    save_tiny(folder, "llama", vocab_size=vocab, max_position_embeddings=512)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tokenizer / file).read_bytes())
    return folder


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as pair:
        yield pair


def start(host: Host, model: Path, rank: int, *more: str, kind: str = "tensor", **env: str) -> Program:
    """The same command on either host. The server is reached through a file: the test is on neither network."""
    socket = ["--uds", str(host.folder / "server"), "--state-dir", str(host.folder / "state")] if rank == 0 else []
    nodes = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "10.231.0.1"]
    return host.octavo(f"node{rank}", ["serve", str(model), *COMMON, *SIZES[kind], *nodes, *socket, *more], **env)


def client(folder: Path) -> httpx.Client:
    return httpx.Client(base_url="http://server", transport=httpx.HTTPTransport(uds=str(folder / "server")), timeout=60)


def tokens(folder: Path, prompt: list[int], count: int, during: Any = None) -> list[int]:
    """Greedy tokens of a stream; `during` is called once some are there."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    got: list[int] = []
    with client(folder) as http, http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                got += event["choices"][0]["token_ids"]
                if during is not None and len(got) >= 20:
                    during()
                    during = None
    return got


def alone(model: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    with LLM(
        str(model), device="cpu", threads=1, cpu_kernels="torch", num_gpu_blocks_override=64, max_num_seqs=4, max_model_len=512,
        kv_cache_dtype="float32",
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        )
    return [output.outputs[0].token_ids for output in outputs]


def ranks(program: Program) -> list[psutil.Process]:
    return psutil.Process(program.process.pid).children(recursive=True)


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "both"])
def test_two_hosts_give_the_tokens_of_one_process(model: Path, hosts: tuple[Host, Host], tmp_path: Path, kind: str) -> None:
    far = start(hosts[1], model, 1, kind=kind)
    far.wait_for("Waiting for the first host at 10.231.0.1:29501")
    near = start(hosts[0], model, 0, kind=kind)
    near.wait_for("Listening on")
    assert [tokens(tmp_path, ids, 12) for ids in PROMPTS] == alone(model, PROMPTS, 12)
    near.process.send_signal(signal.SIGTERM)
    assert near.process.wait(20) == 0
    assert far.process.wait(40) == 0
    assert "The first host has ended, and so does this one" in far.log


def test_offline_the_first_host_is_whoever_has_the_prompts(model: Path, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    far = start(hosts[1], model, 1)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "hello world"}) + "\n")
    files = ["--input", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    sampling = ["--max-tokens", "20", "--temperature", "0"]
    nodes = [*SIZES["tensor"], "--nnodes", "2", "--master-addr", "10.231.0.1"]
    near = hosts[0].octavo("generate", ["generate", *files, "--model", str(model), *COMMON, *sampling, *nodes])
    assert near.process.wait(60) == 0, near.log
    assert far.process.wait(40) == 0
    one = LLM(
        str(model), device="cpu", threads=1, cpu_kernels="torch", num_gpu_blocks_override=64, max_num_seqs=4, max_model_len=512,
        kv_cache_dtype="float32",
    )  # fmt: skip
    with one as llm:
        (output,) = llm.generate("hello world", SamplingParams(max_tokens=20, temperature=0))
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == output.outputs[0].text


def test_a_killed_host_is_a_pause_for_streams(model: Path, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    near, far = start(hosts[0], model, 0), start(hosts[1], model, 1)
    near.wait_for("Listening on")
    (orphan,) = ranks(far)

    def lose() -> None:
        far.process.send_signal(signal.SIGKILL)
        far.process.wait(10)
        threading.Timer(1.0, lambda: start(hosts[1], model, 1)).start()  # as whatever supervises that host would

    assert tokens(tmp_path, PROMPTS[0], 400, lose) == alone(model, PROMPTS[:1], 400)[0]
    assert "Rank 1 (node 1, 10.231.0.2) has ended, or its host has." in near.log
    assert not orphan.is_running()


def test_a_killed_host_is_named_by_those_that_only_lose_it(model: Path, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The first host has a rank whose own connections to the lost ones break."""
    near, far = start(hosts[0], model, 0, "--engine-restarts", "0", kind="both"), start(hosts[1], model, 1, kind="both")
    near.wait_for("Listening on")
    with pytest.raises(AssertionError, match=r"Rank [23] \(node 1, 10.231.0.2\) has ended, or its host has"):
        tokens(tmp_path, PROMPTS[0], 500, lambda: far.process.send_signal(signal.SIGKILL))
    assert "Traceback" not in near.log
    assert "ERROR rank 1" not in near.log


def test_a_killed_engine_finds_the_other_host_again(model: Path, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    near, far = start(hosts[0], model, 0), start(hosts[1], model, 1)
    near.wait_for("Listening on")
    (before,) = ranks(far)
    (engine,) = ranks(near)
    assert tokens(tmp_path, PROMPTS[0], 400, engine.kill) == alone(model, PROMPTS[:1], 400)[0]
    assert far.process.poll() is None
    assert not before.is_running()
    os.kill(near.process.pid, signal.SIGKILL)  # the server itself, this time
    (after,) = ranks(far)
    after.wait(20)


def test_a_pulled_cable_is_noticed_and_named(model: Path, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    near, far = (
        start(hosts[0], model, 0, "--node-timeout", "10", "--engine-restarts", "0"),
        start(hosts[1], model, 1, "--node-timeout", "10"),
    )
    near.wait_for("Listening on")
    began = time.monotonic()
    with pytest.raises(AssertionError, match="has not been heard of"):  # told to the client: restarts are off
        tokens(tmp_path, PROMPTS[0], 500, lambda: unplug(hosts[1]))
    assert "Rank 1 (node 1, 10.231.0.2) has not been heard of for 10 s" in near.log
    assert time.monotonic() - began < 20
    assert far.process.wait(60) == 1
    assert "The first host has not answered at 10.231.0.1:29501 for 10 s" in far.log
    assert time.monotonic() - began < 40


def test_a_stopped_rank_elsewhere_is_noticed_and_named(model: Path, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    near, far = start(hosts[0], model, 0), start(hosts[1], model, 1)
    near.wait_for("Listening on")
    (rank,) = ranks(far)
    assert tokens(tmp_path, PROMPTS[0], 400, rank.suspend) == alone(model, PROMPTS[:1], 400)[0]
    assert "Rank 1 (node 1, 10.231.0.2) has not been heard of for 10 s: it is stopped" in near.log
    assert "was ended by" not in far.log, "it was us who ended it"


def test_a_killed_rank_elsewhere_is_put_down_to_the_signal_there(model: Path, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    near, far = start(hosts[0], model, 0), start(hosts[1], model, 1)
    near.wait_for("Listening on")
    (rank,) = ranks(far)
    assert tokens(tmp_path, PROMPTS[0], 400, rank.kill) == alone(model, PROMPTS[:1], 400)[0]
    assert "Rank 1 (node 1, 10.231.0.2) has ended, or its host has" in near.log
    assert "ERROR" in far.log and "Rank 1 was ended by SIGKILL (often the kernel's way" in far.log


def test_an_interface_that_is_not_there_is_said(model: Path, hosts: tuple[Host, Host]) -> None:
    near, far = start(hosts[0], model, 0), start(hosts[1], model, 1, GLOO_SOCKET_IFNAME="eth9")
    assert near.process.wait(60) == 1
    assert "Rank 1: GLOO_SOCKET_IFNAME=eth9: this host has no interface eth9, but lo, cable0." in near.log
    far.process.terminate()
    assert far.process.wait(10) == 0


@pytest.mark.parametrize(
    ("settings", "env", "words"),
    [
        (
            ["--max-num-seqs", "3"],
            {},
            "Node 1 does not have the settings of the first host: --max-num-seqs is 3 there and 4 on the first host",
        ),
        ([], {"OCTAVO_NODE_TOKEN": "other"}, "Its secret is not that of the first host (OCTAVO_NODE_TOKEN or --node-token-file)"),
        (["--pipeline-parallel-size", "2", "-tp", "1"], {}, "--tensor-parallel-size is 1 there and 2 on the first host"),
    ],
)
def test_a_host_that_does_not_fit_is_refused(
    model: Path, hosts: tuple[Host, Host], settings: list[str], env: dict[str, str], words: str
) -> None:
    near = start(hosts[0], model, 0, "--node-timeout", "12", OCTAVO_NODE_TOKEN="secret")
    far = start(hosts[1], model, 1, *settings, **{"OCTAVO_NODE_TOKEN": "secret", **env})
    assert far.process.wait(40) == 1
    assert words in far.log
    assert near.process.wait(40) == 1
    assert "Node 1 (rank 1) did not come to 10.231.0.1:29501 within 12 s" in near.log
    assert words in near.log


@pytest.mark.parametrize(
    ("rank", "settings", "env", "words"),
    [
        (0, ["--master-addr", "10.231.0.9"], {}, "--master-addr 10.231.0.9 is not an address of this host"),
        (0, ["--master-addr", "no.such.host.invalid"], {}, "--master-addr no.such.host.invalid: this name is not known here"),
        (0, ["--master-addr", "198.18.0.1", "--node-timeout", "1"], {}, "198.18.0.1 is not"),
        (0, ["--master-addr", "8.8.8.8"], {}, "8.8.8.8 is not a private address"),
        (1, ["--master-addr", "8.8.8.8"], {}, "8.8.8.8 is not a private address"),
        (1, ["--node-timeout", "1"], {}, "The first host has not answered at 10.231.0.1:29501 for 1 s (Connection refused)"),
        (1, ["--node-token-file", "/nonexistent"], {}, "--node-token-file /nonexistent: No such file or directory"),
        (0, ["--node-timeout", "1"], {}, "Node 1 (rank 1) did not come to 10.231.0.1:29501 within 1 s. Run the same command there"),
    ],
)
def test_what_is_not_there_is_said(
    model: Path, hosts: tuple[Host, Host], rank: int, settings: list[str], env: dict[str, str], words: str
) -> None:
    program = start(hosts[rank], model, rank, *settings, **env)
    assert program.process.wait(60) == 1
    assert words in program.log
