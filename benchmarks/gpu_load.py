"""GPU: loading a safetensors checkpoint (random weights of a Llama-3.1-8B's shapes, fewer layers) from a warm page cache, by several
threads through pinned memory, against copying from the mapped file.

    python benchmarks/gpu_load.py [--layers 8]

Prints seconds and GB/s of both, and writes benchmarks/results/gpu_load.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu_throughput import SHAPES
from octavo.cli.bench.results import environment, write_json
from octavo.weights.parallel_read import ParallelReader
from octavo.weights.safetensors import open_safetensors

ROUNDS = 3


def write_checkpoint(path: Path, layers: int) -> None:
    shape = SHAPES["llama-3.1-8b"]
    hidden, inner, kv = shape["hidden_size"], shape["intermediate_size"], 1024
    sizes = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    sizes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    tensors = {
        f"{i}.{name}": torch.randn(size, device="cuda", dtype=torch.bfloat16).cpu() for i in range(layers) for name, size in sizes.items()
    }
    save_file(tensors, path)


def seconds(path: Path, reader: ParallelReader | None) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for stored in open_safetensors(str(path), reader):
        stored.copy_into(torch.empty(stored.shape, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Loading weights to a GPU.")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_checkpoint(path, options.layers)
        size = path.stat().st_size
        times: dict[str, list[float]] = {"mapped file": [], "several threads": []}
        for _ in range(ROUNDS):
            times["mapped file"].append(seconds(path, None))
            with ParallelReader(torch.device("cuda")) as reader:
                times["several threads"].append(seconds(path, reader))
    print(f"{size / 1e9:.2f} GB")
    for name, values in times.items():
        print(f"{name:<18}{min(values):>8.3f} s{size / min(values) / 1e9:>8.1f} GB/s   all: {json.dumps([round(v, 3) for v in values])}")
    print(f"{min(times['mapped file']) / min(times['several threads']):.1f} times as fast")
    write_json(
        Path(__file__).parent / "results" / "gpu_load.json",
        {"bench": "gpu_load", "bytes": size, "seconds": times, "environment": environment()},
    )


if __name__ == "__main__":
    main()
