"""GPU: loading whole checkpoints (random weights of a Llama-3.1-8B's shapes) beside reading their files, from a warm page cache.

    python benchmarks/gpu_load.py [--forms bf16 fp8 awq gptq] [--layers 32]

Each form is loaded in a new process, as a server does it (with the import of the kernels, pinned memory, and what CUDA does at first
use), and again in the same process; reading is `ParallelReader`'s copy of the file's bytes to the GPU, with pinned memory at hand. Prints
a table and writes benchmarks/results/gpu_load.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu_checkpoint import matrices, read_seconds, write_awq
from benchmarks.gpu_step import WEIGHTS
from benchmarks.gpu_throughput import MAX_MODEL_LEN, SHAPES
from octavo.cli.bench.results import environment, write_json
from octavo.frontend.launch import engine_args, prepare_launch
from octavo.models.decoder import Model
from octavo.models.loader import load_model
from octavo.ops.registry import load_ops

DEVICE = torch.device("cuda")
GROUP = 128
FORMS: dict[str, dict[str, object] | None] = {
    "bf16": None,
    "fp8": WEIGHTS["fp8"],
    "awq": WEIGHTS["int4"],
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
}
AGAIN = 3


def write_checkpoint(folder: Path, form: str, layers: int) -> None:
    shape = SHAPES["llama-3.1-8b"] | {"num_hidden_layers": layers}
    if form == "awq":
        write_awq(folder, shape)
        return

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=DEVICE) * 0.02

    def pieces(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        if form == "bf16":
            return {"weight": numbers(outputs, inputs)}
        if form == "fp8":
            return {"weight": (numbers(outputs, inputs) * 50).to(torch.float8_e4m3fn), "weight_scale": torch.full((outputs, 1), 0.02)}
        groups = inputs // GROUP
        return {
            "qweight": torch.randint(-(1 << 31), 1 << 31, (inputs // 8, outputs), dtype=torch.int32, device=DEVICE),
            "qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
            "scales": torch.full((groups, outputs), 0.004, dtype=torch.float16),
            "g_idx": (torch.arange(inputs) // GROUP).int(),
        }

    hidden = shape["hidden_size"]
    tensors = {name: numbers(shape["vocab_size"], hidden).cpu() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for i in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, (_, outputs, inputs) in matrices(shape).items():
            tensors |= {f"model.layers.{i}.{name}.{piece}": value.cpu() for piece, value in pieces(outputs, inputs).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = FORMS[form]
    (folder / "config.json").write_text(json.dumps(shape if quantization is None else {**shape, "quantization_config": quantization}))


def measure(folder: str) -> dict[str, Any]:
    """In a process that has loaded nothing yet."""
    settings = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
    config = prepare_launch(engine_args(folder, settings)).config
    torch.zeros(1, device=DEVICE)  # a context is there from here on

    def load() -> tuple[Model, float]:
        start = time.perf_counter()
        model = load_model(config, load_ops("cuda"), DEVICE, lambda *_: None)
        torch.cuda.synchronize()
        return model, time.perf_counter() - start

    model, first = load()
    torch.cuda.empty_cache()
    memory = {"weights_bytes": model.weights_bytes, "reserved_bytes": torch.cuda.memory_reserved()}
    del model
    again = [load()[1] for _ in range(AGAIN)]
    file = Path(folder) / "model.safetensors"
    return {"file_bytes": file.stat().st_size, **memory, "read_s": read_seconds(file), "load_s": first, "load_again_s": again}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=list(FORMS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", help="measure the checkpoint that is there, and print JSON")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_load.json")
    options = parser.parse_args()
    if options.folder:
        print(json.dumps(measure(options.folder)), flush=True)
        return
    results = []
    for form in options.forms:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), form, options.layers)
            command = [sys.executable, __file__, "--folder", folder]
            one = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        results.append({"form": form, "layers": options.layers, **one})
        again = min(one["load_again_s"])
        print(
            f"{form:6} {one['file_bytes'] / 1e9:6.2f} GB, read {one['read_s']:.3f} s, loaded in a new process {one['load_s']:.3f} s, again "
            f"{again:.3f} s ({again / one['read_s']:.2f} times); weights {one['weights_bytes'] / 1e9:.2f} GB, memory held for them "
            f"{one['reserved_bytes'] / 1e9:.2f}",
            flush=True,
        )
    write_json(options.out, {"bench": "gpu_load", "results": results, "environment": environment()})


if __name__ == "__main__":
    main()
