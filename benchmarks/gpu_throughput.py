"""GPU: the common offline workload and small-batch latency with random weights, in-process. Needs no model file.

256 prompts of 100-1024 random token ids, then 100-1024 output tokens each, temperature 0.6, nothing stops early. Written so that
the same numbers can be taken from other engines.

    make gpu-bench [ARGS="--shapes qwen3-0.6b llama-3.1-8b"]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
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
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
}
REQUESTS = {"qwen3-0.6b": 256, "llama-3.1-8b": 512}


def measure(shape: str, settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        start = time.perf_counter()
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, **settings) as llm:
            result: dict[str, Any] = {"start_s": round(time.perf_counter() - start, 2)}
            for batch in (1, 32):
                result[f"batch_{batch}"] = latency(llm, batch)
            for _ in range(2):  # the second run counts: the first one meets every shape for the first time
                result["throughput"] = offline(llm, REQUESTS[shape])
    return result


def latency(llm: LLM, batch: int) -> dict[str, float]:
    """128 tokens in, 256 out: median ms to the first token and between tokens, over three batches after one."""
    ttft, gaps = [], []
    for i in range(4):
        requests = random_requests(batch, Span(128, 128), Span(256, 256), seed=i)
        params = SamplingParams(temperature=0.6, max_tokens=256, ignore_eos=True, detokenize=False)
        for output in llm.generate(prompts_of(requests), params, use_tqdm=False):
            if i:
                first, gap = token_times(output)
                ttft.append(first)
                gaps.append(gap)
    return {"ttft_ms": round(percentile(ttft, 50) * 1000, 2), "tpot_ms": round(percentile(gaps, 50) * 1000, 3)}


def offline(llm: LLM, count: int) -> dict[str, Any]:
    llm.reset_prefix_cache()
    requests = random_requests(count, Span(100, 1024), Span(100, 1024))
    params = [SamplingParams(temperature=0.6, max_tokens=r.output_len, ignore_eos=True, detokenize=False) for r in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts_of(requests), params, use_tqdm=False)
    return throughput(outputs, time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="GPU throughput and latency with random weights.")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["qwen3-0.6b"])
    parser.add_argument("--settings", default="{}", help="JSON: more settings of LLM(...).")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu_throughput.json")
    options = parser.parse_args()
    results = {shape: measure(shape, json.loads(options.settings)) for shape in options.shapes}
    print(f"{'shape':<14}{'out tok/s':>11}{'batch 1 ms/token':>18}{'batch 32':>10}{'first token 1/32 ms':>22}{'start s':>9}")
    for shape, r in results.items():
        one, many = r["batch_1"], r["batch_32"]
        print(
            f"{shape:<14}{r['throughput']['output_tokens_per_second']:>11.0f}{one['tpot_ms']:>18.2f}{many['tpot_ms']:>10.2f}"
            f"{one['ttft_ms']:>14.1f} /{many['ttft_ms']:>6.1f}{r['start_s']:>9.1f}"
        )
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(options.output, {"bench": "gpu_throughput", "date": date, "results": results, "environment": environment()})


if __name__ == "__main__":
    main()
