"""transformers' `generate` on one padded batch, float32. Run by cpu_peers.py: JSON jobs on stdin, JSON results on stdout.

A job is {"prompts": [[ids]], "max_tokens": n}; all prompts of a job have one length. The model is the bundled file's weights,
converted once to a folder outside the repository.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def converted(gguf: Path, folder: Path) -> Path:
    """The GGUF file as a Hugging Face folder of float32 weights, made once (about a minute)."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    if not (folder / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        model.save_pretrained(folder)
    return folder


def main() -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    gguf, folder, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(converted(gguf, folder), dtype=torch.float32).eval()
    print(json.dumps({"ready": True, "engine": f"transformers {transformers.__version__} generate, float32"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.tensor(job["prompts"])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=job["max_tokens"],
                max_new_tokens=job["max_tokens"],
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": out[:, ids.shape[1] :].tolist()}), flush=True)


if __name__ == "__main__":
    main()
