"""`octavo bench latency`: one batch again and again through the offline engine."""

from __future__ import annotations

import time
from typing import Any

from octavo.cli.bench.offline import answered, engine_of, open_llm, prompts_of, sampling_of
from octavo.cli.bench.results import add_result_flags, latency_rows, publish, summary
from octavo.cli.bench.workload import largest_id, random_requests, span
from octavo.cli.flags import add_engine_settings, positive_int
from octavo.cli.parser import CommandParser, Namespace


def configure(parser: CommandParser) -> None:
    group = parser.group("workload")
    group.add_argument("--batch-size", type=positive_int, metavar="N", help="Requests together. Default: 8.")
    group.add_argument("--input-len", type=span, metavar="N", help="Prompt tokens: N or LOW-HIGH. Default: 32.")
    group.add_argument("--output-len", type=span, metavar="N", help="Output tokens. Default: 128.")
    group.add_argument("--num-iters", type=positive_int, metavar="N", help="Batches measured. Default: 10.")
    group.add_argument("--num-iters-warmup", type=int, metavar="N", help="Batches run first and not counted. Default: 2.")
    group.add_argument(
        "--vocab-size", type=positive_int, metavar="N", help="Random token ids are at most this. Default: 10000, or the model's last id."
    )
    add_result_flags(parser)
    add_engine_settings(parser)


def run(options: Namespace) -> int:
    batch = getattr(options, "batch_size", 8)
    lengths = getattr(options, "input_len", span("32")), getattr(options, "output_len", span("128"))
    warmups, iterations = getattr(options, "num_iters_warmup", 2), getattr(options, "num_iters", 10)
    batches, ttft, itl = [], [], []
    with open_llm(options) as llm:
        for i in range(warmups + iterations):
            # New prompts each time: the prefix cache would answer for repeated ones.
            requests = random_requests(batch, *lengths, seed=i, vocab_size=largest_id(options, llm.ready_report.vocab_size))
            start = time.perf_counter()
            outputs = answered(llm.generate(prompts_of(requests), sampling_of(requests, 0.0), use_tqdm=False))
            seconds = time.perf_counter() - start
            if i >= warmups:
                batches.append(seconds)
                for output in outputs:
                    first, gap = token_times(output)
                    ttft.append(first)
                    itl += [gap] if gap else []
        engine = engine_of(llm)
    rows = latency_rows("whole batch", batches) + latency_rows("time to first token", ttft) + latency_rows("inter-token latency", itl)
    result = {
        "engine": engine,
        "batch_size": batch,
        "input_len": str(lengths[0]),
        "output_len": str(lengths[1]),
        "num_iters": iterations,
        "avg_latency": sum(batches) / len(batches),
        "latencies": batches,
        **summary("batch", batches),
        **summary("ttft", ttft),
        **summary("itl", itl),
    }
    publish(options, "bench latency", rows, result)
    return 0


def token_times(output: Any) -> tuple[float, float]:
    """(seconds to the first token, mean seconds between tokens or 0) of a finished request."""
    times, count = output.metrics, len(output.outputs[0].token_ids)
    gap = (times.last_token - times.first_token) / (count - 1) if count > 1 else 0.0
    return times.first_token - times.queued, gap
