"""OpenVINO GenAI's continuous batching on the GGUF file as it is. Run by cpu_peers.py with an interpreter that has
openvino-genai: JSON jobs on stdin, JSON results on stdout (as transformers_generate.py).

Arguments: gguf file, ignored, threads, ignored. Imports nothing of Octavo.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai


def main() -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = 64
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(sys.argv[3])})
    print(json.dumps({"ready": True, "engine": f"OpenVINO GenAI {genai.__version__}, the file as it is"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        config = genai.GenerationConfig()
        config.max_new_tokens = job["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        prompts = [openvino.Tensor(np.asarray([p], np.int64)) for p in job["prompts"]]
        start = time.perf_counter()
        results = pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": [list(r.m_generation_ids[0]) for r in results]}), flush=True)


if __name__ == "__main__":
    main()
