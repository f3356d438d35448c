"""vLLM's flags that have no setting in Octavo, in one table, so that a vLLM command line starts here as it is.

Flags whose effect Octavo gets by other means are accepted with a one-line warning. Flags that ask for something Octavo does
not do yet are refused, unless they ask for nothing (their default).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any, Literal

from octavo.cli.parser import CommandParser, Namespace
from octavo.errors import NotYet

_PREFIX = "foreign:"


@dataclass(frozen=True)
class ForeignFlag:
    name: str
    takes: Literal["nothing", "value", "values"]
    why: str
    """Completes "--flag is ignored: ..." or "--flag is not available yet: ..."."""
    refused: bool = False
    harmless: tuple[str, ...] = ()
    """Values that ask for nothing."""
    short: str = ""


def _ignored(why: str, *, switches: str = "", values: str = "", lists: str = "") -> list[ForeignFlag]:
    kinds: list[tuple[Literal["nothing", "value", "values"], str]] = [("nothing", switches), ("value", values), ("values", lists)]
    return [ForeignFlag("--" + name, takes, why) for takes, names in kinds for name in names.split()]


def _refused(why: str, name: str, takes: Literal["nothing", "value", "values"], *harmless: str) -> ForeignFlag:
    return ForeignFlag("--" + name, takes, why, refused=True, harmless=harmless)


FOREIGN_FLAGS: tuple[ForeignFlag, ...] = (
    *_ignored(
        "prefixes are compared token by token, there is no hash to choose",
        values="prefix-caching-hash-algo",
    ),
    *_ignored(
        "the scheduler has one mode, which plans by itself",
        switches="use-v2-block-manager multi-step-stream-outputs disable-async-output-proc disable-chunked-mm-input "
        "disable-hybrid-kv-cache-manager",
        values="num-scheduler-steps num-lookahead-slots scheduler-delay-factor preemption-mode scheduler-cls cuda-graph-sizes "
        "max-num-on-the-fly",
    ),
    *_ignored(
        "how kernels and graphs are built is decided at start",
        switches="use-tqdm-on-load disable-cascade-attn enable-dbo enable-flashinfer-autotune",
        values="cudagraph-capture-sizes max-cudagraph-capture-size max-context-len-to-capture "
        "max-seq-len-to-capture attention-config kernel-config optimization-level performance-mode "
        "moe-backend all2all-backend",
    ),
    ForeignFlag("--compilation-config", "value", "how kernels and graphs are built is decided at start", short="-O"),
    *_ignored(
        "loading is streamed and needs no tuning",
        values="max-parallel-loading-workers model-loader-extra-config ignore-patterns pt-load-map-location "
        "safetensors-load-strategy config-format",
    ),
    *_ignored(
        "Octavo never runs code from a checkpoint or from the command line",
        values="code-revision worker-cls worker-extension-cls logits-processor-pattern plugin reasoning-parser-plugin",
        lists="middleware logits-processors",
    ),
    *_ignored(
        "only text is taken in",
        switches="disable-mm-preprocessor-cache skip-mm-profiling interleave-mm-strings enable-mm-embeds language-model-only",
        values="limit-mm-per-prompt mm-processor-kwargs media-io-kwargs mm-processor-cache-gb mm-processor-cache-type "
        "mm-encoder-tp-mode allowed-local-media-path video-pruning-rate",
        lists="allowed-media-domains",
    ),
    *_ignored(
        "the engine runs in one process of its own",
        switches="disable-frontend-multiprocessing headless tokens-only worker-use-ray engine-use-ray ray-workers-use-nsight",
        values="data-parallel-backend data-parallel-address data-parallel-rpc-port data-parallel-rank "
        "data-parallel-size-local data-parallel-start-rank",
    ),
    *_ignored(
        "metrics and logs are always complete and cheap",
        switches="enable-server-load-tracking collect-detailed-traces kv-cache-metrics enable-mfu-metrics enable-layerwise-nvtx-tracing",
        values="show-hidden-metrics-for-version otlp-traces-endpoint kv-cache-metrics-sample profiler-config",
    ),
    *_ignored(
        "each request says it for itself (stream_interval)",
        values="stream-interval",
    ),
    *_ignored(
        "it has no effect here",
        switches="disable-sliding-window enforce-eager-inductor allow-deprecated-quantization "
        "enable-prompt-embeds enable-return-routed-experts enable-tokenizer-info-endpoint exclude-tools-when-tool-choice-none "
        "log-error-stack trust-request-chat-template-kwargs async-engine",
        values="task convert override-pooler-config pooler-config additional-config override-neuron-config "
        "block-size-cpu guided-decoding-backend structured-outputs-config "
        "tokenizer-revision tokenizer-pool-size tokenizer-pool-type numa-bind",
    ),
    _refused("set it with --hf-overrides '{\"rope_scaling\": ...}'", "rope-scaling", "value", "{}", "null"),
    _refused("set it with --hf-overrides '{\"rope_theta\": ...}'", "rope-theta", "value"),
    _refused("adapters", "max-loras", "value", "1"),
    _refused("adapters", "max-lora-rank", "value", "16"),
    _refused("adapters", "max-cpu-loras", "value", "1"),
    _refused("adapters", "fully-sharded-loras", "nothing"),
    _refused("prompt adapters", "enable-prompt-adapter", "nothing"),
    _refused("keeping cache blocks in host memory", "kv-offloading-size", "value", "0"),
    _refused("keeping cache blocks in host memory", "kv-offloading-backend", "value", "native"),
    _refused("moving the cache between servers", "kv-transfer-config", "value", "{}", "null"),
    _refused("moving the cache between servers", "kv-events-config", "value", "{}", "null"),
    _refused("balancing experts", "enable-eplb", "nothing"),
    _refused("splitting the context over GPUs", "decode-context-parallel-size", "value", "1"),
    _refused("splitting the context over GPUs", "prefill-context-parallel-size", "value", "1"),
    _refused("splitting the context over GPUs", "dcp-size", "value", "1"),
    _refused("tools that the server runs itself", "tool-server", "value"),
    _refused("speculative decoding", "speculative-model", "value"),
    _refused("speculative decoding", "num-speculative-tokens", "value", "0"),
)

SERVER_ONLY: tuple[ForeignFlag, ...] = (
    *_ignored(
        "only `octavo serve` has such a setting",
        switches="enable-ssl-refresh enable-auto-tool-choice",
        values="tool-parser-plugin log-config-file h11-max-incomplete-event-size h11-max-header-count tool-call-parser reasoning-parser",
        lists="disable-access-log-for-endpoints",
    ),
    _refused("adapters", "lora-modules", "values"),
)
"""Settings of the server, which vLLM's other commands have too."""


class _Remember(argparse.Action):
    """Keep flag and value under a name that no setting has."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, _PREFIX + self.option_strings[0], values)


def add_foreign_flags(parser: CommandParser) -> None:
    """Make the parser accept every flag of the table that is not a setting. Call it after the settings were added."""
    for flag in (*FOREIGN_FLAGS, *SERVER_ONLY):
        arity: dict[str, Any] = {} if flag.takes == "value" else {"nargs": 0 if flag.takes == "nothing" else "*"}
        names = [flag.name, flag.short] if flag.short else [flag.name]
        if flag.takes == "nothing":
            names.append(flag.name.replace("--", "--no-", 1))
        names = [n for n in names if not parser.has(n)]
        if flag.name in names:
            parser.add_argument(*names, action=_Remember, help=argparse.SUPPRESS, **arity)


def check_foreign_flags(namespace: Namespace) -> None:
    """Warn about the flags that do nothing here.

    Raises:
        NotYet: a flag asks for something that Octavo does not do.
    """
    given = vars(namespace)
    for flag in (*FOREIGN_FLAGS, *SERVER_ONLY):
        if _PREFIX + flag.name not in given:
            continue
        value = given[_PREFIX + flag.name]
        if not flag.refused:
            print(f"octavo: warning: {flag.name} is ignored: {flag.why}.", file=sys.stderr)
        elif flag.takes == "nothing" or str(value) not in flag.harmless:
            raise NotYet(f"{flag.name} is not available yet: {flag.why}.")
