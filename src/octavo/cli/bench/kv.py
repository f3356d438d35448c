"""`octavo bench kv`: memory that holds no token, of the paged cache and of reserving a contiguous range a sequence.

Runs the real scheduler, block pool and prefix tree over random traffic. No model is loaded.
"""

from __future__ import annotations

from octavo.cli.bench.results import add_result_flags, publish
from octavo.cli.bench.workload import span
from octavo.cli.flags import positive_int
from octavo.cli.parser import CommandParser, Namespace


def configure(parser: CommandParser) -> None:
    group = parser.group("workload")
    group.add_argument("--requests", "--num-prompts", dest="requests", type=positive_int, metavar="N", help="Requests. Default: 256.")
    group.add_argument("--input-len", type=span, metavar="N", help="Prompt tokens: N or LOW-HIGH. Default: 100-1024.")
    group.add_argument("--output-len", type=span, metavar="N", help="Output tokens. Default: 100-1024.")
    group.add_argument("--workload-seed", type=int, metavar="N", help="Seed of the lengths. Default: 0.")
    group = parser.group("cache")
    group.add_argument("--block-size", type=positive_int, metavar="N", help="Tokens in a block. Default: 16.")
    group.add_argument("--num-blocks", type=positive_int, metavar="N", help="Blocks in the cache. Default: enough for all at once.")
    group.add_argument("--max-model-len", type=positive_int, metavar="N", help="Longest sequence. Default: 2048.")
    group.add_argument("--max-num-seqs", type=positive_int, metavar="N", help="Most sequences at once. Default: 256.")
    add_result_flags(parser)


def run(options: Namespace) -> int:
    from octavo.core.kv.waste import measure_waste

    default = span("100-1024")
    inputs, outputs = getattr(options, "input_len", default), getattr(options, "output_len", default)
    report = measure_waste(
        requests=getattr(options, "requests", 256),
        input_tokens=(inputs.low, inputs.high),
        output_tokens=(outputs.low, outputs.high),
        block_size=getattr(options, "block_size", 16),
        max_model_len=getattr(options, "max_model_len", max(2048, inputs.high + outputs.high)),
        max_num_seqs=getattr(options, "max_num_seqs", 256),
        num_blocks=getattr(options, "num_blocks", None),
        seed=getattr(options, "workload_seed", 0),
    )
    rows = [
        ("traffic", f"{report.requests} requests, {report.tokens:,} tokens, at most {report.peak_running} at once"),
        ("paged", f"{report.paged_average:.1%} of the reserved memory holds no token, at worst {report.paged_peak:.1%}"),
        ("reserving max_model_len", f"{report.contiguous_max_model_len:.1%} ({report.max_model_len:,} tokens a sequence)"),
        ("reserving prompt + max_tokens", f"{report.contiguous_max_tokens:.1%}"),
        ("preemptions", str(report.preemptions)),
    ]
    publish(options, "bench kv", rows, report.as_dict())
    return 0
