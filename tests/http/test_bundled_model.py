"""The server over the bundled model: real words, the same streamed and whole, cached prefixes, scores that add up."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.http_server import parse_events, wait_until
from tests.support.server_process import ServerProcess, server_process

MODEL = Path(os.environ.get("OCTAVO_TEST_MODEL") or Path.home() / ".cache/octavo/models/SmolLM2-135M-Instruct.Q4_1.gguf")
pytestmark = [pytest.mark.model, pytest.mark.skipif(not MODEL.exists(), reason=f"the bundled model is not at {MODEL}")]

CAPITAL = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # The first token of the answer is nearly a tie: rounded activations may decide it otherwise.
    engine = {"model": str(MODEL), "device": "cpu", "cpu_activations": "float32", "max_model_len": 1024, "served_model_name": ["smol"]}
    with server_process(tmp_path_factory.mktemp("bundled"), engine) as server:
        server.wait_ready(120)
        yield server


def test_chat_streamed_and_whole(server: ServerProcess) -> None:
    whole = server.http.post("/v1/chat/completions", json=CAPITAL).json()
    text = whole["choices"][0]["message"]["content"]
    assert "Paris" in text
    with server.http.stream("POST", "/v1/chat/completions", json={**CAPITAL, "stream": True}) as response:
        events = parse_events(response.read().decode())
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text
    again = server.http.post("/v1/chat/completions", json=CAPITAL).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_scores_of_a_prompt(server: ServerProcess) -> None:
    body = {"prompt": "The capital of France is Paris", "echo": True, "max_tokens": 0, "logprobs": 1}
    scores = server.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert "".join(scores["tokens"]) == body["prompt"]
    assert scores["token_logprobs"][0] is None
    assert all(-20 < p <= 0 for p in scores["token_logprobs"][1:])
    assert math.exp(scores["token_logprobs"][-1]) > 0.2
    assert [top is None for top in scores["top_logprobs"]] == [True] + [False] * (len(scores["tokens"]) - 1)


def test_a_forced_word(server: ServerProcess) -> None:
    ids = server.http.post("/tokenize", json={"prompt": " zebra", "add_special_tokens": False}).json()["tokens"]
    body = {"prompt": "Once", "logit_bias": {str(ids[0]): 100}, "max_tokens": 1, "temperature": 0}
    assert (
        server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        == server.http.post("/detokenize", json={"tokens": ids[:1]}).json()["prompt"]
    )


def test_beams_of_a_real_model(server: ServerProcess) -> None:
    body = {"prompt": "The sky is", "use_beam_search": True, "n": 3, "max_tokens": 5, "temperature": 0}
    texts = [c["text"] for c in server.http.post("/v1/completions", json=body).json()["choices"]]
    assert len(set(texts)) == 3


def test_everything_is_given_back(server: ServerProcess) -> None:
    server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert wait_until(lambda: server.metric("octavo:kv_blocks_used") == 0)
    assert server.metric("octavo:kv_waste_ratio") == 0


def test_a_grammar_survives_the_engine_behind_two_api_servers(tmp_path: Path) -> None:
    """The tokens' texts reach every new engine, whichever API server had sent them first."""
    properties = {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": "Invent a person."}], "max_tokens": 100, "temperature": 0, "response_format": form}
    engine = {"model": str(MODEL), "device": "cpu", "max_model_len": 1024}
    with server_process(tmp_path, engine, api_server_count=2) as server:
        server.wait_ready(120)

        def ask() -> str:
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            return str(reply.json()["choices"][0]["message"]["content"])

        expected = ask()
        assert json.loads(expected).keys() == properties.keys()
        (pid,) = [pid for pid in server.children() if "octavo.engine" in " ".join(psutil.Process(pid).cmdline())]
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(ask) for _ in range(6)]
            assert wait_until(lambda: server.http.get("/load").json()["running"] >= 1)
            os.kill(pid, signal.SIGKILL)
            assert [answer.result(120) for answer in answers] == [expected] * 6
