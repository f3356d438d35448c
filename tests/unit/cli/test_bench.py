"""Benchmarks measure what they say: against a scripted server with known delays and token counts."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.cli import main
from octavo.cli.bench.offline import answered
from octavo.cli.bench.results import percentile, summary
from octavo.cli.bench.serve import Sample, Target, drive, measure, parse_goodput, report
from octavo.cli.bench.workload import BenchRequest, Span, dataset_requests, random_requests, span
from octavo.cli.http_client import HttpClient
from octavo.cli.parser import UsageError
from octavo.errors import ConfigError, OctavoError
from tests.support.openai_stub import MODELS, StubServer, completion_events


def target(url: str, *, chat: bool = False) -> Target:
    return Target(HttpClient(url), "/v1/chat/completions" if chat else "/v1/completions", "stub-model", chat, {})


async def test_one_stream_is_timed() -> None:
    first, *rest = completion_events("abc", usage={"prompt_tokens": 7, "completion_tokens": 30})
    with StubServer(lambda path, body: [0.2, first, 0.1, *rest]) as server:
        sample = await measure(target(server.url), BenchRequest([1, 2], 3))
    assert sample.error == ""
    assert (sample.prompt_tokens, sample.output_tokens) == (7, 30)  # what the server says, not the number of chunks
    assert sample.ttft >= 0.2
    assert sample.ttft + sample.itl[0] >= 0.2 + 0.1  # the gap alone is shorter when the first chunk was read late
    assert sample.itl[0] > 0
    assert len(sample.itl) == 2
    assert sample.ttft + sum(sample.itl) == pytest.approx(sample.e2el)
    assert sample.tpot == pytest.approx((sample.e2el - sample.ttft) / 29)
    assert server.bodies[0]["prompt"] == [1, 2]
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


async def test_the_empty_first_chat_chunk_is_not_a_token() -> None:
    role, *rest = completion_events("ab", chat=True)
    with StubServer(lambda path, body: [role, 0.2, *rest]) as server:
        sample = await measure(target(server.url, chat=True), BenchRequest([1, 2, 3], 3))
    assert sample.ttft >= 0.2
    assert len(server.bodies[0]["messages"][0]["content"].split()) == 3


async def test_tokens_without_text_count_by_their_ids() -> None:
    """A made-up model says tokens that its tokenizer does not know."""
    silent = [{"choices": [{"text": "", "token_ids": [n]}]} for n in range(3)]
    with StubServer(lambda path, body: [0.1, *silent, {"choices": [], "usage": {"completion_tokens": 3}}]) as server:
        sample = await measure(target(server.url), BenchRequest([1, 2], 3))
    assert not sample.error
    assert (sample.output_tokens, len(sample.itl)) == (3, 2)
    assert sample.ttft >= 0.1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, {"error": {"message": "oh"}}), "oh"),
        ([{"error": {"message": "mid"}}], "mid"),
        ([], "held no token"),
        (["not json"], "Expecting"),
    ],
)
async def test_failures_are_counted_not_raised(answer: Any, error: str) -> None:
    with StubServer(lambda path, body: answer) as server:
        sample = await measure(target(server.url), BenchRequest("x", 3))
    assert error in sample.error


async def test_concurrency_is_bounded_and_every_request_sent() -> None:
    with StubServer(lambda path, body: [0.05, *completion_events("ab")]) as server:
        samples, _ = await drive(target(server.url), [BenchRequest("x", 2)] * 20, math.inf, 4)
    assert len(samples) == 20
    assert not any(s.error for s in samples)
    assert server.most_open == 4


async def test_the_request_rate_paces_arrivals() -> None:
    with StubServer(lambda path, body: completion_events("ab")) as server:
        _, seconds = await drive(target(server.url), [BenchRequest("x", 2)] * 10, 50.0, None, seed=1)
        gaps = random.Random(1)
        due = sum(gaps.expovariate(50.0) for _ in range(9))
    assert seconds >= due


def test_the_result_counts_only_what_met_the_limits() -> None:
    fast = Sample(prompt_tokens=10, output_tokens=11, ttft=0.1, itl=[0.01] * 10, e2el=0.2)
    slow = Sample(prompt_tokens=10, output_tokens=11, ttft=0.5, itl=[0.1] * 10, e2el=1.5)
    failed = Sample(error="x")
    result = report([fast, slow, failed], 2.0, parse_goodput(["ttft:300", "tpot:50"]))
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 11.0
    assert result["request_goodput"] == 0.5
    assert result["mean_ttft_ms"] == pytest.approx(300)
    assert result["median_tpot_ms"] == pytest.approx((10 + 100) / 2)
    assert result["p99_e2el_ms"] == pytest.approx(200 + 0.99 * 1300)


@pytest.mark.parametrize("limit", ["ttft", "ttft:fast", "itl:3"])
def test_bad_goodput_limits(limit: str) -> None:
    with pytest.raises(UsageError):
        parse_goodput([limit])


def test_bench_serve_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "r.json"
    with StubServer(lambda path, body: MODELS if path == "/v1/models" else completion_events("abcd")) as server:
        code = main(
            [
                "bench",
                "serve",
                "--base-url",
                server.url,
                "--num-prompts",
                "6",
                "--random-input-len",
                "3-9",
                "--random_output_len",
                "4",
                "--max-concurrency",
                "2",
                "--ignore-eos",
                "--goodput",
                "ttft:10000",
                "--result-filename",
                str(out),
            ]
        )
    assert code == 0
    result = json.loads(out.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (6, 24)
    assert result["request_goodput"] == result["request_throughput"]
    assert result["workload"]["input_len"] == "3-9"
    assert "octavo" in result["environment"]
    assert "time to first token" in capsys.readouterr().out
    bodies = [b for b in server.bodies if b]
    assert len(bodies) == 7  # one warm-up
    assert all(b["ignore_eos"] and b["max_tokens"] == 4 and 3 <= len(b["prompt"]) <= 9 for b in bodies)


def test_bench_serve_says_why_nothing_works(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(lambda path, body: MODELS if path == "/v1/models" else (400, {"error": {"message": "no such thing"}})) as server:
        assert main(["bench", "serve", "--base-url", server.url]) == 1
    assert "no such thing" in capsys.readouterr().err


def test_bench_throughput_end_to_end(tmp_path: Path, engine_flags: list[str]) -> None:
    out = tmp_path / "t.json"
    flags = ["--num-prompts", "5", "--input-len", "4-8", "--output-len", "3", "--output-json", str(out)]
    assert main(["bench", "throughput", *flags, *engine_flags]) == 0
    result = json.loads(out.read_text())
    assert (result["num_requests"], result["output_tokens"]) == (5, 15)
    assert result["total_tokens"] == result["prompt_tokens"] + 15
    assert result["output_tokens_per_second"] == pytest.approx(15 / result["elapsed_time"])
    assert result["engine"]["device"] == "scripted"


def test_bench_latency_end_to_end(tmp_path: Path, engine_flags: list[str]) -> None:
    out = tmp_path / "l.json"
    flags = ["--batch-size", "3", "--input-len", "8", "--output-len", "4", "--num-iters", "2", "--num-iters-warmup", "1"]
    assert main(["bench", "latency", *flags, "--output-json", str(out), *engine_flags]) == 0
    result = json.loads(out.read_text())
    assert len(result["latencies"]) == 2
    assert result["p50_ttft_ms"] <= result["p50_batch_ms"]
    assert result["mean_itl_ms"] > 0


def test_requests_that_fail_are_no_measurement() -> None:
    fine, failed = (SimpleNamespace(outputs=[SimpleNamespace(error=e)]) for e in (None, "layer 3 is not finite"))
    assert answered([fine, fine]) == [fine, fine]
    with pytest.raises(OctavoError, match="1 of 2 requests failed, so nothing was measured: layer 3 is not finite"):
        answered([fine, failed])


def test_random_workloads_repeat_and_stay_in_range() -> None:
    a = random_requests(50, Span(100, 1024), Span(5, 9), seed=3)
    assert a == random_requests(50, Span(100, 1024), Span(5, 9), seed=3)
    assert a != random_requests(50, Span(100, 1024), Span(5, 9), seed=4)
    assert all(100 <= len(r.prompt) <= 1024 and 5 <= r.output_len <= 9 for r in a)
    shared = random_requests(5, Span(4, 4), Span(1, 1), prefix_len=3)
    assert len({tuple(r.prompt[:3]) for r in shared}) == 1
    assert len({tuple(r.prompt) for r in shared}) == 5


def test_the_random_workload_is_the_common_one() -> None:
    """Drawn as the published comparison draws it, so that numbers can be set side by side."""
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(8)]
    outputs = [random.randint(100, 1024) for _ in range(8)]
    ours = random_requests(8, Span(100, 1024), Span(100, 1024))
    assert [r.prompt for r in ours] == prompts
    assert [r.output_len for r in ours] == outputs


def test_data_sets(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "p", "output_len": 7}\n')
    (tmp_path / "c.json").write_text(
        json.dumps([{"conversations": [{"value": "q"}, {"value": "a b c d e f g h i j"}]}, {"conversations": []}])
    )
    assert {r.prompt for r in dataset_requests(str(tmp_path / "a.txt"), None, None)} == {"one", "two"}
    assert dataset_requests(str(tmp_path / "b.jsonl"), 3, None) == [BenchRequest("p", 7)] * 3
    assert dataset_requests(str(tmp_path / "c.json"), None, None) == [BenchRequest("q", 13)]
    assert dataset_requests(str(tmp_path / "b.jsonl"), 1, Span(2, 2)) == [BenchRequest("p", 2)]
    for bad in ("none.txt", "bad.jsonl", "empty.txt"):
        if bad != "none.txt":
            (tmp_path / bad).write_text("{" if "bad" in bad else "")
        with pytest.raises(ConfigError, match=bad):
            dataset_requests(str(tmp_path / bad), None, None)


def test_spans() -> None:
    assert (span("5"), span("1k-2K")) == (Span(5, 5), Span(1000, 2048))
    for bad in ("0", "9-3", "x", ""):
        with pytest.raises(Exception, match=r"\d|size|length"):
            span(bad)


def test_percentiles_and_summaries() -> None:
    assert [percentile([1, 2, 3, 4, 5], p) for p in (0, 50, 75, 100)] == [1, 3, 4, 5]
    assert percentile([1, 2], 50) == 1.5
    assert math.isnan(percentile([], 50))
    assert summary("x", [0.1, 0.3])["std_x_ms"] == pytest.approx(100)
    assert summary("x", []) == {}


def test_jobs_are_taken_only_when_there_is_room() -> None:
    from octavo.cli.jobs import run_jobs

    taken: list[int] = []

    async def check() -> list[int]:
        def source() -> Any:
            for i in range(10):
                taken.append(i)
                yield i

        async def work(i: int) -> int:
            await asyncio.sleep(0.001)
            return i

        results = []
        async for r in run_jobs(source(), work, 3):
            results.append(r)
            assert len(taken) <= len(results) + 3
        return results

    start = time.monotonic()
    assert sorted(asyncio.run(check())) == list(range(10))
    assert time.monotonic() - start < 10


def test_bench_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kv.json"
    flags = ["--requests", "12", "--input-len", "20-60", "--output-len", "10-40", "--output-json", str(out)]
    assert main(["bench", "kv", *flags]) == 0
    result = json.loads(out.read_text())
    assert result["requests"] == 12
    assert result["paged_average"] < result["contiguous_max_tokens"] < result["contiguous_max_model_len"] < 1
    assert f"{result['paged_average']:.1%} of the reserved memory" in capsys.readouterr().out
