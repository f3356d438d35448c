"""`load_model`: from an `EngineConfig` to a model that is ready to run."""

from __future__ import annotations

import glob
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from octavo.checkpoint.gguf_file import GgufFile, read_gguf
from octavo.config.quantization import ON_THE_FLY
from octavo.config.sizes import format_bytes
from octavo.config.types import EngineConfig
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.layers.rope import FrequencyDivisors
from octavo.models.assembly import Assembly
from octavo.models.compiled import build_decoder, compilable
from octavo.models.decoder import Model, Weights
from octavo.models.fallback import load_fallback
from octavo.models.families.base import Family
from octavo.models.registry import model_spec, supported_architectures
from octavo.models.spec import ModelSpec, parameters
from octavo.ops.registry import Ops
from octavo.quantization.on_the_fly import OnTheFly
from octavo.quantization.pieces import Format
from octavo.quantization.select import stored_format
from octavo.weights.gguf import open_gguf, rope_divisors
from octavo.weights.mxfp4 import whole_experts
from octavo.weights.parallel_read import ParallelReader
from octavo.weights.pickled import open_pickled, pickled_files
from octavo.weights.quantized import whole_weights
from octavo.weights.safetensors import open_safetensors, weight_files
from octavo.weights.stored import StoredTensor

Progress = Callable[[str, int, int], None]
"""(phase, done, total), in bytes of the checkpoint."""

_PHASE = "weights"


def load_model(config: EngineConfig, ops: Ops, device: torch.device, progress: Progress) -> Model:
    """Build the model that the config names and fill it.

    Args:
        progress: called with ("weights", bytes done, bytes in all), first with 0 and last with the total.

    Raises:
        UnsupportedModel: an architecture or a format that does not run here.
        CheckpointError: files missing, truncated, corrupt, or not matching their config; names the file and the tensor.
        ConfigError: the weights do not fit into memory, or the load format does not fit the path.
    """
    model = config.model
    if runs_through_transformers(config):
        if model.quantization is not None:
            raise UnsupportedModel(
                f"{model.name} runs through transformers, and quantised weights ({model.quantization}) do not. Take an unquantised copy."
            )
        progress(_PHASE, 0, 1)
        fallback = load_fallback(config, device)
        progress(_PHASE, 1, 1)
        return fallback
    spec, family, gguf = read_spec(config, model.hf_config)
    if config.batch_invariant and spec.moe is not None and config.device.kind == "cuda":
        raise ConfigError(
            f"--batch-invariant: the products of experts on a GPU depend on the batch, and {spec.architecture} has experts. Leave it out."
        )
    dtype: torch.dtype = getattr(torch, model.dtype)
    if dtype != torch.float32 or not compilable(spec):
        ops = replace(ops, decoder=None)  # compiled decoders compute in float32
    form, on_the_fly = weight_format(config)
    needed = sum(math.prod(p.shape) for p in parameters(spec)) * dtype.itemsize
    if ops.decoder is not None and gguf is not None:
        needed = sum(t.nbytes for t in gguf.tensors.values())  # stays packed
    if form is not None and config.device.kind == "cuda":
        needed = _stored(model.path, gguf, None)[0]
    elif on_the_fly is not None and config.device.kind == "cuda":
        needed //= 2
    room = config.device.free_bytes if config.device.kind == "cuda" else config.device.total_bytes
    if 0 < room < needed:
        raise ConfigError(too_large(config, needed))

    assembly = Assembly(spec, family.weights, ops, dtype, device, prefix=family.prefix, on_the_fly=on_the_fly)
    weights = fill(assembly, config, gguf, needed, progress, form)
    with torch.no_grad():
        return build_decoder(
            spec,
            weights,
            ops,
            max_length=model.max_model_len,
            threads=config.device.threads,
            activations=config.device.activations,
        )


def weight_format(config: EngineConfig) -> tuple[Format | None, OnTheFly | None]:
    """How the checkpoint stores low-bit weights, and what others are rounded to while loading.

    Raises:
        UnsupportedModel, CheckpointError, ConfigError: see `load_model`.
    """
    model = config.model
    stored = stored_format(model.hf_config, os.path.join(model.path, "config.json"))
    if stored is not None and model.load_format == "dummy":
        raise ConfigError("--load-format dummy makes random weights in full precision: leave quantization_config out of the config.")
    asked = model.quantization
    return stored, ("fp8" if asked == "fp8" else "int8") if stored is None and asked in ON_THE_FLY else None


def runs_through_transformers(config: EngineConfig) -> bool:
    """Whether the model is one that only `transformers` can build, or was asked to run so."""
    model = config.model
    return model.implementation == "transformers" or (
        model.implementation == "auto" and model.architecture not in supported_architectures()
    )


def read_spec(config: EngineConfig, hf_config: Mapping[str, Any]) -> tuple[ModelSpec, Family, GgufFile | None]:
    """What the checkpoint of `config` is, and the GGUF file it comes from, if it does.

    Raises:
        UnsupportedModel, CheckpointError, ConfigError: see `load_model`.
    """
    gguf = _gguf(config.model.path, config.model.load_format)
    if gguf is None:
        return *model_spec(hf_config, os.path.join(config.model.path, "config.json")), None
    return *_gguf_spec(hf_config, gguf), gguf


def fill(
    assembly: Assembly, config: EngineConfig, gguf: GgufFile | None, needed: int, progress: Progress, form: Format | None = None
) -> Weights:
    """Read (or make up) every weight of a model.

    Args:
        needed: bytes that the weights take in memory.
        form: how low-bit weights are stored; None: there are none.

    Raises:
        CheckpointError, ConfigError: see `load_model`.
    """
    try:
        with torch.no_grad():
            if config.model.load_format == "dummy":
                return _fill_dummy(assembly, needed, config.model.seed, progress)
            with ParallelReader(assembly.device) if assembly.device.type != "cpu" else nullcontext() as reader:
                total, tensors = _stored(config.model.path, gguf, reader)
                if form is not None and form.method == "mxfp4":
                    tensors = whole_experts(tensors, assembly.device)
                elif form is not None:
                    names = [stored.name for stored in _stored(config.model.path, gguf, None)[1]]
                    tensors = whole_weights(tensors, names, form, assembly.device)
                return _fill_stored(assembly, total, tensors, progress)
    except (torch.OutOfMemoryError, MemoryError):
        raise ConfigError(too_large(config, needed)) from None
    except RuntimeError as e:
        if "can't allocate memory" in str(e):  # what torch's CPU allocator says
            raise ConfigError(too_large(config, needed)) from None
        raise


def _fill_dummy(assembly: Assembly, total: int, seed: int, progress: Progress) -> Weights:
    progress(_PHASE, 0, total)
    for done in assembly.fill_dummy(seed):
        progress(_PHASE, done, total)
    return assembly.finish()


def _fill_stored(assembly: Assembly, total: int, tensors: Iterable[StoredTensor], progress: Progress) -> Weights:
    done = 0
    progress(_PHASE, 0, total)
    for stored in tensors:
        assembly.add(stored)
        done += stored.nbytes
        progress(_PHASE, min(done, total), total)
    weights = assembly.finish()
    progress(_PHASE, total, total)
    return weights


def _stored(path: str, gguf: GgufFile | None, reader: ParallelReader | None) -> tuple[int, Iterable[StoredTensor]]:
    """The size of all weights in bytes, and the tensors, file by file."""
    if gguf is not None:
        return sum(t.nbytes for t in gguf.tensors.values()), open_gguf(gguf)
    files = pickled_files(path) if not glob.glob(os.path.join(glob.escape(path), "*.safetensors")) else []
    if files:
        return sum(map(os.path.getsize, files)), itertools.chain.from_iterable(map(open_pickled, files))
    files = weight_files(path)
    return sum(map(os.path.getsize, files)), itertools.chain.from_iterable(open_safetensors(file, reader) for file in files)


def _gguf(path: str, load_format: str) -> GgufFile | None:
    """The GGUF file that `path` means, if it means one."""
    if os.path.isfile(path):
        if load_format == "safetensors":
            raise ConfigError(f"--load-format safetensors needs a model folder, got the file {path}.")
        return read_gguf(path)
    if load_format != "gguf":
        return None
    found = sorted(n for n in os.listdir(path) if n.endswith(".gguf")) if os.path.isdir(path) else []
    if len(found) != 1:
        raise CheckpointError(f"{path}: holds {len(found)} .gguf files. Give the path of the one to load.")
    return read_gguf(os.path.join(path, found[0]))


def _gguf_spec(hf_config: Mapping[str, Any], gguf: GgufFile) -> tuple[ModelSpec, Family]:
    """The spec, corrected by what only the tensors of a GGUF file tell: a head of its own, biases, rotary divisors."""
    tied = "output.weight" not in gguf.tensors
    spec, family = model_spec({**hf_config, "tie_word_embeddings": tied}, gguf.path)
    spec = replace(
        spec,
        qkv_bias="blk.0.attn_q.bias" in gguf.tensors,
        attention_out_bias="blk.0.attn_output.bias" in gguf.tensors,
        norm_unit_offset=False,  # converters have added it
    )
    if (divisors := rope_divisors(gguf)) is not None:
        if len(divisors) != spec.rope.rotary_dim // 2 or not all(math.isfinite(d) and d > 0 for d in divisors):
            raise CheckpointError(f"{gguf.path}: tensor rope_freqs.weight does not hold {spec.rope.rotary_dim // 2} positive numbers.")
        spec = replace(spec, rope=replace(spec.rope, scaling=FrequencyDivisors(tuple(divisors))))
    return spec, family


def too_large(config: EngineConfig, needed: int) -> str:
    """What to say of weights of `needed` bytes that do not fit, and what would."""
    device, dtype = config.device, config.model.dtype
    room = device.free_bytes or device.total_bytes
    itemsize = getattr(torch, dtype).itemsize
    # A tenth stays for a step's own memory and a small cache.
    text = (
        f"The weights of {config.model.name} need {format_bytes(needed)} in {dtype}, but {device.name} has {format_bytes(room)} free "
        f"of {format_bytes(device.total_bytes)}. It has room for about {0.9 * room / itemsize / 1e9:.1f} billion parameters in {dtype}: "
        "use a smaller model"
    )
    if device.kind == "cuda" and itemsize > 2:
        text += " or --dtype bfloat16"
    if room < 0.9 * device.total_bytes:
        text += ", or end what else uses the memory"
    return text + "."
