"""Counts of several API servers added up: what one server would have counted, and never less than was shown before."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from octavo.observe.metrics import Metrics
from octavo.protocol.engine import EngineStats, RequestTimes


@dataclass(frozen=True)
class Done:
    """A `Finished`."""

    tokens: int
    seconds: float
    reason: str
    times: RequestTimes = RequestTimes(1.0, 1.5, 2.0, 3.0)
    arrival_time: float = 1.0
    num_prompt_tokens: int = 7
    n: int = 1
    max_tokens: int = 100
    token_gaps: tuple[float, ...] = (0.01, 0.2)

    @property
    def end_time(self) -> float:
        return 1.0 + self.seconds

    @property
    def num_output_tokens(self) -> int:
        return self.tokens

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        return (self.reason,)


def metrics() -> Metrics:
    return Metrics("m", 4096, 16, lambda: EngineStats(step=5, step_tokens=3, prompt_tokens=70, generation_tokens=90, rejected=2))


def record(into: Metrics, done: Done) -> None:
    into.finished(done)
    into.http.record("/v1/completions", "POST", 200, done.seconds, 10, 20)
    if done.reason == "error":
        into.rejected()


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text.decode())
    found = [s for f in families for s in f.samples if s.name.startswith(("vllm:", "http_", "octavo:"))]
    names = [(s.name, tuple(sorted(s.labels.items()))) for s in found]
    assert len(set(names)) == len(names), "no series twice"
    return dict(zip(names, [s.value for s in found], strict=True))


requests = st.lists(
    st.tuples(st.integers(0, 2), st.builds(Done, st.integers(0, 5000), st.floats(0, 2000), st.sampled_from(["stop", "length", "error"]))),
    max_size=30,
)


@given(requests)
def test_together_they_count_what_one_would(done: list[tuple[int, Done]]) -> None:
    alone, several = metrics(), [metrics() for _ in range(3)]
    for who, one in done:
        record(alone, one)
        record(several[who], one)
    expected = samples(alone.render())
    whole = samples(several[0].render([m.snapshot() for m in several[1:]]))
    with_a_dead_one = samples(several[0].render([several[1].snapshot()], [several[2].snapshot()]))
    for found in (whole, with_a_dead_one):
        assert found.keys() == expected.keys()
        assert all(abs(found[name] - value) <= 1e-9 * max(1.0, abs(value)) for name, value in expected.items())


def test_process_figures_are_sums_and_those_of_the_dead_only_totals() -> None:
    one, two = metrics(), metrics()

    def figures(text: bytes) -> dict[str, float]:
        return {s.name: s.value for f in text_string_to_metric_families(text.decode()) for s in f.samples if s.name.startswith("process_")}

    both, dead = figures(one.render([two.snapshot()])), figures(one.render([], [two.snapshot()]))
    assert both["process_resident_memory_bytes"] > 1.5 * dead["process_resident_memory_bytes"] > 0
    assert dead["process_cpu_seconds_total"] > 0
    assert abs(both["process_cpu_seconds_total"] - dead["process_cpu_seconds_total"]) < 0.5
