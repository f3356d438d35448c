"""/metrics: it parses, has the names that dashboards read, and counts what was done."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from octavo.observe.histogram import Histogram, one_two_five
from octavo.observe.throughput import throughput_line
from octavo.protocol.engine import EngineStats
from tests.support.http_server import RunningServer, running_server, wait_until

NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
    "vllm:cache_config_info", "vllm:lora_requests_info",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:request_success_total", "vllm:admission_rejections_total",
    "vllm:iteration_tokens_total_bucket", "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_bucket", "vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket", "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket", "vllm:request_decode_time_seconds_bucket",
    "http_requests_total", "http_request_duration_seconds_bucket", "http_request_size_bytes_sum", "http_response_size_bytes_count",
    "octavo:kv_waste_ratio", "process_resident_memory_bytes", "process_cpu_seconds_total",
}  # fmt: skip


def test_every_name_is_there_and_labelled(server: RunningServer) -> None:
    server.post("/v1/completions", {"prompt": "x"})
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = [s for family in text_string_to_metric_families(response.text) for s in family.samples]
    assert {s.name for s in samples} >= NAMES
    for sample in samples:
        if sample.name.startswith(("vllm:request", "vllm:num_", "vllm:prefix", "vllm:time", "octavo:")):
            assert sample.labels["model_name"] == "tiny", sample
            assert sample.labels["engine"] == "0", sample
    buckets = [s for s in samples if s.name == "vllm:time_to_first_token_seconds_bucket"]
    assert [s.value for s in buckets] == sorted(s.value for s in buckets)
    assert buckets[-1].labels["le"] == "+Inf"


def test_requests_are_counted(checkpoint: Path) -> None:
    with running_server(checkpoint) as server:
        server.script("", "hello world", delay=0.002)
        server.post("/v1/completions", {"prompt": "hello", "n": 2, "max_tokens": 10})
        server.events("/v1/completions", {"prompt": "hello", "max_tokens": 2})
        server.post("/v1/completions", {"prompt": ""})
        server.http.get("/v1/models/none")
        m = server.metric
        assert m("vllm:request_success_total", finished_reason="stop") == 2
        assert m("vllm:request_success_total", finished_reason="length") == 1
        assert m("vllm:request_success_total", finished_reason="abort") == 0
        assert m("vllm:prompt_tokens_total") == 2
        assert m("vllm:generation_tokens_total") == 8
        assert m("vllm:request_prompt_tokens_sum") == 2
        assert m("vllm:request_generation_tokens_sum") == 8
        assert m("vllm:request_params_n_sum") == 3
        assert m("vllm:request_params_max_tokens_sum") == 12
        assert m("vllm:time_to_first_token_seconds_count") == 2
        assert m("vllm:inter_token_latency_seconds_count") == 5
        assert m("vllm:time_per_output_token_seconds_count") == 5
        assert m("vllm:e2e_request_latency_seconds_count") == 2
        assert m("vllm:request_decode_time_seconds_count") == 2
        assert m("vllm:iteration_tokens_total_count") > 0
        assert m("vllm:num_requests_running") == 0
        assert m("http_requests_total", handler="/v1/completions", method="POST", status="2xx") == 2
        assert m("http_requests_total", handler="/v1/completions", method="POST", status="4xx") == 1
        assert m("http_requests_total", handler="/v1/models/{name:path}", status="4xx") == 1
        assert m("http_request_duration_seconds_count", handler="/v1/completions") == 3
        assert m("http_response_size_bytes_sum", handler="/v1/completions") > 100


def test_label_values_are_bounded(server: RunningServer) -> None:
    for i in range(20):
        server.http.get(f"/no/such/{i}")
        server.http.request(f"METHOD{i}", "/no/such")
    handlers = {
        s.labels["handler"]
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for s in family.samples
        if s.name == "http_requests_total"
    }
    assert "none" in handlers
    assert not any("such" in h for h in handlers)


def test_two_servers_do_not_share_counters(checkpoint: Path) -> None:
    with running_server(checkpoint) as one, running_server(checkpoint) as two:
        one.post("/v1/completions", {"prompt": "x"})
        assert one.metric("vllm:request_success_total") == 1
        assert two.metric("vllm:request_success_total") == 0


def test_running_gauge(server: RunningServer) -> None:
    server.script("slow", [30] * 100, delay=0.01)
    with server.http.stream("POST", "/v1/completions", json={"prompt": "slow", "max_tokens": 100, "stream": True}):
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
        assert server.http.get("/load").json()["server_load"] == 1
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_histogram_counts_and_bounds() -> None:
    h = Histogram([1, 2])
    for value, times in ((0.5, 1), (1, 2), (1.5, 1), (9, 3)):
        h.observe(value, times)
    assert h.count == 7
    assert one_two_five(60) == [1, 2, 5, 10, 20, 50]


def test_throughput_line() -> None:
    before = EngineStats(step=5, prompt_tokens=100, generation_tokens=10, prefix_queries=100, prefix_hits=0)
    after = EngineStats(
        step=9, prompt_tokens=300, generation_tokens=50, prefix_queries=200, prefix_hits=50, running=3, kv_blocks_total=10, kv_blocks_used=5
    )
    line = throughput_line(before, after, 10.0)
    assert line is not None
    for part in ("prompt 20.0", "output 4.0", "running 3", "50.0%"):
        assert part in line
    assert throughput_line(after, EngineStats(step=9), 10.0) is None
    restarted = throughput_line(after, EngineStats(step=2, generation_tokens=30), 10.0)
    assert restarted is not None
    assert "output 3.0" in restarted
