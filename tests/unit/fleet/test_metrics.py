"""One text of the metrics of several replicas."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.fleet.metrics import merged


def text(value: float) -> bytes:
    registry = CollectorRegistry()
    Gauge("plain", "No labels.", registry=registry).set(value)
    Counter("tokens", "With a } and a space in a label.", ["model"], registry=registry).labels("a } b").inc(value)
    Histogram("seconds", "Buckets.", buckets=(1.0, 5.0), registry=registry).observe(value)
    return generate_latest(registry)


def test_every_sample_says_whose_it_is_and_nothing_is_lost() -> None:
    families = list(text_string_to_metric_families(merged({"b": text(2), "a": text(3)}).decode()))
    assert len({family.name for family in families}) == len(families)
    alone = {
        name: {(s.name, tuple(sorted(s.labels.items()))): s.value for f in text_string_to_metric_families(t.decode()) for s in f.samples}
        for name, t in (("a", text(3)), ("b", text(2)))
    }
    together: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {"a": {}, "b": {}}
    for family in families:
        for sample in family.samples:
            replica = sample.labels.pop("replica")
            together[replica][sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    created = {key for key in alone["a"] if key[0].endswith("_created")}
    assert {n: {k: v for k, v in samples.items() if k not in created} for n, samples in together.items()} == {
        n: {k: v for k, v in samples.items() if k not in created} for n, samples in alone.items()
    }


def test_no_replicas_have_no_metrics() -> None:
    assert merged({}) == b""
