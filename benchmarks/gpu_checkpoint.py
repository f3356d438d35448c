"""GPU: whole quantised checkpoints (random codes of a Llama-3.1-8B's shapes): what they take in memory, how long they load beside reading
the file, and a token's time.

    python benchmarks/gpu_checkpoint.py [--forms awq Q4_K Q8_0] [--layers 32]

`awq`: safetensors in AWQ's layout, 4 bits by groups of 128 with zero points, embedding and head in bfloat16. Others: GGUF files, all
matrices in that type. The file is in the page cache: it has just been written; reading it is `ParallelReader`'s copy of the bytes to the
GPU. Prints a table and writes benchmarks/results/gpu_checkpoint.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.gpu_step import WEIGHTS
from benchmarks.gpu_throughput import MAX_MODEL_LEN, SHAPES, latency
from octavo import LLM
from octavo.cli.bench.results import environment, write_json
from octavo.weights.parallel_read import ParallelReader

AWQ_GROUP = 128
FORMS = ("awq", "Q4_0", "Q4_K", "Q8_0")
_SCALES_OF_BLOCKS = {"Q4_0": (1e-2,), "Q4_K": (4e-4, 3e-3), "Q8_0": (8e-4,)}
"""Numbers at the beginning of a block that make weights of the size of a trained layer's."""
DEVICE = torch.device("cuda")


def matrices(shape: dict[str, Any]) -> dict[str, tuple[str, int, int]]:
    """Name in a layer -> (name in a GGUF file, outputs, inputs)."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    return {
        "self_attn.q_proj": ("attn_q", hidden, hidden),
        "self_attn.k_proj": ("attn_k", kv, hidden),
        "self_attn.v_proj": ("attn_v", kv, hidden),
        "self_attn.o_proj": ("attn_output", hidden, hidden),
        "mlp.gate_proj": ("ffn_gate", inner, hidden),
        "mlp.up_proj": ("ffn_up", inner, hidden),
        "mlp.down_proj": ("ffn_down", hidden, inner),
    }


def write_awq(folder: Path, shape: dict[str, Any]) -> Path:
    def words(*size: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, size, dtype=torch.int32, device=DEVICE).cpu()

    def numbers(*size: int) -> torch.Tensor:
        return (torch.randn(size, dtype=torch.bfloat16, device=DEVICE) * 0.02).cpu()

    hidden = shape["hidden_size"]
    tensors = {"model.embed_tokens.weight": numbers(shape["vocab_size"], hidden), "lm_head.weight": numbers(shape["vocab_size"], hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for i in range(shape["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, (_, outputs, inputs) in matrices(shape).items():
            at = f"model.layers.{i}.{name}"
            tensors[f"{at}.qweight"], tensors[f"{at}.qzeros"] = words(inputs, outputs // 8), words(inputs // AWQ_GROUP, outputs // 8)
            tensors[f"{at}.scales"] = torch.full((inputs // AWQ_GROUP, outputs), 0.004, dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**shape, "quantization_config": WEIGHTS["int4"]}))
    return folder / "model.safetensors"


def write_gguf(path: Path, shape: dict[str, Any], form: str) -> Path:
    kind = gguf.GGMLQuantizationType[form]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)

    def blocks(outputs: int, inputs: int) -> np.ndarray[Any, Any]:
        raw = np.frombuffer(random.bytes(outputs * inputs // values * size), np.uint8).reshape(-1, size).copy()
        for i, number in enumerate(_SCALES_OF_BLOCKS[form]):
            raw[:, 2 * i : 2 * i + 2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)
        return raw.reshape(outputs, -1)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, np.float32))

    writer, hidden = gguf.GGUFWriter(path, "llama"), shape["hidden_size"]
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_vocab_size(shape["vocab_size"])
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", blocks(shape["vocab_size"], hidden), raw_dtype=kind)
    norm("output_norm.weight")
    layer = {place: blocks(outputs, inputs) for place, outputs, inputs in matrices(shape).values()}
    for i in range(shape["num_hidden_layers"]):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for place, data in layer.items():  # the same bytes in every layer: each is read on its own
            writer.add_tensor(f"blk.{i}.{place}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_seconds(path: Path) -> float:
    """To bring the file's bytes to the GPU, the better of two: loading cannot be faster."""
    place, times = torch.empty(path.stat().st_size, dtype=torch.uint8, device=DEVICE), []
    for _ in range(2):
        start = time.perf_counter()
        with ParallelReader(DEVICE) as reader:
            reader.read(str(path), 0, place)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(form: str, shape: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = write_awq(folder, shape) if form == "awq" else write_gguf(folder / "model.gguf", shape, form)
    result: dict[str, Any] = {"form": form, "layers": shape["num_hidden_layers"], "file_bytes": path.stat().st_size}
    result["read_s"] = read_seconds(path)
    torch.cuda.empty_cache()
    options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
    with LLM(str(folder if form == "awq" else path), **options) as llm:
        ready = llm.ready_report
        result |= {
            "phases_s": {p.name: p.seconds for p in ready.phases},
            "weights_bytes": ready.weights_bytes,
            "stored_as": ready.weights_kinds,
        }
        for batch in (1, 32):
            first, gap = latency(llm, batch)
            result |= {f"ttft_{batch}_ms": first, f"tpot_{batch}_ms": gap}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["awq", "Q4_K", "Q8_0"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_checkpoint.json")
    options = parser.parse_args()
    results = []
    for form in options.forms:
        with tempfile.TemporaryDirectory() as folder:
            one = measure(form, SHAPES["llama-3.1-8b"] | {"num_hidden_layers": options.layers}, Path(folder))
        results.append(one)
        load = one["phases_s"].get("load", 0.0)
        print(
            f"{form:6} file {one['file_bytes'] / 1e9:.2f} GB, weights {one['weights_bytes'] / 1e9:.2f} GB; read {one['read_s']:.2f} s, load "
            f"{load:.2f} s ({load / one['read_s']:.2f} times); ms a token {one['tpot_1_ms']:.2f} alone, {one['tpot_32_ms']:.2f} at 32",
            flush=True,
        )
    write_json(options.out, {"bench": "gpu_checkpoint", "results": results, "environment": environment()})


if __name__ == "__main__":
    main()
