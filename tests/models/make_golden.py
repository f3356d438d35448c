"""Write golden.json: what transformers computes from the bundled GGUF file, so that parity is checked without converting it.

Run it by hand when the prompts or the bundled model change (takes minutes):

    python tests/models/make_golden.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a small dragon who",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8, 13,",
    "The three primary colors are",
    "import numpy as np\n\n",
    "In 1969, the first man",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "La France est un pays",
    '{"name": "Alice", "age":',
    CHAT.format("What is the capital of Italy?"),
    CHAT.format("Write a haiku about the sea."),
    CHAT.format("Count from one to five."),
    CHAT.format("Who wrote Hamlet?"),
    CHAT.format("Explain gravity to a child in two sentences."),
    CHAT.format("Translate 'good morning' to Spanish."),
    CHAT.format("Name three fruits."),
    CHAT.format("What is 12 times 12?"),
]
NEW_TOKENS = 24
TOP = 5


def main(path: str) -> None:
    folder, name = str(Path(path).parent), Path(path).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = model(ids).logits[0, -1]
            out = model.generate(
                ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            # How close the runner-up came at each step: below about 1e-3 another order of summation may choose it.
            steps = model(out).logits[0, ids.shape[1] - 1 : -1]
        best = steps.topk(2, dim=-1).values
        top = logits.topk(TOP)
        cases.append(
            {
                "prompt": prompt,
                "prompt_ids": ids[0].tolist(),
                "top_ids": top.indices.tolist(),
                "top_logits": [round(v, 5) for v in top.values.tolist()],
                "greedy_ids": out[0, ids.shape[1] :].tolist(),
                "margins": [round(v, 5) for v in (best[:, 0] - best[:, 1]).tolist()],
            }
        )
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "model": name, "dtype": "float32"}
    target = Path(__file__).with_name("golden.json")
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    target.write_text(f'{{"versions": {json.dumps(versions)},\n "cases": [\n{lines}\n ]}}\n')


if __name__ == "__main__":
    main(sys.argv[1])
