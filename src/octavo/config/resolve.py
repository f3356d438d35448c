"""The one pure function from user settings, model config and device to the frozen `EngineConfig`. Every default is here.

Nothing here touches files, the environment or the device.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from typing import Any, cast

from octavo.config.args import EngineArgs
from octavo.config.device import native_kernels_problem, native_kernels_remedy
from octavo.config.quantization import quantization_method
from octavo.config.sizes import format_bytes, parse_size
from octavo.config.types import (
    AttentionName,
    CacheConfig,
    CacheDTypeName,
    CpuActivations,
    DeviceInfo,
    DTypeName,
    EngineConfig,
    ModelConfig,
    NodesConfig,
    ParallelConfig,
    PoolingConfig,
    ReliabilityConfig,
    SchedulerConfig,
)
from octavo.errors import CheckpointError, ConfigError, NotYet, UnsupportedModel

_DTYPES: dict[str, DTypeName] = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_ATTENTION: dict[str, AttentionName] = {
    "AUTO": "auto",
    "TRITON": "triton",
    "TRITON_ATTN": "triton",
    "FLASHINFER": "flashinfer",
    "TORCH": "torch",
    "TORCH_SDPA": "torch",
}
_FOREIGN_ATTENTION = frozenset(
    [
        "FLASH_ATTN",
        "FLASH_ATTN_VLLM_V1",
        "FLASH_ATTN_MLA",
        "FLASHMLA",
        "FLASHMLA_SPARSE",
        "FLASHINFER_MLA",
        "CUTLASS_MLA",
        "TRITON_MLA",
        "FLEX_ATTENTION",
        "TREE_ATTN",
        "DUAL_CHUNK_FLASH_ATTN",
        "XFORMERS",
        "CPU_ATTN",
        "ROCM_ATTN",
        "ROCM_FLASH",
        "ROCM_AITER_FA",
        "ROCM_AITER_MLA",
        "ROCM_AITER_UNIFIED_ATTN",
        "PALLAS",
    ]
)
MAX_CPU_RANKS = 64
MAX_LENGTH = 2**31 - 1
_BIG_GPU = 70 * 2**30
_BEHIND_PADDING = re.compile(r"^(XLMRoberta|Roberta|Camembert|Data2VecText|Xmod).*(ForCausalLM)$")
"""Their positions begin behind the number of the padding token, in a table of `max_position_embeddings` rows."""
_MAX_LEN_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length")


def resolve(
    args: EngineArgs,
    *,
    path: str,
    name: str,
    hf_config: Mapping[str, Any],
    eos_token_ids: tuple[int, ...],
    device: DeviceInfo,
    pooling: PoolingConfig | None = None,
    pooling_length: int | None = None,
    node_token: str = "",
    share_gpus: bool = False,
    offline: bool = False,
) -> EngineConfig:
    """The configuration that these settings mean for this model on this device.

    Args:
        path: local folder or .gguf file of the model. name: what the user called it.
        hf_config: config.json, or its equivalent made from GGUF metadata.
        pooling: how the model pools, when that is what it is run for. pooling_length: the longest prompt it was made for.
        node_token: the secret that hosts know each other by.
        share_gpus: more ranks than GPUs are no error: they share them.
        offline: nobody waits for single tokens.

    Raises:
        ConfigError: a value is out of range or of the wrong kind; the message names the setting.
        NotYet: a setting asks for something Octavo does not do yet.
        CheckpointError, UnsupportedModel: the model's own config cannot be used.
    """
    warnings = _check(args)
    model = _model(args, path, name, hf_config, eos_token_ids, device, warnings, pooling_length)
    model = dataclasses.replace(model, pooling=pooling)
    _check_length(args, model)
    parallel = _parallel(args, model, device, node_token, warnings, share_gpus=share_gpus)
    if parallel.world == 1:
        model = _dtype_of_kernels(args, model, device, warnings)
    device = _kernels(args, model, device, parallel, warnings)
    scheduler = _scheduler(args, model, device, parallel.pipeline, warnings, offline=offline)
    return EngineConfig(
        model=model,
        cache=_cache(args, model, device, parallel, warnings),
        scheduler=scheduler,
        attention=_attention(args, device, warnings),
        batch_invariant=_batch_invariant(args, model, device, parallel.world),
        device=device,
        parallel=parallel,
        reliability=ReliabilityConfig(args.engine_restarts, args.engine_hang_timeout, args.debug_scripted_model),
        enforce_eager=args.enforce_eager,
        warnings=tuple(warnings),
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(args: EngineArgs) -> list[str]:
    """Refuse what is not done yet, note what is ignored, check choices."""
    warnings = []
    for f in dataclasses.fields(args):
        value, meta = getattr(args, f.name), f.metadata
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if meta["status"] == "not yet" and value != default:
            raise NotYet(f"{_flag(f.name)} {value}: Octavo does not do this yet. Leave it at its default ({default}).")
        if meta["status"] == "ignored" and value != default:
            warnings.append(f"{_flag(f.name)} has no effect here. {meta['help']}")
        if meta["choices"] and value is not None and value not in meta["choices"]:
            if (why := (meta["foreign"] or {}).get(value)) is not None:
                raise ConfigError(f"{_flag(f.name)} {value}: {why}")
            near = difflib.get_close_matches(str(value), meta["choices"], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{_flag(f.name)} {value!r} is not one of {', '.join(meta['choices'])}.{hint}")
    several = args.tensor_parallel_size != 1 or args.pipeline_parallel_size != 1
    if args.distributed_executor_backend in ("mp", "ray") and not several:
        warnings.append(f"--distributed-executor-backend {args.distributed_executor_backend} has no effect with one GPU: steps run inline.")
    if args.distributed_executor_backend in ("uni", "inline") and several:
        raise ConfigError(
            f"--distributed-executor-backend {args.distributed_executor_backend} runs a single rank in the engine's process, and "
            "--tensor-parallel-size or --pipeline-parallel-size asks for several. Leave it out, or take mp."
        )
    if args.enable_expert_parallel and args.tensor_parallel_size == 1:
        warnings.append(
            "--enable-expert-parallel has no effect without --tensor-parallel-size: experts are dealt out to the ranks of a layer."
        )
    return warnings


def _whole(args: EngineArgs, name: str, minimum: int = 1, maximum: int | None = None) -> int | None:
    """The whole number in a setting (8k and 8K are understood where sizes are), or None."""
    value = getattr(args, name)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ConfigError as e:
            raise ConfigError(f"{_flag(name)}: {e}") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{_flag(name)} must be a whole number, got {value!r}.")
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ConfigError(f"{_flag(name)} must be {allowed}, got {value}.")
    return value


def _positive(args: EngineArgs, name: str, maximum: float = math.inf, *, or_zero: bool = False) -> float | None:
    value = getattr(args, name)
    if value is None:
        return None
    fits = not isinstance(value, bool) and isinstance(value, (int, float)) and (0 < value <= maximum or (or_zero and value == 0))
    if not fits:
        allowed = f"{'0, or ' if or_zero else ''}greater than 0" + ("" if maximum == math.inf else f" and at most {maximum:g}")
        raise ConfigError(f"{_flag(name)} must be {allowed}, got {value!r}.")
    return float(value)


def _asked_quantization(args: EngineArgs, path: str, name: str) -> str | None:
    """A GGUF file says by itself what it is; who says so too is right."""
    if args.quantization != "gguf":
        return args.quantization
    if not path.endswith(".gguf") and args.load_format != "gguf":
        raise ConfigError(f"--quantization gguf: {name} is no GGUF file. Leave the option out, or name the .gguf file as the model.")
    return None


def _model(
    args: EngineArgs,
    path: str,
    name: str,
    hf_config: Mapping[str, Any],
    eos_token_ids: tuple[int, ...],
    device: DeviceInfo,
    warnings: list[str],
    longest: int | None = None,
) -> ModelConfig:
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, (list, tuple)) or not architectures or not isinstance(architectures[0], str):
        raise UnsupportedModel(f"{name}: its config names no architecture ('architectures'), so Octavo cannot tell how to run it.")
    quantization = quantization_method(_asked_quantization(args, path, name), hf_config, name)
    if quantization in ("fp8", "modelopt") and device.kind == "cuda" and device.capability < (8, 9):
        major, minor = device.capability
        if hf_config.get("quantization_config") is None:
            raise ConfigError(
                f"--quantization fp8: {device.name} (compute capability {major}.{minor}) has no float8; 8.9 or newer has. Use --quantization int8."
            )
        warnings.append(f"{device.name} has no float8: the weights take 16 bits in memory, twice what they take on disk.")
    if quantization is not None and path.endswith(".gguf"):
        raise ConfigError(f"--quantization {args.quantization}: the weights of a GGUF file stay as they are. Leave the option out.")
    vocab_size = hf_config.get("vocab_size")
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise CheckpointError(f"{name}: its config has no usable vocab_size (found {vocab_size!r}).")
    if beyond := [token for token in eos_token_ids if not 0 <= token < vocab_size]:
        rest = "at another of them" if len(beyond) < len(eos_token_ids) else "at a stop string, or at its longest"
        warnings.append(
            f"{name}: eos_token_id {', '.join(map(str, beyond[:4]))} is beyond the vocabulary ({vocab_size} tokens) and can never be written: "
            f"replies end {rest}. {_where_ids_are(path, hf_config)}"
        )
    limit = min(context_limit(hf_config, name), longest or MAX_LENGTH)
    auto = args.max_model_len in ("auto", -1)
    asked = None if auto else _whole(args, "max_model_len")
    if asked is not None and asked > limit:
        warnings.append(beyond_the_model(asked) + f"running with {limit}.")
    max_logprobs = _whole(args, "max_logprobs", minimum=-1)
    seed = _whole(args, "seed", minimum=-(2**63), maximum=2**63 - 1)
    assert max_logprobs is not None and seed is not None
    return ModelConfig(
        path=path,
        name=name,
        hf_config=dict(hf_config),
        architecture=architectures[0],
        dtype=_dtype(args, hf_config, device, warnings),
        max_model_len=min(limit, asked or limit),
        auto_max_model_len=auto,
        vocab_size=vocab_size,
        eos_token_ids=tuple(t for t in eos_token_ids if 0 <= t < vocab_size),
        load_format=args.load_format,
        seed=seed,
        max_logprobs=max_logprobs,
        logprobs_mode=args.logprobs_mode,
        implementation=args.model_impl,
        quantization=quantization,
        served_name=(args.served_model_name or [""])[0],
    )


def _where_ids_are(path: str, hf_config: Mapping[str, Any]) -> str:
    if not path.endswith(".gguf"):
        return "Correct it in generation_config.json or config.json."
    arch = hf_config.get("model_type")
    return f"The GGUF file's metadata say so (tokenizer.ggml.eos_token_id, {arch}.vocab_size): download or convert it again."


def beyond_the_model(asked: int) -> str:
    """What is said of more tokens than the model was made for, up to what is done instead."""
    return f"--max-model-len {asked} is beyond what the model was made for: "


_ONE_EACH = "a request needs room for one token of its prompt and one of its reply"


def too_short(asked: object) -> str:
    """What is said of a length in which no request can run."""
    return f"--max-model-len must be at least 2, got {asked}: {_ONE_EACH}."


def _check_length(args: EngineArgs, model: ModelConfig) -> None:
    """
    Raises:
        ConfigError, CheckpointError: a model that generates has no room for a token of prompt and one of output.
    """
    if model.pooling is not None or model.max_model_len > 1:
        return
    if context_limit(model.hf_config, model.name) > 1:
        raise ConfigError(too_short(args.max_model_len))
    raise CheckpointError(f"{model.name}: its config has an unusable context length (1): {_ONE_EACH}.")


def context_limit(hf_config: Mapping[str, Any], name: str) -> int:
    """The longest sequence the model was made for, in tokens, with its rope scaling."""
    limit = next((hf_config[k] for k in _MAX_LEN_KEYS if hf_config.get(k) is not None), 2048)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise CheckpointError(f"{name}: its config has an unusable context length ({limit!r}).")
    if _BEHIND_PADDING.search(str((hf_config.get("architectures") or [""])[0])):
        padding = hf_config.get("pad_token_id", 1)
        limit = max(1, limit - (padding if isinstance(padding, int) else 1) - 1)
    scaling = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"{name}: its config has an unusable rope_scaling ({scaling!r}).")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = scaling.get("factor")
    if isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor > 1:
        # yarn's own config gives the length before scaling; where it does not, max_position_embeddings is already the scaled one.
        if kind == "yarn" and isinstance(scaling.get("original_max_position_embeddings"), int):
            return int(scaling["original_max_position_embeddings"] * factor)
        if kind in ("linear", "dynamic"):
            return int(limit * factor)
    return limit


_STORED_DTYPES = frozenset({*_DTYPES, "auto", "float64", "double", "int8", "uint8"})
"""What a config may say of its weights, besides kinds of float8 and float4."""


def _dtype(args: EngineArgs, hf_config: Mapping[str, Any], device: DeviceInfo, warnings: list[str]) -> DTypeName:
    stated = hf_config.get("dtype") or hf_config.get("torch_dtype")
    stored = "float16" if stated is None else str(stated).removeprefix("torch.")
    if args.dtype == "auto" and stored not in _STORED_DTYPES and not stored.startswith("float"):
        raise CheckpointError(
            f"The config's dtype {stated!r} is no number format (float32, bfloat16, float16, ...). Correct it, or say what to compute in with --dtype."
        )
    if args.dtype != "auto":
        dtype = _DTYPES[args.dtype]
    elif device.kind == "cpu":
        return "float32"
    else:
        # Low-bit weights published as float16 were seldom checked for overflow in it; bfloat16 cannot overflow there.
        wide = hf_config.get("quantization_config") is not None and device.capability >= (8, 0)
        dtype = "bfloat16" if stored == "bfloat16" or wide else "float16"
    if dtype == "bfloat16" and device.kind == "cuda" and device.capability < (8, 0):
        if args.dtype != "auto":
            raise ConfigError(f"{device.name} cannot compute in bfloat16. Use --dtype float16.")
        warnings.append(f"{device.name} cannot compute in bfloat16: using float16.")
        return "float16"
    return dtype


def _parallel(
    args: EngineArgs, model: ModelConfig, device: DeviceInfo, node_token: str, warnings: list[str], *, share_gpus: bool
) -> ParallelConfig:
    """Who computes the model together. Whether it can be divided so is seen when its config is read."""
    tensor, stages = _whole(args, "tensor_parallel_size"), _whole(args, "pipeline_parallel_size")
    replicas = _whole(args, "data_parallel_size")
    assert tensor is not None and stages is not None and replicas is not None
    ray = args.distributed_executor_backend == "ray" and tensor * stages > 1
    parallel = ParallelConfig(
        tensor,
        stages,
        replicas,
        whole_experts=args.enable_expert_parallel,
        # With more than two ranks NCCL adds up in an order of its own: what a row gives must not depend on how many there are.
        small_sums=not args.disable_custom_all_reduce and not (args.batch_invariant and tensor > 2),
        executor="ray" if ray else "mp",
        nodes=_nodes(args, tensor * stages, node_token),
    )
    sizes = {"--tensor-parallel-size": tensor, "--pipeline-parallel-size": stages, "--data-parallel-size": replicas}
    flag = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if ray and replicas > 1:
        raise ConfigError(f"{flag}: replicas whose ranks Ray places are servers of their own. Leave out --data-parallel-size.")
    needed, gpus = replicas * parallel.per_node, max(1, device.count)
    if not ray and device.kind == "cuda" and needed > gpus:
        if share_gpus and parallel.nodes.count == 1:
            warnings.append(
                f"OCTAVO_SHARE_GPUS: {needed} ranks share {gpus} GPU{'s' * (gpus > 1)}: right, and slow. For tests of several ranks."
            )
            parallel = dataclasses.replace(parallel, shared_gpus=gpus)
        else:
            where = "" if parallel.nodes.count == 1 else f" on each of {parallel.nodes.count} hosts"
            here = "there are" if parallel.nodes.count == 1 else "this one has"
            raise ConfigError(f"{flag}: needs {needed} GPUs{where}, and {here} {device.count}. Lower it.")
    if device.kind == "cpu" and replicas * parallel.world > MAX_CPU_RANKS:
        raise ConfigError(f"{flag}: at most {MAX_CPU_RANKS} processes on a CPU.")
    if parallel.world > 1 and model.pooling is not None:
        raise ConfigError(f"{flag}: a model that pools runs on one device. Leave it out.")
    if parallel.world > 1 and args.debug_scripted_model is not None:
        raise ConfigError(f"{flag}: a scripted model has nothing to divide. Leave it out.")
    return parallel


def _nodes(args: EngineArgs, world: int, token: str) -> NodesConfig:
    """The hosts that compute the model together."""
    count, rank, port = _whole(args, "nnodes"), _whole(args, "node_rank", minimum=0), _whole(args, "master_port", maximum=65535)
    timeout = _positive(args, "node_timeout")
    assert count is not None and rank is not None and port is not None and timeout is not None
    if count == 1:
        if rank > 0:
            raise ConfigError(f"--node-rank {rank}: there is one host. Say how many there are with --nnodes.")
        return NodesConfig(timeout=timeout)  # a Ray cluster has hosts too
    if rank >= count:
        raise ConfigError(f"--node-rank {rank}: with --nnodes {count} it goes from 0 to {count - 1}.")
    if args.distributed_executor_backend == "ray":
        raise ConfigError("--nnodes: Ray places the ranks by itself. Leave it out, or --distributed-executor-backend ray.")
    if args.data_parallel_size != 1:
        raise ConfigError("--nnodes: replicas (--data-parallel-size) share a host. Start a server on each host instead.")
    if world % count:
        raise ConfigError(
            f"--nnodes {count}: the {world} ranks (--tensor-parallel-size x --pipeline-parallel-size) cannot be dealt out evenly to so many "
            "hosts."
        )
    if not args.master_addr:
        raise ConfigError("--master-addr is empty: give an address of the first host that the others reach.")
    return NodesConfig(count, rank, args.master_addr, port, timeout, token)


def _dtype_of_kernels(args: EngineArgs, model: ModelConfig, device: DeviceInfo, warnings: list[str]) -> ModelConfig:
    """The model in the dtype that the compiled CPU kernels have, if that is all that keeps it from them."""
    if not device.native_kernels or model.dtype == "float32" or args.cpu_kernels == "torch" or model.pooling is not None:
        return model
    if model.path.endswith(".gguf"):
        warnings.append(
            f"--dtype {args.dtype}: the compiled CPU kernels keep a GGUF file's weights packed and compute in float32; the option has no "
            "effect. (--cpu-kernels torch unpacks them to it, and is several times slower.)"
        )
        return dataclasses.replace(model, dtype="float32")
    warnings.append(
        f"--dtype {args.dtype}: the compiled CPU kernels, which compute in float32 and keep 16-bit weights as they are, are left out for "
        "torch's, which are several times slower. Leave the option out."
    )
    return model


def _kernels(args: EngineArgs, model: ModelConfig, device: DeviceInfo, parallel: ParallelConfig, warnings: list[str]) -> DeviceInfo:
    """The device with the choice of CPU kernels made."""
    usable = device.kind == "cpu" and model.dtype == "float32" and args.cpu_kernels != "torch" and model.pooling is None
    if usable and parallel.world > 1:
        if args.cpu_kernels == "native":
            raise ConfigError("--cpu-kernels native: they compute whole models, and this one is divided. Leave it out.")
        usable = False
    if usable and not device.native_kernels:
        if args.cpu_kernels == "native":
            raise ConfigError(f"--cpu-kernels native: {native_kernels_problem()}. {native_kernels_remedy()}, or use --cpu-kernels torch.")
        if device.native_kernels is False:
            warnings.append(
                f"There are no compiled CPU kernels: {native_kernels_problem()}. Running on torch's, which are several times slower. "
                f"{native_kernels_remedy()}."
            )
    native = usable and bool(device.native_kernels)
    return dataclasses.replace(
        device,
        native_kernels=native,
        activations=cast(CpuActivations, args.cpu_activations),
        share_weights=native and args.cpu_share_weights,
    )


def _cache(args: EngineArgs, model: ModelConfig, device: DeviceInfo, parallel: ParallelConfig, warnings: list[str]) -> CacheConfig:
    block_size = _whole(args, "block_size", maximum=256)
    utilization = _positive(args, "gpu_memory_utilization", maximum=1.0)
    assert block_size is not None and utilization is not None
    if parallel.shared_gpus:
        utilization /= -(-parallel.world * parallel.data // parallel.shared_gpus)
    memory = _whole(args, "kv_cache_memory_bytes")
    if memory is None and (gib := _positive(args, "cpu_kvcache_space")) is not None:
        memory = int(gib * 2**30)
    if memory is not None and device.kind == "cpu" and parallel.executor != "ray":
        _check_host_memory(args, memory, device, parallel)
    dtype = _cache_dtype(args, model, device)
    return CacheConfig(
        block_size=block_size,
        memory_utilization=utilization,
        memory_bytes=memory,
        num_blocks_override=_whole(args, "num_gpu_blocks_override", minimum=2),
        dtype=dtype,
        prefix_caching=args.enable_prefix_caching,
        calibrate=_calibrates(args, dtype, warnings),
    )


def _check_host_memory(args: EngineArgs, memory: int, device: DeviceInfo, parallel: ParallelConfig) -> None:
    """A host gives out more memory than it has, and ends who uses it.

    Raises:
        ConfigError: the caches of all processes here are more than that.
    """
    count = parallel.per_node * parallel.data
    if count * memory <= device.total_bytes or not device.total_bytes:
        return
    flag = "--kv-cache-memory-bytes" if args.kv_cache_memory_bytes is not None else "--cpu-kvcache-space"
    each = "" if count == 1 else f", {count} times (once for each process),"
    most = device.total_bytes // count
    raise ConfigError(
        f"{flag}: {format_bytes(memory)}{each} is more than the {format_bytes(device.total_bytes)} of memory here. Give at most "
        f"{most if args.kv_cache_memory_bytes is not None else f'{most / 2**30:.2f} (GiB)'}, or leave it out."
    )


def _calibrates(args: EngineArgs, dtype: CacheDTypeName, warnings: list[str]) -> bool:
    if not args.calculate_kv_scales:
        return False
    if dtype != "float8_e4m3fn":
        warnings.append("--calculate-kv-scales has no effect without --kv-cache-dtype fp8.")
        return False
    if args.batch_invariant:
        raise ConfigError(
            "--batch-invariant: with --calculate-kv-scales, answers depend on which tokens a server sees first. Leave out one of them."
        )
    return True


def _cache_dtype(args: EngineArgs, model: ModelConfig, device: DeviceInfo) -> CacheDTypeName:
    asked = args.kv_cache_dtype
    if asked in ("fp8", "fp8_e4m3"):
        if device.kind == "cpu":
            raise ConfigError(f"--kv-cache-dtype {asked} needs an NVIDIA GPU. On a CPU use float16, float32 or auto.")
        if device.capability < (8, 9):
            major, minor = device.capability
            raise ConfigError(
                f"--kv-cache-dtype {asked}: {device.name} (compute capability {major}.{minor}) cannot convert float8; 8.9 or newer can. "
                f"Use auto."
            )
        if model.dtype == "float32":
            raise ConfigError(f"--kv-cache-dtype {asked} goes with --dtype bfloat16 or float16, not float32.")
        return "float8_e4m3fn"
    if asked != "auto":
        return _DTYPES[asked]
    # Reading the cache bounds decoding on a CPU, and the compiled kernels convert while they read. Who asks for float32 wants its numbers:
    # rounded keys can change which experts a router takes.
    wants_float32 = args.dtype != "auto" and _DTYPES[args.dtype] == "float32"
    return "float16" if device.native_kernels and not wants_float32 else model.dtype


def _attention(args: EngineArgs, device: DeviceInfo, warnings: list[str]) -> AttentionName:
    asked = args.attention_backend.upper()
    if asked in _FOREIGN_ATTENTION:
        warnings.append(f"--attention-backend {args.attention_backend} is not one of Octavo's: choosing by itself.")
        return "auto"
    if asked not in _ATTENTION:
        near = difflib.get_close_matches(asked, _ATTENTION, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--attention-backend {args.attention_backend!r} is not one of auto, TRITON_ATTN, FLASHINFER, TORCH_SDPA.{hint}")
    chosen = _ATTENTION[asked]
    if device.kind == "cpu" and chosen in ("triton", "flashinfer"):
        warnings.append(f"--attention-backend {args.attention_backend} has no effect on a CPU.")
        return "auto"
    if chosen == "flashinfer":
        warnings.append("--attention-backend FLASHINFER: steps run without graphs. With few requests they take several times as long.")
    if args.batch_invariant and chosen not in ("auto", "triton"):
        raise ConfigError(
            f"--batch-invariant has attention of its own, which {args.attention_backend} cannot replace. Leave out one of them."
        )
    return chosen


def _batch_invariant(args: EngineArgs, model: ModelConfig, device: DeviceInfo, ranks: int) -> bool:
    """Checked here as far as settings tell; `attention.select` knows the rest."""
    if not args.batch_invariant:
        return False
    if model.pooling is not None:
        raise ConfigError("--batch-invariant is for models that generate: what a model pools depends on the batch. Leave it out.")
    if device.kind == "cpu" and ranks > 1:
        raise ConfigError("--batch-invariant on a CPU needs the native kernels, which one process runs: leave out -tp and -pp.")
    if device.kind == "cpu" and not device.native_kernels:
        raise ConfigError(
            "--batch-invariant on a CPU needs the native kernels, which run float32 models: leave --dtype and --cpu-kernels at auto "
            "(octavo doctor tells whether they were built)."
        )
    if device.kind == "cuda" and model.dtype == "float32":
        raise ConfigError("--batch-invariant on a GPU goes with --dtype bfloat16 or float16, not float32.")
    return True


def _scheduler(
    args: EngineArgs, model: ModelConfig, device: DeviceInfo, stages: int, warnings: list[str], *, offline: bool
) -> SchedulerConfig:
    gpu = device.kind == "cuda"
    big = gpu and device.total_bytes >= _BIG_GPU
    seqs = _whole(args, "max_num_seqs") or (1024 if big else 256 if gpu else 64)
    budget = _whole(args, "max_num_batched_tokens") or (16384 if big else 8192 if gpu else 2048)
    if not args.enable_chunked_prefill and budget < model.max_model_len:
        if args.max_num_batched_tokens is not None:
            raise ConfigError(
                f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least the context length "
                f"({model.max_model_len}), got {budget}. Raise it, lower --max-model-len, or leave chunked prefill on."
            )
        budget = model.max_model_len
    if seqs > budget:
        if args.max_num_seqs is not None:  # by default it follows
            warnings.append(f"--max-num-seqs {seqs} is more than the token budget of a step: running with {budget}.")
        seqs = budget
    target = _positive(args, "target_step_ms", or_zero=True)
    if target is None:
        target = 250.0 if not gpu else 0.0 if offline else 200.0
    threshold = _whole(args, "long_prefill_token_threshold", minimum=0)
    max_waiting = _whole(args, "max_waiting")
    assert threshold is not None and max_waiting is not None
    if _whole(args, "engine_restarts", minimum=0) is None or _positive(args, "engine_hang_timeout") is None:
        raise ConfigError("--engine-restarts and --engine-hang-timeout need a value.")
    policy = args.scheduling_policy
    assert policy in ("fcfs", "priority", "fair")
    overlap = gpu if args.async_scheduling is None else args.async_scheduling
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        chunked_prefill=args.enable_chunked_prefill,
        policy=policy,  # type: ignore[arg-type]
        target_step_ms=target or None,
        long_prefill_token_threshold=threshold,
        max_waiting=max_waiting,
        inflight=(1 if overlap else 0) + stages - 1,
        stages=stages,
        first_chunk=2048 if gpu else 128,
    )
