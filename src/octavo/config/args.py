"""`EngineArgs`: every engine setting a user can give, with its default, help text and choices, in one table.

The command line, `LLM(...)`, `AsyncLLM(...)` and the configuration reference in docs/ are all generated from this class.
Names and defaults follow vLLM where it has them. `None` means "decide from the model and the device" (see resolve.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def setting(
    default: T,
    help: str,
    *,
    group: str,
    size: bool = False,
    short: str | None = None,
    choices: tuple[str, ...] | None = None,
    foreign: Mapping[str, str] | None = None,
    aliases: tuple[str, ...] = (),
    status: Literal["works", "ignored", "not yet"] = "works",
) -> T:
    """A dataclass field with what the CLI and the docs need.

    Args:
        size: accepts 8k / 8K suffixes.
        foreign: further values that other engines have; what to say to who gives one.
        status: "ignored" is accepted with a warning, "not yet" is refused unless it is the default.
    """
    metadata = {
        "help": help,
        "group": group,
        "size": size,
        "short": short,
        "choices": choices,
        "foreign": foreign,
        "aliases": aliases,
        "status": status,
    }
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineArgs:
    """User settings of an engine. See the configuration reference for each field."""

    # Model
    model: str = setting("", "Model: a local folder, a .gguf file, a hub name, or empty for the bundled one.", group="model")
    served_model_name: list[str] | None = setting(
        None, "Names the server answers to; the first is echoed in replies and metrics. Default: the model.", group="model"
    )
    tokenizer: str | None = setting(None, "Tokenizer folder or hub name. Default: the model's own.", group="model")
    tokenizer_mode: str = setting("auto", "Which tokenizer implementation to use.", group="model", choices=("auto", "hf", "slow"))
    skip_tokenizer_init: bool = setting(False, "Start without a tokenizer: token ids in, token ids out.", group="model")
    revision: str | None = setting(None, "Hub revision (branch, tag or commit).", group="model")
    download_dir: str | None = setting(None, "Where hub downloads go. Default: the hub's own cache.", group="model")
    trust_remote_code: bool = setting(
        False, "Octavo never runs code from a checkpoint; accepted and ignored.", group="model", status="ignored"
    )
    hf_token: str | None = setting(None, "Token for private hub repositories.", group="model")
    hf_overrides: dict[str, Any] = setting({}, "JSON: values that replace entries of the model's config.json.", group="model")
    dtype: str = setting(
        "auto",
        "Weights and activations. auto: bf16 stays bf16, fp32 and fp16 become fp16 on a GPU (bf16 where the weights are quantised); float32 on a CPU.",
        group="model",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    quantization: str | None = setting(
        None,
        "How the weights are stored; the checkpoint says so itself. fp8 and int8 also round the weights of a full-precision checkpoint "
        "while they are loaded.",
        group="model",
        short="q",
    )
    load_format: str = setting(
        "auto",
        "How weights are read; dummy makes random ones from config.json alone.",
        group="model",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    max_model_len: int | str | None = setting(
        None,
        "Longest prompt + output, in tokens (8k, 8K). auto: the longest that fits in memory. Default: the model's own.",
        group="model",
        size=True,
    )
    runner: str = setting(
        "auto",
        "What the model is run for: generate, or pooling (embeddings, classes, scores). auto: what its own files say.",
        group="model",
        choices=("auto", "generate", "pooling"),
    )
    model_impl: str = setting(
        "auto",
        "Whose model code runs: Octavo's, or that of the installed transformers with Octavo's attention and cache. "
        "auto: Octavo's for every architecture that it has.",
        group="model",
        choices=("auto", "octavo", "transformers"),
    )
    seed: int = setting(0, "Seed for dummy weights and for requests' own seeds.", group="model")
    generation_config: str = setting(
        "auto", "Default sampling parameters: auto (the model's generation_config.json), vllm or none (ours), or a folder.", group="model"
    )
    override_generation_config: dict[str, Any] = setting({}, "JSON: default sampling parameters that win over the model's.", group="model")
    max_logprobs: int = setting(20, "Most logprobs a request may ask for; -1 is no limit.", group="model")
    logprobs_mode: str = setting(
        "raw_logprobs",
        "Logprobs before (raw) or after (processed) penalties, temperature and masks.",
        group="model",
        choices=("raw_logprobs", "processed_logprobs"),
    )

    # Cache
    block_size: int = setting(16, "Tokens in a KV-cache block.", group="cache")
    gpu_memory_utilization: float = setting(0.9, "Fraction of the GPU's memory this instance may use, all together.", group="cache")
    kv_cache_memory_bytes: int | None = setting(
        None, "Size of the KV cache in bytes (2g, 2G); the fraction is then ignored.", group="cache", size=True
    )
    cpu_kvcache_space: float | None = setting(
        None, "Size of the KV cache in GiB when running on a CPU. Default: from free memory.", group="cache"
    )
    num_gpu_blocks_override: int | None = setting(None, "Use exactly this many KV blocks (for tests).", group="cache")
    kv_cache_dtype: str = setting(
        "auto",
        "KV cache element type. fp8 (the same as fp8_e4m3) halves the cache on NVIDIA GPUs from compute capability 8.9 on. "
        "auto: the model's; on a CPU with native kernels float16, but for --dtype float32.",
        group="cache",
        choices=("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3"),
        foreign={
            "fp8_e5m2": "its two mantissa bits are too coarse for keys and values. Use fp8_e4m3.",
            "fp8_inc": "that is for another maker's accelerators. Use fp8.",
            "fp8_ds_mla": "Octavo has no such layout. Use fp8, or auto.",
            "nvfp4": "4 bits are not kept here. Use fp8.",
            "int8": "8-bit integers are not kept here. Use fp8 on a GPU, float16 on a CPU.",
            "q8_0": "blocks are not kept here. Use fp8 on a GPU, float16 on a CPU.",
            "q4_0": "blocks are not kept here. Use fp8 on a GPU, float16 on a CPU.",
            "bf16": "it is called bfloat16 here.",
            "f16": "it is called float16 here.",
            "fp16": "it is called float16 here.",
            "half": "it is called float16 here.",
        },
    )
    calculate_kv_scales: bool = setting(
        False,
        "With an fp8 KV cache: find the scales that the checkpoint lacks over the first 512 tokens served.",
        group="cache",
    )
    enable_prefix_caching: bool = setting(True, "Reuse the KV cache of equal prompt prefixes.", group="cache")
    swap_space: float = setting(
        4.0, "Preempted requests are recomputed, not swapped; accepted and ignored.", group="cache", status="ignored"
    )
    cpu_offload_gb: float = setting(0.0, "Weights kept in host memory, GiB.", group="cache", status="not yet")

    # Scheduler
    max_num_seqs: int | None = setting(
        None, "Most sequences running at once. Default: 256, on GPUs from 70 GiB on 1024, on a CPU 64.", group="scheduler"
    )
    max_num_batched_tokens: int | None = setting(
        None, "Token budget of a step. Default: 8192 on a GPU (from 70 GiB on 16384), 2048 on a CPU.", group="scheduler", size=True
    )
    enable_chunked_prefill: bool = setting(True, "Split long prompts over steps, mixed with decodes.", group="scheduler")
    scheduling_policy: str = setting("fcfs", "Order of waiting requests.", group="scheduler", choices=("fcfs", "priority", "fair"))
    target_step_ms: float | None = setting(
        None,
        "Size prompt chunks so that a step with decodes lasts about this long; 0 is off. Default: 200 on a GPU (off in LLM, where nobody waits "
        "for single tokens), 250 on a CPU.",
        group="scheduler",
    )
    max_waiting: int = setting(1024, "Requests that may wait before the server answers 429.", group="scheduler")
    async_scheduling: bool | None = setting(
        None, "Plan step N+1 while step N runs. Default: on for a GPU, off for a CPU.", group="scheduler"
    )
    long_prefill_token_threshold: int = setting(0, "Chunks of prompts longer than this are capped at it; 0 is off.", group="scheduler")
    max_num_partial_prefills: int = setting(
        1, "Chunks are sized by --target-step-ms; accepted and ignored.", group="scheduler", status="ignored"
    )
    max_long_partial_prefills: int = setting(
        1, "Chunks are sized by --target-step-ms; accepted and ignored.", group="scheduler", status="ignored"
    )

    # Execution
    device: str = setting("auto", "Where to run.", group="execution", choices=("auto", "cpu", "cuda"))
    threads: int | None = setting(None, "CPU threads. Default: the cores this process may use.", group="execution")
    cpu_kernels: str = setting(
        "auto",
        "Kernels for float32 models on a CPU: native (compiled with Octavo) or torch. auto: native where they were built.",
        group="execution",
        choices=("auto", "native", "torch"),
    )
    cpu_activations: str = setting(
        "int8",
        "What the native kernels multiply 4- and 8-bit weights with. int8, the default, is fastest: 8 bits, and 15 for the few numbers that "
        "are far larger than the others. It is accurate enough for chat (the likeliest token is the same in 98% of places, perplexity within "
        "0.5%), but decides where two tokens are nearly equally likely: half of all "
        "greedy texts take another wording somewhere (9 of 20 were the same over 60 tokens). int16 gives the texts of exact float32 "
        "activations (20 of 20); it costs nothing noticeable for one request, and a quarter to a half more time in batches and prompts. "
        "Choose int16 where replies are compared, scored or must be repeated elsewhere. float32 only checks the others.",
        group="execution",
        choices=("int8", "int16", "float32"),
    )
    cpu_share_weights: bool = setting(
        True,
        "Keep the packed weights of a GGUF file of 32 MiB or more in $OCTAVO_HOME/packed (about the file's size): processes that serve the "
        "same file then share them in memory, and later starts need not pack. Files whose model is gone or has changed are removed.",
        group="execution",
    )
    enforce_eager: bool = setting(False, "No graph capture.", group="execution")
    attention_backend: str = setting(
        "auto",
        "Attention kernels on a GPU: TRITON_ATTN (Octavo's own), FLASHINFER (where flashinfer-python is installed; no graphs) or TORCH_SDPA. "
        "Names of other vLLM backends mean auto.",
        group="execution",
    )
    batch_invariant: bool | None = setting(
        None,
        "The logits of a request are the same bits whatever else is in the batch and however it is computed. On a GPU steps take longer for "
        "it: 1.1 to 1.5 times on an H200, more with low-bit weights, which are unpacked in every step (architecture.md, On a GPU). There it "
        "goes with bfloat16 and float16, and not with models that have experts or latent attention; on a CPU with models that the compiled "
        "kernels run as a whole, in one process; and not with models that run through transformers. "
        "Default: off, or on with the environment variable VLLM_BATCH_INVARIANT=1.",
        group="execution",
    )
    tensor_parallel_size: int = setting(1, "GPUs that share each layer (processes, on a CPU).", group="execution", short="tp")
    pipeline_parallel_size: int = setting(1, "Groups of GPUs that share the layers between them.", group="execution", short="pp")
    data_parallel_size: int = setting(
        1,
        "Replicas of the model, each on GPUs of its own. A request goes to the one that has the longest beginning of its prompt cached, or "
        "that has least to do. Not for LLM, which has one: AsyncLLM, or a server.",
        group="execution",
        short="dp",
    )
    enable_expert_parallel: bool = setting(
        False, "With several GPUs: deal out whole experts, instead of a share of each.", group="execution"
    )
    distributed_executor_backend: str | None = setting(
        None,
        "How ranks are started: mp is a process each, on this host or on those of --nnodes, and what is taken with several; ray places them "
        "in a Ray cluster.",
        group="execution",
        choices=("mp", "ray", "uni", "inline"),
    )
    nnodes: int = setting(
        1, "Hosts that compute the model together. Each runs the same command with a --node-rank of its own.", group="execution"
    )
    node_rank: int = setting(
        0, "Which of the hosts this is. 0 runs the server; the others have no port of their own, and end when it ends.", group="execution"
    )
    master_addr: str = setting(
        "127.0.0.1", "With several hosts: an address of the first one (--node-rank 0) that the others reach.", group="execution"
    )
    master_port: int = setting(29501, "With several hosts: the port there that the others come to.", group="execution")
    node_token_file: str | None = setting(
        None,
        "With several hosts: a file with the secret that they know each other by. Default: the environment variable OCTAVO_NODE_TOKEN. "
        "Needed where --master-addr is not a private address.",
        group="execution",
    )
    node_timeout: float = setting(
        300.0, "Seconds that several hosts wait for each other at the start, and for places in a Ray cluster.", group="execution"
    )
    disable_custom_all_reduce: bool = setting(
        False,
        "With several GPUs: all sums over them through NCCL, instead of small ones through symmetric memory where a test at start passes.",
        group="execution",
    )
    speculative_config: dict[str, Any] | None = setting(None, "JSON: speculative decoding.", group="execution", status="not yet")
    enable_lora: bool = setting(False, "LoRA adapters.", group="execution", status="not yet")
    enable_sleep_mode: bool = setting(False, "Release GPU memory on request.", group="execution", status="not yet")

    # Chat
    chat_template: str | None = setting(None, "Chat template: a file, or the template itself. Default: the model's.", group="chat")
    chat_template_content_format: str = setting(
        "auto", "How message content reaches the template.", group="chat", choices=("auto", "string", "openai")
    )
    default_chat_template_kwargs: dict[str, Any] = setting({}, "JSON: variables for the chat template.", group="chat")

    # Reliability and observation
    engine_restarts: int = setting(
        3,
        "Times the engine process is restarted within ten minutes, with live requests replayed, before the server gives up and ends.",
        group="reliability",
    )
    engine_hang_timeout: float = setting(
        300.0,
        "Seconds without a finished step, with work to do, after which the engine is taken for hung and restarted.",
        group="reliability",
    )
    disable_log_stats: bool = setting(False, "No periodic line of throughput and cache use.", group="reliability")
    debug_scripted_model: str | None = setting(
        None, "Tests: a JSON file that says which tokens to return instead of running a model (docs/architecture.md).", group="reliability"
    )
