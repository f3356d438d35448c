"""`octavo plan`: what fits, from a model's config and an amount of memory, without loading anything."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoint.types import Checkpoint
from octavo.cli.flags import choice, positive_int
from octavo.cli.parser import CommandParser, Namespace
from octavo.config.sizes import format_bytes
from octavo.errors import ConfigError, UnsupportedModel

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "int4": 0.5625}
"""Bytes a weight; int4 with a half-precision scale and offset for each group of 64."""
_CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


def configure(parser: CommandParser) -> None:
    parser.usage = "octavo plan [MODEL] --memory SIZE [flags]"
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="A folder, .gguf file, hub name or config.json; nothing is the bundled model."
    )
    parser.add_argument(
        "--memory", type=positive_int, metavar="SIZE", help="Memory of the GPU (24G), or of the host. Default: of this machine."
    )
    parser.add_argument(
        "--dtype", type=choice(tuple(_BYTES)), metavar="TYPE", help="Weights. Default: as stored, half precision if unknown."
    )
    parser.add_argument(
        "--quantization",
        metavar="METHOD",
        help="How weights are stored, as for serve: fp8 or int8, made while loading. Default: what the model's quantization_config says.",
    )
    parser.add_argument("--kv-cache-dtype", type=choice(tuple(_CACHE_BYTES)), metavar="TYPE", help="Cache. Default: bfloat16.")
    parser.add_argument("--max-model-len", type=positive_int, metavar="N", help="Longest request, tokens. Default: the model's own.")
    parser.add_argument("--gpu-memory-utilization", type=_fraction, metavar="F", help="Fraction to use. Default: 0.9.")
    parser.add_argument(
        "-tp", "--tensor-parallel-size", type=positive_int, metavar="N", help="GPUs that share each layer, with --memory each. Default: 1."
    )
    parser.add_argument(
        "-pp", "--pipeline-parallel-size", type=positive_int, metavar="N", help="Groups of GPUs that share the layers. Default: 1."
    )


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number.") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be greater than 0 and at most 1, got {text}.")
    return value


@dataclass(frozen=True)
class Needs:
    """What a model takes."""

    parameters: int
    cache_values_per_token: int
    """Numbers kept in the KV cache for each token, over all layers."""
    max_len: int
    heads: int
    layers: int
    cache_parts: int
    """Most GPUs of a layer that its cache is divided among: those beyond keep copies."""

    def ranks(self, tensor: int, stages: int) -> int:
        """How many GPUs that are.

        Raises:
            ConfigError: the model cannot be divided so.
        """
        if self.heads % tensor:
            raise ConfigError(f"--tensor-parallel-size {tensor}: {self.heads} attention heads cannot be shared evenly by so many GPUs.")
        if stages > self.layers:
            raise ConfigError(f"--pipeline-parallel-size {stages}: the model has {self.layers} layers, one for each stage at least.")
        return tensor * stages


def run(options: Namespace) -> int:
    from octavo.checkpoint.resolve import resolve_checkpoint

    model = getattr(options, "model", "")
    if Path(model).name == "config.json" and Path(model).is_file():
        model = str(Path(model).parent)
    checkpoint = resolve_checkpoint(model)
    needs = model_needs(checkpoint.hf_config, checkpoint.name)
    stored = sum(Path(f).stat().st_size for f in checkpoint.weight_files)
    dtype, asked = getattr(options, "dtype", None), getattr(options, "quantization", None)
    size, how = _weights(checkpoint, needs, stored, dtype, asked)
    tensor, stages = getattr(options, "tensor_parallel_size", 1), getattr(options, "pipeline_parallel_size", 1)
    ranks = needs.ranks(tensor, stages)
    weights = size // ranks
    memory = getattr(options, "memory", None) or _this_machine()
    length = _length(needs.max_len, getattr(options, "max_model_len", None))
    usable = memory * getattr(options, "gpu_memory_utilization", 0.9)
    # Activations of the largest step: a few hundred MiB for small models, about a twentieth of the weights for large ones.
    activations = max(256 * 2**20, weights // 20)
    values = needs.cache_values_per_token / (stages * min(tensor, needs.cache_parts))
    per_token = values * _CACHE_BYTES[getattr(options, "kv_cache_dtype", "bfloat16")]
    tokens = int((usable - weights - activations) // per_token)
    rows = [
        ("model", f"{checkpoint.name}, about {needs.parameters / 1e9:.2f} billion parameters"),
        *([("GPUs", f"{ranks}: {stages} x {tensor}; the sizes below are those of each")] if ranks > 1 else []),
        ("memory", f"{format_bytes(memory)}, of which {format_bytes(usable)} are used"),
        ("weights", format_bytes(weights) + how),
        ("activations", f"about {format_bytes(activations)}"),
        ("cache for a token", format_bytes(per_token)),
    ]
    fits = tokens >= length
    if tokens <= 0:
        short = round(weights + activations + length * per_token - usable)
        rows.append(("fits", f"no: {format_bytes(short)} more are needed for one request of {length:,} tokens"))
    else:
        rows.append(("fits", f"{tokens:,} tokens: {tokens // length:,} x {length:,}, or {tokens // 1000:,} x 1,000"))
        if not fits:
            rows.append(("", f"the longest request that fits is {tokens:,} tokens: --max-model-len {tokens}"))
    from octavo.cli.bench.results import print_table

    print_table("octavo plan (estimates; the server measures)", rows)
    return int(tokens <= 0)


def _length(most: int, asked: int | None) -> int:
    """The longest request, as serve would have it: with a warning, no longer than the model was made for.

    Raises:
        ConfigError: no request is so short.
    """
    if asked is None:
        return most
    from octavo.config.resolve import beyond_the_model, too_short

    if asked < 2:
        raise ConfigError(too_short(asked))
    if asked > most:
        print(f"octavo: warning: {beyond_the_model(asked)}planning with {most}.", file=sys.stderr)
    return min(asked, most)


def _weights(checkpoint: Checkpoint, needs: Needs, stored: int, dtype: str | None, asked: str | None) -> tuple[int, str]:
    """Bytes of all weights, and what to say of how they are stored.

    Args:
        stored: bytes of the files; 0: there are none.
        dtype, asked: the user's `--dtype` and `--quantization`.

    Raises:
        ConfigError, UnsupportedModel, CheckpointError: the engine would not load the model so.
    """
    from octavo.config.quantization import quantization_method

    config, path = checkpoint.hf_config, checkpoint.path
    gguf = path.endswith(".gguf")
    if asked == "gguf" and not gguf:
        raise ConfigError(f"--quantization gguf: {checkpoint.name} is no GGUF file. Leave the option out.")
    method = quantization_method(None if asked == "gguf" else asked, config, checkpoint.name)
    if method is not None and gguf:
        raise ConfigError(f"--quantization {asked}: the weights of a GGUF file stay as they are. Leave the option out.")
    if asked and dtype in ("int8", "fp8", "int4"):
        raise ConfigError(f"--dtype {dtype} with --quantization {asked}: both say how weights are stored. Give one of them.")
    if method is not None:
        made = _low_bit_bytes(config, path, method, int(_BYTES.get(dtype or "bfloat16", 2)))
        if config.get("quantization_config") is None or not (stored or dtype in ("int8", "fp8", "int4")):
            return made, f" ({method})"
    if dtype and (method is None or dtype in ("int8", "fp8", "int4")):
        return round(needs.parameters * _BYTES[dtype]), ""
    return (stored, " (as stored)") if stored else (needs.parameters * 2, "")


def _low_bit_bytes(config: Mapping[str, Any], path: str, method: str, itemsize: int) -> int:
    """Bytes of a model whose layers are stored as its quantization_config says, or rounded to `method` while loading.

    Args:
        itemsize: bytes of what stays in full precision.
    """
    from octavo.models.loader import made_up_bytes
    from octavo.models.registry import model_spec
    from octavo.models.sharding import Shard
    from octavo.quantization.select import stored_format

    where = str(Path(path) / "config.json")
    form = stored_format(config, where) or stored_format({"quantization_config": {"quant_method": method}}, where)
    assert form is not None
    return made_up_bytes(model_spec(config, where)[0], Shard(), form, itemsize)


def _this_machine() -> int:
    from octavo.config.device import detect_device

    return detect_device().total_bytes


def model_needs(config: Mapping[str, Any], called: str = "the model") -> Needs:
    """Parameters and cache of a decoder, from its config.

    Raises:
        UnsupportedModel: the config does not describe a decoder.
        CheckpointError: a value of it cannot be used.
    """
    from octavo.config.resolve import context_limit

    config = config.get("text_config") or config

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            raise UnsupportedModel(f"The model's config has no {names[0]}, so its size cannot be told.")
        return default

    hidden, layers = number("hidden_size", "n_embd"), number("num_hidden_layers", "n_layer")
    heads = number("num_attention_heads", "n_head")
    kv_heads, head_dim = number("num_key_value_heads", default=heads), number("head_dim", default=hidden // heads)
    inner, vocab = number("intermediate_size", "n_inner", default=4 * hidden), number("vocab_size")
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=1)
    if experts > 1:
        inner = number("moe_intermediate_size", default=inner)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * inner * (experts + number("n_shared_experts", default=0) if experts > 1 else 1)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    rank = config.get("kv_lora_rank")
    cached = number("kv_lora_rank") + number("qk_rope_head_dim") if rank else 2 * kv_heads * head_dim
    return Needs(
        layers * (attention + mlp) + embeddings, layers * cached, context_limit(config, called), heads, layers, 1 if rank else kv_heads
    )
