"""`octavo bench throughput`: all requests at once through the offline engine."""

from __future__ import annotations

import time
from typing import Any

from octavo.cli.bench.offline import answered, engine_of, open_llm, prompts_of, sampling_of
from octavo.cli.bench.results import add_result_flags, publish
from octavo.cli.bench.workload import add_workload_flags, describe, workload
from octavo.cli.flags import add_engine_settings
from octavo.cli.parser import CommandParser, Namespace


def configure(parser: CommandParser) -> None:
    add_workload_flags(parser, num_prompts=64, input_len="256", output_len="128")
    parser.group("workload").add_argument("--temperature", type=float, metavar="T", help="Default: 1.")
    add_result_flags(parser)
    add_engine_settings(parser)


def run(options: Namespace) -> int:
    with open_llm(options) as llm:
        requests = workload(options, llm.ready_report.vocab_size)
        prompts, sampling = prompts_of(requests), sampling_of(requests, getattr(options, "temperature", 1.0))
        llm.generate(prompts[:1], sampling[:1], use_tqdm=False)  # first-use costs are not throughput
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = answered(llm.generate(prompts, sampling))
        seconds = time.perf_counter() - start
        engine = engine_of(llm)
    result = throughput(outputs, seconds)
    rows = [
        ("requests", f"{len(requests)} in {seconds:.2f} s = {result['requests_per_second']:.2f}/s"),
        ("output tokens", f"{result['output_tokens']:,} = {result['output_tokens_per_second']:.1f}/s"),
        ("all tokens", f"{result['total_tokens']:,} = {result['total_tokens_per_second']:.1f}/s"),
    ]
    publish(options, "bench throughput", rows, {"engine": engine, "workload": describe(options), **result})
    return 0


def throughput(outputs: list[Any], seconds: float) -> dict[str, Any]:
    """Totals and rates of finished `RequestOutput`s."""
    prompt = sum(len(o.prompt_token_ids or ()) for o in outputs)
    output = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "total_tokens": prompt + output,
        "requests_per_second": len(outputs) / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
    }
