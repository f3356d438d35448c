"""llama.cpp through its C interface, parallel sequences in one context. Run by cpu_peers.py with an interpreter that has
llama-cpp-python: JSON jobs on stdin, JSON results on stdout (as transformers_generate.py).

Arguments: gguf file, ignored, threads, {"requantize": "Q4_0" or "", "cache": folder}. Imports nothing of Octavo.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

import llama_cpp
import numpy as np

_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}
BATCH = 512


def requantized(path: str, kind: str, cache: str) -> str:
    """The model in another of llama.cpp's formats, made once."""
    if not kind:
        return path
    target = os.path.join(cache, os.path.basename(path).rsplit(".", 2)[0] + f".{kind}.gguf")
    if not os.path.exists(target):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = _FILE_TYPES[kind]
        params.allow_requantize = True
        part = target + ".part"
        if llama_cpp.llama_model_quantize(path.encode(), part.encode(), ctypes.byref(params)) != 0:
            raise SystemExit(f"llama.cpp could not requantize {path}")
        os.replace(part, target)
    return target


class Engine:
    """One model and one context with room for `sequences` sequences of `length` tokens."""

    def __init__(self, path: str, threads: int, sequences: int, length: int) -> None:
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * length
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        if hasattr(params, "kv_unified"):
            params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wanted) entries; the greedy next token of each wanted one."""
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = wanted
        self.batch.n_tokens = len(tokens)
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama_decode failed")
        picked = []
        for i, (_, _, _, wanted) in enumerate(tokens):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(self.context, i)
                picked.append(int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.vocab,)))))
        return picked

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Prompts in full batches first, then all sequences step by step."""
        self.clear()
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last = [t for i in range(0, len(entries), BATCH) for t in self.decode(entries[i : i + BATCH])]
        outputs = [[t] for t in last]
        for step in range(1, max_tokens):
            last = self.decode([(t, len(p) + step - 1, s, True) for s, (t, p) in enumerate(zip(last, prompts, strict=True))])
            for output, token in zip(outputs, last, strict=True):
                output.append(token)
        return outputs


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    pass


def main() -> None:
    options = json.loads(sys.argv[4])
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    path = requantized(sys.argv[1], options["requantize"], options["cache"])
    engine = Engine(path, int(sys.argv[3]), sequences=32, length=512)
    kind = options["requantize"] or "the file as it is (Q4_1)"
    print(json.dumps({"ready": True, "engine": f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), {kind}"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        tokens = engine.generate(job["prompts"], job["max_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
