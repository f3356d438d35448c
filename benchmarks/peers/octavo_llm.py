"""Octavo's offline `LLM`. Run by cpu_peers.py: JSON jobs on stdin, JSON results on stdout (as transformers_generate.py)."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    from octavo import LLM, SamplingParams, __version__

    model, _, threads, settings = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    activations = settings.get("cpu_activations", "int8")
    with LLM(model, threads=threads, device="cpu", **settings) as llm:
        print(json.dumps({"ready": True, "engine": f"Octavo {__version__}, the file as it is, {activations} activations"}), flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
            prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}), flush=True)


if __name__ == "__main__":
    main()
