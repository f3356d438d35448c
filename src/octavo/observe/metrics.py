"""Prometheus metrics of one server. Owns every counter that the frontend keeps; engine totals are read at scrape time.

Names and labels are those that existing dashboards of vLLM read, old spellings included. There is no global registry: each
`Metrics` is a collector in a registry of its own. Of several API servers each counts for itself; who is asked adds the others'
`snapshot`s to its own counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from octavo.observe.histogram import Histogram, one_two_five
from octavo.protocol.engine import EngineStats, RequestTimes

LABELS = ("model_name", "engine")

SECONDS_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
SECONDS_ITL = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
SECONDS_REQUEST = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
SECONDS_HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

HISTOGRAMS: Mapping[str, str] = {
    "iteration_tokens_total": "Tokens computed in a step, over the steps seen.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a sequence.",
    "request_max_num_generation_tokens": "Longest output of a request.",
    "request_params_n": "Sequences asked for.",
    "request_params_max_tokens": "max_tokens asked for.",
    "time_to_first_token_seconds": "From arrival (before tokenising) to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a sequence.",
    "time_per_output_token_seconds": "Old name of inter_token_latency_seconds.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "Waiting to be scheduled.",
    "request_inference_time_seconds": "From scheduled to the last token.",
    "request_prefill_time_seconds": "From scheduled to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
}


class Finished(Protocol):
    """What is counted of a request of the engine (one prompt, n sequences) that has ended: the frontend's `FinishedRequest`."""

    @property
    def times(self) -> RequestTimes: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def end_time(self) -> float: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def finish_reasons(self) -> tuple[str, ...]: ...
    @property
    def n(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def token_gaps(self) -> tuple[float, ...]: ...


class HttpCounts(msgspec.Struct):
    """Rows of (labels, values)."""

    requests: list[tuple[tuple[str, str, str], int]]
    seconds: list[tuple[tuple[str, str], tuple[list[int], float]]]
    request_bytes: list[tuple[str, tuple[int, int]]]
    response_bytes: list[tuple[str, tuple[int, int]]]


class Snapshot(msgspec.Struct):
    """What one API server has counted."""

    histograms: dict[str, tuple[list[int], float]]
    success: dict[str, int]
    rejected: int
    http: HttpCounts
    process: dict[str, float]
    """Figures of the process itself; those that end in `_total` outlast it."""


_ALIASES = {"time_per_output_token_seconds": "inter_token_latency_seconds"}
"""Histograms under a second name."""


class FrontCounts:
    """What a frontend counts, or several of them together."""

    def __init__(self, max_model_len: int) -> None:
        tokens = one_two_five(max_model_len)
        bounds: dict[str, tuple[float, ...] | list[float]] = {
            "iteration_tokens_total": TOKENS_STEP,
            "request_prompt_tokens": tokens,
            "request_generation_tokens": tokens,
            "request_max_num_generation_tokens": tokens,
            "request_params_n": (1, 2, 5, 10, 20),
            "request_params_max_tokens": tokens,
            "time_to_first_token_seconds": SECONDS_TTFT,
            "inter_token_latency_seconds": SECONDS_ITL,
        }
        self.histograms = {name: Histogram(bounds.get(name, SECONDS_REQUEST)) for name in HISTOGRAMS if name not in _ALIASES}
        self.success: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.rejected = 0
        self.http = HttpMetrics()
        self.process: Counter[str] = Counter()

    def snapshot(self) -> Snapshot:
        counted = {name: histogram.counts for name, histogram in self.histograms.items()}
        return Snapshot(counted, dict(self.success), self.rejected, self.http.counts, process_figures())

    def add(self, other: Snapshot, *, alive: bool = True) -> None:
        """Count in another API server's counts; of one that has ended, only what it did."""
        for name, (counts, total) in other.histograms.items():
            self.histograms[name].add(counts, total)
        self.success.update(other.success)
        self.rejected += other.rejected
        self.http.add(other.http)
        self.process.update({name: value for name, value in other.process.items() if alive or name.endswith("_total")})

    def collect(self, labels: tuple[str, str]) -> Iterator[Metric]:
        success = CounterMetricFamily("vllm:request_success", "Finished sequences.", labels=(*LABELS, "finished_reason"))
        for reason, count in self.success.items():
            success.add_metric((*labels, reason), count)
        yield success
        for name, help_text in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
            self.histograms[_ALIASES.get(name, name)].add_to(family, labels)
            yield family
        yield from self.http.collect()

    def collect_process(self) -> Iterator[Metric]:
        for name, value in self.process.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(name.removesuffix("_total"), "Over all API servers.", value=value)


def process_figures() -> dict[str, float]:
    """CPU seconds, memory and open files of this process."""
    registry = CollectorRegistry(auto_describe=False)
    found = {sample.name: sample.value for family in ProcessCollector(registry=registry).collect() for sample in family.samples}
    return {name: value for name, value in found.items() if name not in ("process_start_time_seconds", "process_max_fds")}


class _Total(Collector):
    """The counts of all API servers together, and the engine's."""

    def __init__(self, engine: Iterator[Metric], counts: FrontCounts, labels: tuple[str, str]) -> None:
        self._metrics = [*engine, *counts.collect(labels), *counts.collect_process()]

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


class Metrics(Collector):
    """All metrics of a server. Methods are called from its event loop only."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        block_size: int,
        stats: Callable[[], EngineStats],
        cache_info: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._labels = (model_name, "0")
        self._stats = stats
        self._block_size = block_size
        self._cache_info = cache_info
        self._max_model_len = max_model_len
        self._counts = FrontCounts(max_model_len)
        self._last_step = -1
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    # Recording

    def step(self, stats: EngineStats) -> None:
        """A snapshot of the engine; the same step twice counts once."""
        if stats.step != self._last_step and stats.step_tokens:
            self._last_step = stats.step
            self._counts.histograms["iteration_tokens_total"].observe(stats.step_tokens)

    def rejected(self) -> None:
        """A request was refused because the queue is full."""
        self._counts.rejected += 1

    def finished(self, done: Finished) -> None:
        """A request has ended, however it did."""
        h = self._counts.histograms
        for reason in done.finish_reasons:
            self._counts.success[reason] += 1
        h["request_prompt_tokens"].observe(done.num_prompt_tokens)
        # Siblings are reported together: each counts with the mean.
        h["request_generation_tokens"].observe(done.num_output_tokens / done.n, done.n)
        h["request_max_num_generation_tokens"].observe(done.num_output_tokens / done.n)
        h["request_params_n"].observe(done.n)
        h["request_params_max_tokens"].observe(done.max_tokens)
        h["e2e_request_latency_seconds"].observe(done.end_time - done.arrival_time)
        for gap in done.token_gaps:
            h["inter_token_latency_seconds"].observe(gap)
        t = done.times
        if t.first_token:
            h["time_to_first_token_seconds"].observe(max(0.0, t.first_token - done.arrival_time))
        if not t.scheduled:
            return
        h["request_queue_time_seconds"].observe(max(0.0, t.scheduled - t.queued))
        if t.first_token:
            last = max(t.first_token, t.last_token)
            h["request_prefill_time_seconds"].observe(max(0.0, t.first_token - t.scheduled))
            h["request_decode_time_seconds"].observe(last - t.first_token)
            h["request_inference_time_seconds"].observe(max(0.0, last - t.scheduled))

    @property
    def http(self) -> HttpMetrics:
        return self._counts.http

    # Reading

    def snapshot(self) -> bytes:
        """What was counted here, for another API server to add to its own counts."""
        return msgspec.msgpack.encode(self._counts.snapshot())

    def render(self, living: Sequence[bytes] = (), gone: Sequence[bytes] = ()) -> bytes:
        """The text that /metrics serves.

        Args:
            living: snapshots of the other API servers.
            gone: those of API servers that have ended.
        """
        if not living and not gone:
            return generate_latest(self.registry)
        total = FrontCounts(self._max_model_len)
        total.add(self._counts.snapshot())
        for alive, snapshots in ((True, living), (False, gone)):
            for snapshot in snapshots:
                total.add(msgspec.msgpack.decode(snapshot, type=Snapshot), alive=alive)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Total(self._engine_metrics(self._stats(), total.rejected), total, self._labels))
        PlatformCollector(registry=registry)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_metrics(self._stats(), self._counts.rejected)
        yield from self._counts.collect(self._labels)

    def _engine_metrics(self, s: EngineStats, rejected: int) -> Iterator[Metric]:
        usage = s.kv_blocks_used / s.kv_blocks_total if s.kv_blocks_total else 0.0
        room = s.kv_blocks_used * self._block_size
        waste = 1.0 - s.kv_tokens_live / room if room else 0.0
        gauges = (
            ("vllm:num_requests_running", "Sequences in the running batch.", s.running),
            ("vllm:num_requests_waiting", "Sequences waiting to be scheduled.", s.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks held by live sequences, 0 to 1.", usage),
            ("vllm:gpu_cache_usage_perc", "Old name of kv_cache_usage_perc.", usage),
            ("octavo:kv_waste_ratio", "Share of the used KV blocks' room that holds no token, 0 to 1.", max(0.0, waste)),
            ("octavo:replicas", "Engines, without those that are gone for good.", s.replicas),
            ("octavo:kv_blocks_total", "KV blocks.", s.kv_blocks_total),
            ("octavo:kv_blocks_used", "KV blocks held by live sequences.", s.kv_blocks_used),
            ("octavo:kv_blocks_cached", "KV blocks that hold evictable cached prefixes.", s.kv_blocks_cached),
        )
        for name, help_text, value in gauges:
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        counters = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", s.prefix_hits),
            ("vllm:gpu_prefix_cache_queries", "Old name of prefix_cache_queries.", s.prefix_queries),
            ("vllm:gpu_prefix_cache_hits", "Old name of prefix_cache_hits.", s.prefix_hits),
            ("vllm:num_preemptions", "Preempted sequences.", s.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens processed.", s.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", s.generation_tokens),
            ("vllm:admission_rejections", "Requests refused because the queue was full.", s.rejected + rejected),
            ("octavo:recomputed_tokens", "Tokens computed again after preemption.", s.recomputed_tokens),
            ("octavo:kv_block_evictions", "Cached KV blocks evicted.", s.evictions),
            ("octavo:kv_copy_on_write", "KV blocks copied on write.", s.cow_copies),
            ("octavo:steps", "Engine steps.", s.step),
        )
        for name, help_text, value in counters:
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        cache = self._cache_info()
        info = GaugeMetricFamily("vllm:cache_config_info", "The cache's configuration, as labels.", labels=("engine", *cache))
        info.add_metric((self._labels[1], *cache.values()), 1)
        yield info
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info", "Requests by LoRA adapter.", labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        )
        lora.add_metric(("0", "", ""), 0)
        yield lora


class HttpMetrics:
    """Counts of HTTP requests by route, method and class of status."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._request_bytes: dict[str, tuple[int, int]] = {}
        self._response_bytes: dict[str, tuple[int, int]] = {}

    def record(self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int) -> None:
        """`handler` is a route's path template, so that the number of series is bounded."""
        self._requests[handler, method, f"{status // 100}xx"] += 1
        self._seconds.setdefault((handler, method), Histogram(SECONDS_HTTP)).observe(seconds)
        for table, size in ((self._request_bytes, request_bytes), (self._response_bytes, response_bytes)):
            count, total = table.get(handler, (0, 0))
            table[handler] = (count + 1, total + size)

    @property
    def counts(self) -> HttpCounts:
        seconds = [(route, histogram.counts) for route, histogram in self._seconds.items()]
        return HttpCounts(list(self._requests.items()), seconds, list(self._request_bytes.items()), list(self._response_bytes.items()))

    def add(self, other: HttpCounts) -> None:
        """Count in what another API server has counted."""
        self._requests.update(dict(other.requests))
        for route, (counts, total) in other.seconds:
            self._seconds.setdefault(route, Histogram(SECONDS_HTTP)).add(counts, total)
        for table, rows in ((self._request_bytes, other.request_bytes), (self._response_bytes, other.response_bytes)):
            for handler, (count, size) in rows:
                before = table.get(handler, (0, 0))
                table[handler] = (before[0] + count, before[1] + size)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("http_requests", "HTTP requests.", labels=("handler", "method", "status"))
        for key, count in self._requests.items():
            requests.add_metric(key, count)
        yield requests
        seconds = HistogramMetricFamily("http_request_duration_seconds", "Duration of HTTP requests.", labels=("handler", "method"))
        for route, histogram in self._seconds.items():
            histogram.add_to(seconds, route)
        yield seconds
        for name, what, table in (
            ("http_request_size_bytes", "Size of request bodies.", self._request_bytes),
            ("http_response_size_bytes", "Size of reply bodies.", self._response_bytes),
        ):
            summary = SummaryMetricFamily(name, what, labels=("handler",))
            for handler, (count, total) in table.items():
                summary.add_metric((handler,), count_value=count, sum_value=total)
            yield summary
