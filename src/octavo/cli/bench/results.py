"""Numbers of a benchmark: percentiles, the table on stdout, the JSON file with everything needed to judge and repeat it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo._version import __version__
from octavo.cli.parser import CommandParser, Namespace

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile (0..100), linear between neighbours; nan of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = (len(ordered) - 1) * p / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary(name: str, seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, float | None]:
    """mean_, median_, std_ and pNN_ of durations, in milliseconds, under the key names that such files commonly have."""
    if not seconds:
        return {}
    mean = sum(seconds) / len(seconds)
    std = (sum((s - mean) ** 2 for s in seconds) / len(seconds)) ** 0.5
    found = {f"mean_{name}_ms": mean, f"median_{name}_ms": percentile(seconds, 50), f"std_{name}_ms": std}
    found |= {f"p{p:g}_{name}_ms": percentile(seconds, p) for p in percentiles}
    return {key: round(value * 1000, 4) for key, value in found.items()}


def environment() -> dict[str, Any]:
    """Versions and machine, without importing anything large."""
    from octavo.config.device import cpu_name

    versions = {}
    for package in ("torch", "transformers", "triton", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "octavo": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **versions,
    }


def add_result_flags(parser: CommandParser) -> None:
    parser.group("result").add_argument(
        "--output-json", "--result-filename", dest="output_json", metavar="FILE", help="Write the result as JSON."
    )


def publish(options: Namespace, title: str, rows: Sequence[tuple[str, str]], result: dict[str, Any]) -> None:
    """Print the table, and write the result where --output-json says."""
    print_table(title, rows)
    if path := getattr(options, "output_json", None):
        write_json(Path(path), {"bench": title, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **result, **_env()})
        print(f"Written to {path}.", file=sys.stderr)


def _env() -> dict[str, Any]:
    return {"environment": environment()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Two columns on stdout."""
    width = max(len(name) for name, _ in rows)
    print(f"{title}")
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    sys.stdout.flush()


def latency_rows(label: str, seconds: Sequence[float]) -> list[tuple[str, str]]:
    """One row with mean and percentiles in milliseconds."""
    if not seconds:
        return [(label, "no data")]
    mean = sum(seconds) / len(seconds) * 1000
    parts = [f"p{p} {percentile(seconds, p) * 1000:.1f}" for p in PERCENTILES]
    return [(label, f"mean {mean:.1f}  " + "  ".join(parts) + " ms")]
