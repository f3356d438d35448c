"""The start-up report: where the memory went, how much fits, and where the time went. One table, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from octavo.config.sizes import format_bytes
from octavo.config.types import EngineConfig
from octavo.protocol.engine import EngineReady
from octavo.protocol.step import window_blocks

SHORT_CONTEXT = 1000
"""Tokens of a typical short conversation, for the "how many fit" line."""


def capacity(ready: EngineReady, tokens: int) -> int:
    """How many sequences of `tokens` tokens the cache holds at once, nothing shared. Block 0 is reserved."""
    blocks = -(-tokens // ready.block_size)
    if ready.window is not None:
        blocks = min(blocks, window_blocks(ready.window, ready.block_size))
    return (ready.num_blocks - 1) // blocks if blocks else 0


def report_rows(ready: EngineReady, config: EngineConfig) -> list[tuple[str, str]]:
    """The lines of the report: what, and how much."""
    tokens = (ready.num_blocks - 1) * ready.block_size
    used = ready.weights_bytes + ready.activation_bytes + ready.cache_bytes
    if config.device.kind == "cpu":  # which the ranks of a host share
        used *= config.parallel.per_node
    free = ready.total_bytes - ready.other_bytes - used
    where = "host memory" if config.device.kind == "cpu" else "GPU memory"
    count = config.device.threads
    threads = f", {count} thread{'s' * (count != 1)}" if config.device.kind == "cpu" else ""
    if config.model.pooling is not None:
        return [
            ("Model", f"{config.model.name} ({config.model.architecture})"),
            ("Runs on", f"{ready.device}{threads}, {ready.dtype}"),
            ("Makes", f"{len(config.model.pooling.labels)} classes" if config.model.pooling.labels else f"{ready.embedding_size} numbers"),
            ("Weights", _weights(ready, config)),
            ("Fits", f"prompts of up to {ready.max_model_len:,} tokens"),
            ("Started in", _phases(ready)),
        ]
    return [
        ("Model", f"{config.model.name} ({config.model.architecture})"),
        ("Runs on", f"{ready.device}{threads}, {ready.dtype}, attention {ready.attention}"),
        *([("Ranks", _ranks(config))] if config.parallel.world > 1 else []),
        *([("Sums over GPUs", ready.sums)] if ready.sums else []),
        ("Weights", _weights(ready, config)),
        ("Activations", format_bytes(ready.activation_bytes)),
        ("Other processes", format_bytes(ready.other_bytes)),
        ("KV cache", f"{format_bytes(ready.cache_bytes)} = {ready.num_blocks:,} blocks of {ready.block_size} tokens, {ready.kv_dtype}"),
        ("Left free", f"{format_bytes(max(free, 0))} of {format_bytes(ready.total_bytes)} {where}"),
        (
            "Fits",
            f"{tokens:,} tokens: {capacity(ready, ready.max_model_len):,} x {ready.max_model_len:,} (the longest request)"
            f" or {capacity(ready, SHORT_CONTEXT):,} x {SHORT_CONTEXT:,}; at most {ready.max_num_seqs:,} running at once",
        ),
        ("Started in", _phases(ready)),
    ]


def _weights(ready: EngineReady, config: EngineConfig) -> str:
    """Bytes, and what the weights are stored as: the largest share first."""
    kinds = sorted(ready.weights_kinds.items(), key=lambda kind: -kind[1])
    kinds = [kind for kind in kinds if kind[1] > ready.weights_bytes // 100]
    model = config.model
    source = model.quantization or ("GGUF" if model.path.endswith(".gguf") else "")
    if model.load_format == "dummy":
        source = f"made up{' as ' + source if source else ''}"
    named = [f"{name} {format_bytes(nbytes)}" for name, nbytes in kinds] if len(kinds) > 1 else [name for name, _ in kinds]
    stored = " + ".join(named)
    return format_bytes(ready.weights_bytes) + "".join(f", {part}" for part in (source, stored) if part)


def _ranks(config: EngineConfig) -> str:
    """Who computes it together; the figures below it are one rank's."""
    parallel = config.parallel
    split = []
    if parallel.pipeline > 1:
        split.append(f"{parallel.pipeline} stages")
    if parallel.tensor > 1:
        split.append(f"{parallel.tensor} to a layer")
    hosts = f" on {parallel.nodes.count} hosts" if parallel.nodes.count > 1 else " placed by Ray" if parallel.executor == "ray" else ""
    replica = " of each replica" if parallel.data > 1 else ""
    hosts += f" that share {parallel.shared_gpus} GPU{'s' * (parallel.shared_gpus > 1)}" if parallel.shared_gpus else ""
    return f"{parallel.world}{hosts} ({', '.join(split)}); the sizes below are those of the first{replica}"


def _phases(ready: EngineReady) -> str:
    return f"{sum(p.seconds for p in ready.phases):.1f} s" + "".join(f", {p.name} {p.seconds:.1f}" for p in ready.phases)


def server_url(settings: Any) -> str:
    """Where a client finds the server."""
    if uds := getattr(settings, "uds", None):
        return f"unix:{uds}"
    host = getattr(settings, "host", None) or "localhost"
    host = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    scheme = "https" if getattr(settings, "ssl_certfile", None) else "http"
    return f"{scheme}://{host}:{getattr(settings, 'port', 8000)}"


def startup_report(ready: EngineReady, config: EngineConfig, settings: Any = None) -> None:
    """Print the report, what the engine warns of, and (for a server, when its settings are given) the address.

    What the settings gave reason to warn of was logged when they were resolved.
    """
    rows = report_rows(ready, config)
    if settings is not None:
        rows.append(("Serving at", server_url(settings)))
    _print(rows, [warning for warning in ready.warnings if warning not in config.warnings])


def _print(rows: Sequence[tuple[str, str]], warnings: Sequence[str]) -> None:
    if not sys.stderr.isatty():
        for what, how_much in rows:
            print(f"{what + ':':<17}{how_much}", file=sys.stderr)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        sys.stderr.flush()
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True)
    table = Table(show_header=False, title="Octavo", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for what, how_much in rows:
        table.add_row(what, Text(how_much))
    console.print(table)
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
