"""GPU: the common offline workload and small-batch latency with random weights, in-process. Needs no model file.

`random.seed(0)`; prompts of 100-1024 random token ids (all drawn first), then 100-1024 output tokens each, temperature 0.6, nothing
stops early, token ids in, no text out. Then 128 tokens in and 256 out at batch 1 and 32, and the first token of an 8,192-token
prompt. The table sets each number beside the floor (bytes at the card's read bandwidth, arithmetic at its matrix rate) and beside
vLLM's on the same card. transformers' own continuous batching runs live, on a smaller load that both get.

    make gpu-bench [ARGS="--shapes qwen3-0.6b llama-3.1-8b --profile"]
    make gpu-bench-2                     8B and 70B over two GPUs
    make gpu-bench-invariant             what --batch-invariant costs: with and without it, one after the other
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.cli.bench.latency import token_times
from octavo.cli.bench.offline import prompts_of
from octavo.cli.bench.results import environment, percentile, write_json
from octavo.cli.bench.throughput import throughput
from octavo.cli.bench.workload import Span, random_requests

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
}
SHAPES["llama-3.1-70b"] = {
    **SHAPES["llama-3.1-8b"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
USUAL = {1: ("qwen3-0.6b", "llama-3.1-8b"), 2: ("llama-3.1-8b", "llama-3.1-70b")}
"""GPUs -> shapes that are measured on so many."""
PEER_LOAD = (64, Span(100, 1024), 128)
"""Requests, prompt tokens, output tokens of the load that transformers gets too."""
REQUESTS = {"qwen3-0.6b": 256, "llama-3.1-8b": 512, "llama-3.1-70b": 256}
MAX_MODEL_LEN = 8448
PARTS = ("latency", "first", "throughput", "start", "peer")

FLOORS = {
    "qwen3-0.6b": {"seconds": 3.8},
    "llama-3.1-8b": {"seconds": 18.5, "tpot_1_ms": 3.3, "tpot_32_ms": 3.4, "first_8k_ms": 186.0},
}
"""One H200: bytes at 4.55 TB/s, arithmetic at 790 TFLOP/s."""
VLLM: dict[int, dict[str, dict[str, float]]] = {
    1: {
        "qwen3-0.6b": {"seconds": 5.70, "start_s": 83.0},
        "llama-3.1-8b": {"seconds": 25.4, "tpot_1_ms": 4.94, "tpot_32_ms": 5.56, "ttft_32_ms": 98.0, "first_8k_ms": 210.0, "start_s": 76.0},
    },
    2: {
        "llama-3.1-8b": {"seconds": 15.0, "tpot_1_ms": 3.50},
        "llama-3.1-70b": {"seconds": 49.7, "tpot_1_ms": 20.6, "tpot_32_ms": 21.5, "start_s": 111.0},
    },
}
"""GPUs -> vLLM 0.26.0 on the same cards, same workload, its defaults; start is process start to ready with a warm page cache."""

PROFILED = ((1, 300, 40), (32, 300, 40), (64, 300, 40), (256, 700, 60), (1, 8192, 1), (1, 128, 1))
"""(requests, prompt tokens, output tokens)"""

FIRST_TOKEN = """
import json, sys
from octavo import LLM, SamplingParams
settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", **json.loads(sys.argv[2])}
llm = LLM(sys.argv[1], **settings)
llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
print(json.dumps({p.name: round(p.seconds, 2) for p in llm.ready_report.phases}), flush=True)
"""


def cold_start(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the start of a new process to its first token, with the kernels compiled before."""
    start = time.perf_counter()
    given = json.dumps({"max_model_len": MAX_MODEL_LEN, **settings})
    process = subprocess.Popen([sys.executable, "-c", FIRST_TOKEN, folder, given], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.perf_counter() - start
    process.communicate()
    return {"start_s": seconds, "cached_phases_s": json.loads(line)} if line else {}


def peer_seconds(llm: LLM) -> float:
    """Seconds of the peer's load here, the better of two."""
    count, prompt, output = PEER_LOAD
    requests = random_requests(count, prompt, Span(output, output))
    params = SamplingParams(temperature=0.6, max_tokens=output, ignore_eos=True, detokenize=False)
    times = []
    for _ in range(2):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts_of(requests), params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return min(times)


def peer(folder: str) -> dict[str, Any]:
    """transformers' `generate_batch` in a process of its own, with the same load; {} (and why, on stderr) where it does not run."""
    count, prompt, output = PEER_LOAD
    job = {"prompts": [r.prompt for r in random_requests(count, prompt, Span(output, output))], "output_len": output}
    script = Path(__file__).parent / "peers" / "transformers_batch.py"
    done = subprocess.run([sys.executable, str(script), folder], check=False, input=json.dumps(job), stdout=subprocess.PIPE, text=True)
    return {"peer": json.loads(done.stdout.splitlines()[-1])} if done.returncode == 0 else {}


def measure(shape: str, config: dict[str, Any], settings: dict[str, Any], parts: list[str], runs: int, profile: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape] | config))
        start = time.perf_counter()
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, **settings}
        with LLM(folder, **options) as llm:
            ready = llm.ready_report
            result: dict[str, Any] = {"load_s": time.perf_counter() - start, "phases_s": {p.name: p.seconds for p in ready.phases}}
            if ready.sums:
                result["sums"] = ready.sums
                print(f"{shape}: {ready.sums}", flush=True)
            if "latency" in parts:
                for batch in (1, 32):
                    first, gap = latency(llm, batch)
                    result |= {f"ttft_{batch}_ms": first, f"tpot_{batch}_ms": gap}
                if (share := between_steps(llm)) is not None:
                    result["between_steps_64"] = share
            if "first" in parts:
                result["first_8k_ms"] = first_token(llm)
            if "throughput" in parts:
                result["runs"] = [offline(llm, REQUESTS[shape]) for _ in range(runs)]
                result["seconds"] = min(run["elapsed_time"] for run in result["runs"])
            if "peer" in parts:
                result["peer_load_s"] = peer_seconds(llm)
            if profile:
                result["profile"] = [profiled(llm, *case) for case in PROFILED]
        if "start" in parts:
            result |= cold_start(folder, settings)
        if "peer" in parts:
            result |= peer(folder)
    return result


def latency(llm: LLM, batch: int) -> tuple[float, float]:
    """(ms to the first token of the slowest request, ms between tokens): medians over three batches after one."""
    ttft, gaps = [], []
    for i in range(4):
        requests = random_requests(batch, Span(128, 128), Span(256, 256), seed=i)
        params = SamplingParams(temperature=0.6, max_tokens=256, ignore_eos=True, detokenize=False)
        times = [token_times(output) for output in llm.generate(prompts_of(requests), params, use_tqdm=False)]
        if i:
            ttft.append(max(first for first, _ in times))
            gaps += [gap for _, gap in times]
    return percentile(ttft, 50) * 1000, percentile(gaps, 50) * 1000


def first_token(llm: LLM) -> float:
    """Median ms to the first token of an 8,192-token prompt, of four after one."""
    times = []
    for i in range(5):
        requests = random_requests(1, Span(8192, 8192), Span(1, 1), seed=100 + i)
        params = SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True, detokenize=False)
        times.append(token_times(llm.generate(prompts_of(requests), params, use_tqdm=False)[0])[0])
    return percentile(times[1:], 50) * 1000


class StepLog:
    """Stands in front of an executor and writes down each step: what was in it, and how long the device took."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._plans: deque[Any] = deque()
        self.steps: list[tuple[int, int, float]] = []
        """(rows, tokens, seconds on the device)"""
        self.ends: list[float] = []
        """When each was collected, by the host's clock."""
        self.waited = 0.0
        """Seconds that the host had nothing to do but wait."""

    def submit(self, plan: Any) -> None:
        self._executor.submit(plan)
        self._plans.append((len(plan.slots), plan.num_tokens))

    def collect(self) -> Any:
        start = time.perf_counter()
        result = self._executor.collect()
        self.waited += time.perf_counter() - start
        self.steps.append((*self._plans.popleft(), result.step_seconds))
        self.ends.append(time.perf_counter())
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def summary(self, elapsed: float) -> dict[str, Any]:
        decodes = [s for s in self.steps if s[0] == s[1]]
        prompts = [s for s in self.steps if s[0] != s[1]]
        device = sum(s[2] for s in self.steps)
        by_rows: dict[int, list[float]] = {}
        for rows, _, seconds in decodes:
            by_rows.setdefault(1 << rows.bit_length() - 1, []).append(seconds)
        return {
            "prompt_steps": len(prompts),
            "prompt_step_s": sum(s[2] for s in prompts),
            "decode_steps": len(decodes),
            "decode_step_s": sum(s[2] for s in decodes),
            "no_step_s": elapsed - device,
            "host_waited_s": self.waited,
            "decode_ms_by_rows": {str(rows): round(1000 * sum(t) / len(t), 3) for rows, t in sorted(by_rows.items())},
        }


def between_steps(llm: LLM, rows: int = 64) -> float | None:
    """Share of the time in which no step is on the device, while `rows` requests decode.

    None where no step has them all: stages of a pipeline share them, and the time of a step is then also that of waiting for the other stage.
    """
    requests = random_requests(rows, Span(300, 300), Span(200, 200), seed=9)
    params = SamplingParams(temperature=0.6, max_tokens=200, ignore_eos=True, detokenize=False)
    core: Any = llm._client.core  # type: ignore[union-attr]
    log = core.executor = StepLog(core.executor)
    llm.generate(prompts_of(requests), params, use_tqdm=False)
    core.executor = log._executor
    full = [i for i, (of_step, tokens, _) in enumerate(log.steps) if of_step == tokens == rows][10:-10]
    if len(full) < 2:
        return None
    busy = sum(log.steps[i][2] for i in full[1:])
    return 1.0 - busy / (log.ends[full[-1]] - log.ends[full[0]])


def offline(llm: LLM, count: int) -> dict[str, Any]:
    llm.reset_prefix_cache()
    requests = random_requests(count, Span(100, 1024), Span(100, 1024))
    params = [SamplingParams(temperature=0.6, max_tokens=r.output_len, ignore_eos=True, detokenize=False) for r in requests]
    core: Any = llm._client.core  # type: ignore[union-attr]
    log = core.executor = StepLog(core.executor)
    start = time.perf_counter()
    outputs = llm.generate(prompts_of(requests), params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    core.executor = log._executor
    return {**throughput(outputs, elapsed), **log.summary(elapsed)}


def profiled(llm: LLM, rows: int, prompt: int, steps: int) -> dict[str, Any]:
    """Where the device's time goes in the middle of a run: kernels by time, and the share of the time in which nothing runs."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    requests = random_requests(rows, Span(prompt, prompt), Span(steps, steps), seed=7)
    params = SamplingParams(temperature=0.6, max_tokens=steps, ignore_eos=True, detokenize=False)
    llm.reset_prefix_cache()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        llm.generate(prompts_of(requests), params, use_tqdm=False)
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in recorded.events() if e.device_type == DeviceType.CUDA)
    # A draw ends each step. The first and the last steps, in which requests come and go, are left out.
    ends = [end for _, end, name in spans if name == "_draw_kernel"]
    if steps > 1:
        ends = ends[max(2, len(ends) - steps + 2) : len(ends) * 3 // 4]
        begin, finish, count = ends[0], ends[-1], len(ends) - 1
    else:
        begin, finish, count = spans[0][0], ends[0], 1
    spans = [s for s in spans if begin <= s[0] and s[1] <= finish]
    busy, reached, between = 0.0, begin, 0.0
    totals: dict[str, list[float]] = {}
    for start, end, name in spans:
        busy += max(0.0, end - max(start, reached))
        between += max(0.0, start - reached) if name.startswith(("_receive", "Memcpy")) else 0.0
        reached = max(reached, end)
        total = totals.setdefault(name[:60], [0.0, 0])
        total[0] += end - start
        total[1] += 1
    kernels = sorted(((t / count, n / count, name) for name, (t, n) in totals.items()), reverse=True)[:14]
    return {
        "rows": rows,
        "prompt": prompt,
        "step_us": (finish - begin) / count,
        "idle_share": 1.0 - busy / (finish - begin),
        "between_steps_share": between / (finish - begin),
        "kernels": [{"us": round(t, 1), "launches": round(n, 1), "name": name} for t, n, name in kernels],
    }


def show(shape: str, result: dict[str, Any], gpus: int) -> None:
    rows = [
        ("start to first token, s", "start_s", ""),
        ("batch 1, ms a token", "tpot_1_ms", ""),
        ("batch 32, ms a token", "tpot_32_ms", ""),
    ]
    rows += [("batch 1, first token ms", "ttft_1_ms", ""), ("batch 32, first tokens ms", "ttft_32_ms", "")]
    rows += [("8k prompt, first token ms", "first_8k_ms", ""), (f"{REQUESTS[shape]} requests, s", "seconds", "")]
    print(f"\n{shape:<28}{'measured':>10}{'floor':>9}{'x floor':>9}{'vLLM':>9}{'x vLLM':>9}")
    for label, key, peer_key in rows:
        if key not in result:
            continue
        floor = FLOORS[shape].get(key) if gpus == 1 else None
        value, peer = result[key], VLLM.get(gpus, {}).get(shape, {}).get(peer_key or key)
        cells = [f"{value:>10.3f}", f"{floor:>9.2f}{value / floor:>9.2f}" if floor else " " * 18]
        print(f"{label:<28}{''.join(cells)}{f'{peer:>9.2f}{value / peer:>9.2f}' if peer else ''}")
    if "between_steps_64" in result:
        print(f"  64 requests decoding: no step on the device {result['between_steps_64']:.1%} of the time")
    for run in result.get("runs", []):
        print(
            f"  {run['elapsed_time']:.2f} s = {run['output_tokens_per_second']:.0f} output tokens/s: {run['prompt_steps']} steps with prompts "
            f"{run['prompt_step_s']:.2f} s, {run['decode_steps']} decode steps {run['decode_step_s']:.2f} s, no step on the device "
            f"{run['no_step_s']:.2f} s; the host waited {run['host_waited_s']:.2f} s"
        )
        print("  decode step by rows (from n on), ms:", run["decode_ms_by_rows"])
    if "peer" in result:
        theirs = result["peer"]
        print(
            f"  {PEER_LOAD[0]} requests of {PEER_LOAD[2]} tokens: {result['peer_load_s']:.2f} s; transformers {theirs['version']} generate_batch "
            f"({theirs['attention']}) {theirs['seconds']:.2f} s = {theirs['seconds'] / result['peer_load_s']:.1f} times as long"
        )
    if "cached_phases_s" in result:
        print("  start with compiled kernels:", ", ".join(f"{name} {seconds:.2f}" for name, seconds in result["cached_phases_s"].items()))
    print("  start:", ", ".join(f"{name} {seconds:.2f}" for name, seconds in result["phases_s"].items()))
    for one in result.get("profile", []):
        print(
            f"  step of {one['rows']} after {one['prompt']}: {one['step_us']:.0f} us, idle {one['idle_share']:.1%}, "
            f"of which between steps {one['between_steps_share']:.1%}"
        )
        for kernel in one["kernels"]:
            print(f"    {kernel['us']:>9.1f} us {kernel['launches']:>6.1f}x {kernel['name']}")


COMPARED = ("tpot_1_ms", "tpot_32_ms", "ttft_1_ms", "ttft_32_ms", "first_8k_ms", "seconds")
"""What `--compare` sets side by side."""


def show_compared(shape: str, plain: dict[str, Any], other: dict[str, Any], settings: dict[str, Any]) -> None:
    print(f"\n{shape}: {json.dumps(settings)} beside the run without it")
    for key in COMPARED:
        if key in plain and key in other:
            print(f"  {key:<14}{plain[key]:>10.3f}{other[key]:>10.3f}{other[key] / plain[key]:>8.2f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description="GPU throughput and latency with random weights.")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), help="default: those for so many GPUs")
    parser.add_argument("--gpus", type=int, default=1, help="how many share each layer, unless --settings has stages")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", type=int, default=2, help="of the offline workload; the fastest counts")
    parser.add_argument("--settings", default="{}", help="JSON: more settings of LLM(...).")
    parser.add_argument(
        "--compare", metavar="JSON", help='further settings, measured after those without them, such as {"batch_invariant": true}'
    )
    parser.add_argument("--config", default="{}", help='JSON: more of config.json, such as {"quantization_config": {...}}.')
    parser.add_argument("--profile", action="store_true", help="Also show where the time of decode steps goes.")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu_throughput.json, or gpu_throughput_N.json for N GPUs")
    options = parser.parse_args()
    gpus, settings = options.gpus, json.loads(options.settings)
    if gpus > 1:
        settings.setdefault("tensor_parallel_size", gpus // settings.get("pipeline_parallel_size", 1))
    output = options.output or Path(__file__).parent / "results" / f"gpu_throughput{'' if gpus == 1 else f'_{gpus}'}.json"
    results: dict[str, dict[str, Any]] = {}
    config, compare = json.loads(options.config), json.loads(options.compare or "{}")
    for shape in options.shapes or USUAL.get(gpus, USUAL[2]):
        results[shape] = measure(shape, config, settings, options.parts, options.runs, options.profile)
        show(shape, results[shape], gpus)
        if compare:
            results[shape]["compared"] = other = measure(shape, config, settings | compare, options.parts, options.runs, options.profile)
            show(shape, other, gpus)
            show_compared(shape, results[shape], other, compare)
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    asked = {"gpus": gpus, "config": config, "settings": settings} | ({"compare": compare} if compare else {})
    write_json(output, {"bench": "gpu_throughput", "date": date, **asked, "results": results, "environment": environment()})


if __name__ == "__main__":
    main()
    if "--profile" in sys.argv:
        sys.stdout.flush()
        # The profiler's own clean-up at the end of the interpreter has been seen to abort.
        os._exit(0)
