"""The layers of a decode step on one GPU, as a serving graph runs them, against the time to read weights and cache once.

    python benchmarks/gpu_step.py [--shapes llama-3.1-8b] [--rows 1 32 256] [--weights bf16 fp8 int4] [--cache bf16 fp8] [--context 4096]

A few layers of each shape with random weights, captured as one CUDA graph: products, norms, rotation, cache writes, attention. So
it shows what launches and the small kernels between products cost, which `gpu_matmul.py` and `gpu_ops.py` cannot. Prints a table
and writes benchmarks/results/gpu_step.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import triton

from benchmarks.gpu_attention import READ_BYTES_PER_S, graph_us
from benchmarks.gpu_throughput import SHAPES
from octavo.attention.base import GraphShape, KindTables
from octavo.attention.triton import TritonAttention
from octavo.models.assembly import Assembly
from octavo.models.decoder import Decoder
from octavo.models.registry import model_spec
from octavo.ops.registry import Ops, load_ops
from octavo.quantization.select import stored_format

BLOCK = 16
LAYERS = {"qwen3-0.6b": 28, "llama-3.1-8b": 6}
"""Enough weights to pass the L2 cache many times; the smaller model runs whole."""
CONTEXTS = {1: 256, 8: 256, 32: 256, 64: 400, 128: 560, 256: 700, 512: 700}
"""Tokens that each of so many rows has behind it."""
WEIGHTS: dict[str, dict[str, object] | None] = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "int4": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}
"""How the layers' weights are stored: `quantization_config` of a checkpoint."""
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


class Layers:
    """The first layers of a shape, with a cache for the widest step."""

    def __init__(
        self, shape: str, rows: list[int], ops: Ops, weights: str = "bf16", cache: str = "bf16", context: int | None = None
    ) -> None:
        config = {**SHAPES[shape], "num_hidden_layers": LAYERS[shape]}
        if WEIGHTS[weights] is not None:
            config["quantization_config"] = WEIGHTS[weights]
        spec, family = model_spec(config)
        assembly = Assembly(spec, family.weights, ops, DTYPE, DEVICE)
        with torch.no_grad():
            for _ in assembly.fill_dummy(0, stored_format(config, "config.json")):
                pass
            self.weights = assembly.finish()
        self.spec, self.shape = spec, shape
        self.contexts = {n: context or CONTEXTS[n] for n in rows}
        self.model = Decoder(spec, self.weights, ops, max_length=max(self.contexts.values()) + 1)
        self.blocks_per_row = max(-(-length // BLOCK) for length in self.contexts.values())
        blocks = max(rows) * self.blocks_per_row + 1
        self.attention = TritonAttention(spec.layer_specs, blocks, BLOCK, CACHES[cache], DEVICE, model_dtype=DTYPE)
        for layer in range(spec.num_layers):
            of_layer = self.attention.cache.of(layer)
            if of_layer.dtype == torch.float8_e4m3fn:
                of_layer.view(torch.uint8).random_(32, 64)  # 1/8 to 1.9
            else:
                of_layer.normal_()

    def forward(self, rows: int) -> Callable[[], torch.Tensor]:
        """One step of `rows` rows, through all layers."""
        context = self.contexts[rows]
        order = (torch.randperm(rows * self.blocks_per_row, device=DEVICE) + 1).int()
        tables = order.view(rows, self.blocks_per_row).contiguous()
        slots = tables[:, (context - 1) // BLOCK].long() * BLOCK + (context - 1) % BLOCK
        shape = GraphShape(rows, rows)
        plan = np.zeros(self.attention.graph_plan_size(shape), dtype=np.int32)
        self.attention.graph_plan(np.full(rows, context - 1, dtype=np.int32), np.ones(rows, dtype=np.int32), shape, plan)
        attend = self.attention.graph_attend(torch.from_numpy(plan).to(DEVICE), shape, [KindTables(tables, slots)])
        tokens = torch.randint(0, self.spec.vocab_size, (rows,), device=DEVICE)
        positions = torch.full((rows,), context - 1, device=DEVICE)
        return lambda: self.model.forward(tokens, positions, attend)

    def floor_us(self, rows: int) -> float:
        """Of one layer."""
        spec = self.spec
        weights = sum(w.nbytes for name, w in self.weights.linears.items() if name != "head") / spec.num_layers
        element = self.attention.cache.of(0).element_size()
        cache = rows * self.contexts[rows] * 2 * spec.num_kv_heads * spec.head_dim * element
        return (weights + cache) / READ_BYTES_PER_S * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--rows", type=int, nargs="+", choices=tuple(CONTEXTS), default=list(CONTEXTS))
    parser.add_argument("--weights", nargs="+", choices=tuple(WEIGHTS), default=["bf16"])
    parser.add_argument("--cache", nargs="+", choices=tuple(CACHES), default=["bf16"], help="how keys and values are stored")
    parser.add_argument("--context", type=int, help="tokens behind each row, whatever their number")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_step.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    results: list[dict[str, object]] = []
    for shape, weights, cache in itertools.product(args.shapes, args.weights, args.cache):
        layers = Layers(shape, args.rows, load_ops("cuda"), weights, cache, args.context)
        for rows in args.rows:
            us = graph_us([layers.forward(rows)]) / layers.spec.num_layers
            floor = layers.floor_us(rows)
            context = layers.contexts[rows]
            of_step = {"shape": shape, "weights": weights, "cache": cache, "rows": rows, "context": context}
            results.append({**of_step, "layer_us": round(us, 2), "floor_us": round(floor, 2)})
            name = f"{shape} {weights}" + (f" cache {cache}" if cache != "bf16" else "")
            print(
                f"{name:18} {rows:4} rows after {context:4} tokens: a layer {us:8.2f} us, floor {floor:8.2f}, x{us / floor:.2f}", flush=True
            )
        del layers
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    args.out.write_text(json.dumps({**versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
