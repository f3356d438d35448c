"""transformers' continuous batching on a GPU, with random weights. Run by gpu_throughput.py: one JSON job on stdin
({"prompts": [[ids]], "output_len": n}), one JSON result on stdout.

Argument: a folder with config.json. Imports nothing of Octavo.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

ATTENTION = ("paged|flash_attention_2", "paged|sdpa")
"""The first that this installation can run."""


def load(folder: str) -> tuple[torch.nn.Module, str]:
    config = AutoConfig.from_pretrained(folder)
    errors = []
    for attention in ATTENTION:
        try:
            with torch.device("cuda"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
            return model.eval(), attention
        except (ImportError, ValueError) as error:
            errors.append(f"{attention}: {error}")
    raise SystemExit("; ".join(errors))


def main() -> None:
    model, attention = load(sys.argv[1])
    job = json.load(sys.stdin)
    # No end-of-sequence token: every request runs to its length, as with ignore_eos.
    settings = GenerationConfig(max_new_tokens=job["output_len"], do_sample=True, temperature=0.6, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(inputs=job["prompts"][:2], generation_config=settings)  # compilation and graphs
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=job["prompts"], generation_config=settings)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    result = {"seconds": seconds, "output_tokens": tokens, "attention": attention, "version": transformers.__version__}
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
