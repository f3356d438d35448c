"""`load_model`: from an `EngineConfig` to a model that is ready to run."""

from __future__ import annotations

import functools
import glob
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from octavo.attention.base import LayerSpec
from octavo.checkpoint import text_part
from octavo.checkpoint.gguf_file import GgufFile, GgufTensor
from octavo.config import address_space
from octavo.config.home import packed_dir
from octavo.config.quantization import ON_THE_FLY
from octavo.config.sizes import format_bytes
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError, OctavoError, UnsupportedModel
from octavo.models.assembly import Assembly
from octavo.models.compiled import build_decoder
from octavo.models.decoder import Model, Weights
from octavo.models.fallback import lets_its_attention_be_swapped, load_fallback
from octavo.models.families.base import Family
from octavo.models.gguf_model import gguf_spec, open_header, runs_through_transformers
from octavo.models.program import compilable
from octavo.models.registry import model_spec, supported_architectures
from octavo.models.sharding import Division, Shard, shard_spec
from octavo.models.spec import ModelSpec
from octavo.ops.registry import Ops
from octavo.parallel.group import ALONE, Rows, TensorGroup
from octavo.parallel.pipeline import NO_PIPELINE, Pipeline
from octavo.quantization.on_the_fly import OnTheFly
from octavo.quantization.pieces import Format
from octavo.quantization.select import stored_format
from octavo.weights.gguf import open_gguf
from octavo.weights.gguf_coded import packed_bits
from octavo.weights.mxfp4 import has_packed_experts, whole_experts
from octavo.weights.parallel_read import ParallelReader
from octavo.weights.pickled import open_pickled, pickled_files
from octavo.weights.quantized import has_pieces, whole_weights
from octavo.weights.safetensors import Wanted, open_safetensors, tensor_names, weight_files
from octavo.weights.stored import StoredTensor

Progress = Callable[[str, int, int], None]
"""(phase, done, total), in bytes of the checkpoint."""

CheckRoom = Callable[[ModelSpec, tuple[LayerSpec, ...], int], None]
"""(spec of the whole model, layers that are here, bytes of their weights); raises what is to be raised."""

_PHASE = "weights"


def check_divisible(config: EngineConfig) -> None:
    """Whether the model can be dealt out to so many ranks; to be known before they are started.

    Raises:
        ConfigError: it cannot; says what does not divide, and which sizes would do.
        UnsupportedModel, CheckpointError: it cannot be loaded at all.
    """
    parallel = config.parallel
    if runs_through_transformers(config):
        if parallel.world > 1:
            raise ConfigError(
                f"{config.model.architecture} runs through transformers, which cannot be divided: it takes one rank, not {parallel.world}."
            )
        return
    spec, _, _ = read_spec(config, config.model.hf_config)
    shard_spec(spec, Shard(0, parallel.tensor, parallel.whole_experts and spec.moe is not None, 0, parallel.pipeline))


def normed_rows(config: EngineConfig) -> Rows | None:
    """What ranks add up that is normed at once; None where the model has its norms elsewhere, or sums must not depend on their size."""
    if config.batch_invariant or config.parallel.tensor == 1 or runs_through_transformers(config):
        return None
    spec, _, _ = read_spec(config, config.model.hf_config)
    if spec.norm != "rms" or spec.norm_placement != "pre" or spec.residual_multiplier != 1.0:
        return None
    # So that it ends before the engine is taken for hung, and names who did not come.
    return Rows(spec.hidden_size, getattr(torch, config.model.dtype), patience=config.reliability.hang_timeout / 2)


def load_model(
    config: EngineConfig,
    ops: Ops,
    device: torch.device,
    progress: Progress,
    group: TensorGroup = ALONE,
    pipeline: Pipeline = NO_PIPELINE,
    check_room: CheckRoom = lambda spec, layers, weights: None,
) -> Model:
    """Build the model that the config names and fill it.

    Args:
        progress: called with ("weights", bytes done, bytes in all), first with 0 and last with the total.
        group: the ranks that share each layer; this one's share is loaded.
        pipeline: this rank's place among those that have other layers.
        check_room: called when the weights are there, and before tables of all positions are made: those of a length for which there is no
            cache take minutes and gigabytes.

    Raises:
        UnsupportedModel: an architecture or a format that does not run here.
        CheckpointError: files missing, truncated, corrupt, or not matching their config; names the file and the tensor.
        ConfigError: the weights do not fit into memory, or the load format does not fit the path.
    """
    model = config.model
    if runs_through_transformers(config):
        if config.batch_invariant:
            raise ConfigError(
                f"--batch-invariant: {config.model.architecture} runs through transformers here, whose products depend on the batch. Leave it out."
            )
        check_divisible(config)
        if model.quantization is not None:
            raise _not_through_transformers(config)
        _check_load_format(config)
        progress(_PHASE, 0, 1)
        fallback = load_fallback(config, device, functools.partial(_check_room, config))
        check_room(fallback.spec, fallback.layer_specs, fallback.weights_bytes)
        progress(_PHASE, 1, 1)
        return fallback
    spec, family, gguf = read_spec(config, model.hf_config)
    _check_batch_invariant(config, spec)
    dtype: torch.dtype = getattr(torch, model.dtype)
    dealt_out = config.parallel.whole_experts and spec.moe is not None
    shard = Shard(group.rank, group.size, dealt_out, pipeline.stage, pipeline.stages)
    if dtype != torch.float32 or not compilable(spec) or config.parallel.world > 1:
        ops = replace(ops, decoder=None)  # compiled decoders compute in float32
    form, on_the_fly = weight_format(config)
    needed = sum(math.prod(p.shape) for p in Division(spec, shard).parameters.values()) * dtype.itemsize
    packed_on = device if keeps_gguf_packed(ops, device, dtype) else None
    if packed_on is not None and gguf is not None:
        needed = gguf_bytes(gguf, dtype.itemsize, ops) // config.parallel.world
    if form is not None and model.load_format == "dummy":
        needed = made_up_bytes(spec, shard, form, dtype.itemsize)
    elif form is not None and config.device.kind == "cuda":
        needed = _stored(model.path, gguf, None)[0]
    elif on_the_fly is not None:
        needed //= 2 if config.device.kind == "cuda" else dtype.itemsize
    elif gguf is None and model.load_format != "dummy" and (form is not None or ops.decoder is not None):
        needed = min(needed, _stored(model.path, None, None)[0])  # compiled kernels keep weights as they are stored
    _check_room(config, needed)

    with _sharing(ops, config, gguf if on_the_fly is None else None) as packing:
        assembly = Assembly(
            spec,
            family.weights,
            packing,
            dtype,
            device,
            shard=shard,
            group=group,
            prefix=family.prefix,
            on_the_fly=on_the_fly,
            strip=text_part.PREFIXES if text_part.ORIGIN in model.hf_config else (),
            ignored=_left_out(model.hf_config, spec.num_layers),
            described_by=described_by(gguf),
        )
        weights = fill(assembly, config, gguf, needed, progress, form, packed_on)
    layers = shard.layers(spec.num_layers)
    check_room(spec, shard_spec(spec, shard).layer_specs[layers.start : layers.stop], weights.nbytes)
    with torch.no_grad():
        built = build_decoder(
            spec,
            weights,
            ops,
            max_length=model.max_model_len,
            threads=config.device.threads,
            activations=config.device.activations,
            group=group,
            pipeline=pipeline,
            shard=shard,
        )
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # `ops.registry.Linear` wants weights that are there, not on their way
    return built


def _not_through_transformers(config: EngineConfig) -> OctavoError:
    """What is said of low-bit weights for a model that only transformers runs, or is asked to."""
    model, own = config.model, config.model.architecture in supported_architectures()
    if model.hf_config.get("quantization_config") is None:
        return ConfigError(
            f"--quantization {model.quantization}: {model.name} runs through transformers, where no weights are rounded. Leave it out"
            f"{', or leave --model-impl at auto' if own else ''}."
        )
    instead = "Leave --model-impl at auto, or take an unquantised copy" if own else "Take an unquantised copy"
    return UnsupportedModel(f"{model.name} runs through transformers, and quantised weights ({model.quantization}) do not. {instead}.")


def _check_load_format(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: `safetensors` is asked for, and there are only weights in PyTorch's format.
    """
    path = config.model.path
    if config.model.load_format == "safetensors" and os.path.isdir(path) and not _has_safetensors(path) and pickled_files(path):
        raise ConfigError(f"--load-format safetensors: {path} has weights in PyTorch's format alone. Leave it out to load those.")


def _has_safetensors(folder: str) -> bool:
    return bool(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))


def described_by(gguf: GgufFile | None) -> str:
    """What says how large the parameters of a checkpoint are, for messages."""
    return "config.json" if gguf is None else "the file's metadata"


def _left_out(hf_config: Mapping[str, Any], num_layers: int) -> str:
    """Regular expression of tensors that a model of text alone does without: layers behind the last that guess further tokens (DeepSeek-V3,
    GLM-4.5), and what reads images."""
    further = hf_config.get("num_nextn_predict_layers")
    behind = range(num_layers, num_layers + (further if isinstance(further, int) and 0 < further < 64 else 0))
    guessing = "|".join(rf"^(model\.layers|blk)\.{i}\." for i in behind)
    parts = (r"^(model\.)?mtp[._]", guessing, text_part.IGNORED if text_part.ORIGIN in hf_config else "")
    return "|".join(part for part in parts if part)


def weight_format(config: EngineConfig) -> tuple[Format | None, OnTheFly | None]:
    """How the checkpoint stores low-bit weights, and what others are rounded to while loading.

    Raises:
        UnsupportedModel, CheckpointError, ConfigError: see `load_model`.
    """
    model = config.model
    stored = stored_format(model.hf_config, os.path.join(model.path, "config.json"))
    asked = model.quantization
    return stored, ("fp8" if asked == "fp8" else "int8") if stored is None and asked in ON_THE_FLY else None


def has_low_bit(config: EngineConfig) -> bool:
    """Whether any weight of a checkpoint is stored as its quantization_config says; looks at the names of tensors alone."""
    form, on_the_fly = weight_format(config)
    if form is None or on_the_fly is not None or config.model.load_format == "dummy":
        return True
    names = (stored.name for stored in _stored(config.model.path, None, None)[1])
    return has_packed_experts(names) if form.method == "mxfp4" else has_pieces(names, form)


def made_up_bytes(spec: ModelSpec, shard: Shard, form: Format, itemsize: int) -> int:
    """About what made-up weights of a format take: all that a layer multiplies with is stored so, as far as this looks."""
    total = 0.0
    whole = Division(spec, Shard()).parameters
    for parameter in Division(spec, shard).parameters.values():
        count = math.prod(parameter.shape)
        storage = None
        if parameter.kind in ("linear", "experts") and parameter.name.startswith("layers."):
            name = f"model.{parameter.name.removesuffix('.weight')}"
            storage = form.storage(name, (parameter.shape[0], whole[parameter.name].shape[1]))
        total += count * (itemsize if storage is None else storage.bits / 8)
    return int(total)


def keeps_gguf_packed(ops: Ops, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers take the blocks of a GGUF file as codes. A GPU's kernels do so for 16-bit models; compiled decoders take some blocks
    themselves, and others as codes."""
    return ops.decoder is not None or (ops.keeps_low_bit and (device.type == "cpu" or dtype != torch.float32))


def gguf_bytes(gguf: GgufFile, itemsize: int, ops: Ops) -> int:
    """About what the weights of a file take where they stay packed, and the others have `itemsize` bytes."""
    total = 0.0
    for tensor in gguf.tensors.values():
        total += math.prod(tensor.shape) * _bits_kept(tensor, itemsize, ops) / 8
    return int(total)


def _bits_kept(tensor: GgufTensor, itemsize: int, ops: Ops) -> float:
    if len(tensor.shape) < 2:
        return 8 * itemsize
    if ops.decoder is None:
        bits = None if "_embd" in tensor.name else packed_bits(tensor.type)  # embeddings are looked up
        return 8 * itemsize if bits is None else bits
    return ops.decoder.encodings.get(tensor.type, 16.0)


@contextmanager
def _sharing(ops: Ops, config: EngineConfig, gguf: GgufFile | None) -> Iterator[Ops]:
    """`ops` whose packed weights other processes share, where they can."""
    if gguf is None or ops.decoder is None or ops.decoder.shared_rows is None or not config.device.share_weights:
        yield ops
        return
    with ops.decoder.shared_rows(packed_dir(), gguf.path, gguf.data_offset) as pack_rows:
        yield replace(ops, decoder=replace(ops.decoder, pack_rows=pack_rows))


def read_spec(config: EngineConfig, hf_config: Mapping[str, Any]) -> tuple[ModelSpec, Family, GgufFile | None]:
    """What the checkpoint of `config` is, and the GGUF file it comes from, if it does.

    Raises:
        UnsupportedModel, CheckpointError, ConfigError: see `load_model`.
    """
    if hf_config.get("use_bidirectional_attention") is True and config.model.pooling is None:
        raise UnsupportedModel(
            f"{config.model.name} cannot generate: its tokens see those behind them (use_bidirectional_attention), so that it embeds. "
            "Use --runner pooling."
        )
    longest, gguf = config.model.max_model_len, open_header(config)
    if gguf is None:
        try:
            spec, family = model_spec(hf_config, os.path.join(config.model.path, "config.json"))
            return spec.up_to(longest), family, None
        except UnsupportedModel as e:
            name = config.model.architecture
            if config.model.pooling is None and name in supported_architectures() and lets_its_attention_be_swapped(name):
                raise UnsupportedModel(f"{e} It may run through the installed transformers: --model-impl transformers.") from None
            raise
    spec, family = gguf_spec(hf_config, gguf)
    return spec.up_to(longest), family, gguf


def fill(
    assembly: Assembly,
    config: EngineConfig,
    gguf: GgufFile | None,
    needed: int,
    progress: Progress,
    form: Format | None = None,
    packed_on: torch.device | None = None,
) -> Weights:
    """Read (or make up) every weight of a model.

    Args:
        needed: bytes that the weights take in memory.
        form: how low-bit weights are stored; None: there are none.
        packed_on: where matrices of a GGUF file stay packed, if they do.

    Raises:
        CheckpointError, ConfigError: see `load_model`.
    """
    _check_load_format(config)
    try:
        with torch.no_grad():
            if config.model.load_format == "dummy":
                return _fill_dummy(assembly, needed, config.model.seed, progress, form)
            with ParallelReader(assembly.device) if assembly.device.type != "cpu" else nullcontext() as reader:
                ahead: Wanted | None = None
                if form is not None:  # pieces are read whole, whatever is kept of them
                    ahead = _every_tensor
                elif config.parallel.world == 1:
                    ahead = assembly.has_place_for
                total, tensors = _stored(config.model.path, gguf, reader, packed_on, ahead)
                if form is not None and form.method == "mxfp4":
                    tensors = whole_experts(tensors, assembly.device)
                elif form is not None:
                    names = _names(config.model.path)
                    tensors = whole_weights(tensors, names, form, assembly.device)
                return _fill_stored(assembly, total, tensors, progress)
    except (RuntimeError, MemoryError, OSError) as e:
        if not (isinstance(e, torch.OutOfMemoryError) or address_space.is_refusal(e)):
            raise
        raise ConfigError(too_large(config, needed)) from None


def _every_tensor(name: str) -> bool:
    del name
    return True


def _fill_dummy(assembly: Assembly, total: int, seed: int, progress: Progress, form: Format | None) -> Weights:
    progress(_PHASE, 0, total)
    for done in assembly.fill_dummy(seed, form):
        progress(_PHASE, min(done, total), total)
    weights = assembly.finish()
    progress(_PHASE, total, total)
    return weights


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


def _stored(
    path: str,
    gguf: GgufFile | None,
    reader: ParallelReader | None,
    packed_on: torch.device | None = None,
    ahead: Wanted | None = None,
) -> tuple[int, Iterable[StoredTensor]]:
    """The size of all weights in bytes, and the tensors, file by file; for the arguments see `open_safetensors` and `open_gguf`."""
    if gguf is not None:
        return sum(t.nbytes for t in gguf.tensors.values()), open_gguf(gguf, packed_on, reader)
    files = [] if _has_safetensors(path) else pickled_files(path)
    if files:
        return sum(map(os.path.getsize, files)), itertools.chain.from_iterable(map(open_pickled, files))
    files = weight_files(path)
    return sum(map(os.path.getsize, files)), itertools.chain.from_iterable(open_safetensors(file, reader, ahead) for file in files)


def _names(path: str) -> list[str]:
    """Of all tensors of a folder."""
    if _has_safetensors(path):
        return [name for file in weight_files(path) for name in tensor_names(file)]
    return [stored.name for stored in _stored(path, None, None)[1]]


def stored_tensors(config: EngineConfig, gguf: GgufFile | None) -> Iterable[StoredTensor]:
    """What the checkpoint holds, to be looked at.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return _stored(config.model.path, gguf, None)[1]


def _check_batch_invariant(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises:
    ConfigError: the same bits in any batch are asked for, and parts of the model are computed by a library that does not promise them.
    """
    if not config.batch_invariant:
        return
    name, why = spec.architecture, None
    if config.device.kind == "cpu":
        why = None if compilable(spec) else f"the compiled kernels do not run {name} as a whole, and torch's depend on the batch"
    elif spec.moe is not None:
        why = f"the products of experts on a GPU depend on the batch, and {name} has experts"
    elif spec.latent is not None:
        why = f"the products of latent attention on a GPU depend on the batch, and {name} has it"
    if why is not None:
        raise ConfigError(f"--batch-invariant: {why}. Leave it out.")


def _check_room(config: EngineConfig, needed: int) -> None:
    """Raises:
    ConfigError: weights of `needed` bytes do not fit into memory.
    """
    device, cache = config.device, config.cache
    room = device.free_bytes if device.kind == "cuda" else device.total_bytes
    if 0 < room < needed:
        raise ConfigError(too_large(config, needed))
    if device.kind == "cuda" and cache.memory_bytes is not None and 0 < room < needed + cache.memory_bytes:
        raise ConfigError(
            f"--kv-cache-memory-bytes {cache.memory_bytes} ({format_bytes(cache.memory_bytes)}) and the weights of {config.model.name} "
            f"({format_bytes(needed)}) are more than {device.name} has free: {format_bytes(room)} of {format_bytes(device.total_bytes)}. "
            "Lower it, or leave it out: then the cache takes what is left."
        )
    # Where the user has said how large the cache is, the share is no limit.
    if device.kind == "cuda" and not cache.sized and needed > (share := int(cache.memory_utilization * device.total_bytes)) > 0:
        raise ConfigError(
            f"The weights of {config.model.name} need {format_bytes(needed)}, and --gpu-memory-utilization {cache.memory_utilization:g} leaves "
            f"{format_bytes(share)} of {format_bytes(device.total_bytes)} for all of it. Raise it above {math.ceil(100 * needed / device.total_bytes) / 100:.2f}."
        )


def too_large(config: EngineConfig, needed: int) -> str:
    """What to say of weights of `needed` bytes that do not fit, and what would."""
    device, dtype = config.device, config.model.dtype
    if device.kind == "cpu" and needed < device.free_bytes and address_space.limit() is not None:  # the files are mapped beside them
        return address_space.told(f"to load the weights of {config.model.name}, {format_bytes(needed)} beside the files they are read from")
    room = device.free_bytes or device.total_bytes
    itemsize = getattr(torch, dtype).itemsize
    stored_so = config.model.path.endswith(".gguf") or weight_format(config) != (None, None)
    most = 0.9 * room
    # A tenth stays for a step's own memory and a small cache.
    at_8_bits = needed / itemsize
    if stored_so:
        has, instead = f"weights of about {format_bytes(int(most))}", " or one with fewer bits a weight"
    else:
        has, instead = f"about {most / itemsize / 1e9:.1f} billion parameters in {dtype}", ""
        if not runs_through_transformers(config):
            if at_8_bits <= most:
                instead = " or low-bit weights (--quantization int8, or a checkpoint made so)"
            elif at_8_bits / 2 <= most:
                instead = " or a checkpoint with 4 bits a weight"
    text = (
        f"The weights of {config.model.name} need {format_bytes(needed)} {'as they are kept' if stored_so else f'in {dtype}'}, but "
        f"{device.name} has {format_bytes(room)} free of {format_bytes(device.total_bytes)}. It has room for {has}: use a smaller model{instead}"
    )
    if device.kind == "cuda" and itemsize > 2:
        text += " or --dtype bfloat16"
    if room < 0.9 * device.total_bytes:
        text += ", or end what else uses the memory"
    return text + "."
