"""The resolved configuration: frozen, picklable, complete. Produced by resolve.py only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

DTypeName = Literal["float32", "float16", "bfloat16"]
CacheDTypeName = Literal["float32", "float16", "bfloat16", "float8_e4m3fn"]
"""As torch calls them."""
AttentionName = Literal["auto", "triton", "flashinfer", "torch"]


CpuActivations = Literal["float32", "int16", "int8"]
"""What compiled CPU kernels multiply 4- and 8-bit weights with: as computed, or rounded with a scale for each 32 numbers."""


@dataclass(frozen=True)
class DeviceInfo:
    """What there is to run on. Detected once by device.py."""

    kind: Literal["cpu", "cuda"]
    name: str
    total_bytes: int
    free_bytes: int
    threads: int
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability."""
    native_kernels: bool | None = None
    """CPU: the compiled kernels are used; False: they are missing or not wanted; None: nobody looked, which means no."""
    activations: CpuActivations = "int8"
    """Of the compiled kernels."""
    count: int = 1
    """GPUs that are visible."""
    share_weights: bool = False
    """Packed weights are kept in a file that processes share."""


@dataclass(frozen=True)
class DenseLayer:
    """A layer between pooling and the embedding, in a file of its own (sentence-transformers' Dense)."""

    file: str
    """Path of its safetensors file."""
    activation: Literal["tanh", "identity", "relu", "gelu", "silu"]


PoolingKind = Literal["cls", "max", "mean", "mean_sqrt", "weighted_mean", "last"]
"""Weighted: a token counts as much as its place in the prompt, from 1 on (SGPT, Muennighoff 2022)."""


@dataclass(frozen=True)
class PoolingConfig:
    """How the hidden states of a prompt become one vector."""

    kinds: tuple[PoolingKind, ...]
    """Vectors of several are put one behind the other."""
    normalize: bool
    """Embeddings of length 1, unless a request asks otherwise."""
    dense: tuple[DenseLayer, ...] = ()
    labels: tuple[str, ...] = ()
    """Names of the classes of a model with a classification head; empty: it makes embeddings."""
    activation: Literal["softmax", "sigmoid", "identity"] = "identity"
    """Of the classification head."""
    answers: tuple[int, ...] = ()
    """Tokens whose rows of the language model's head are the classification head: one for each class; of two with one class, the second's
    less the first's (a reranker's no and yes). Empty: the checkpoint has a head for classes."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model, as the engine needs to know it."""

    path: str
    """Local folder or .gguf file."""
    name: str
    """What the user called it."""
    hf_config: dict[str, Any]
    """config.json, or its equivalent made from GGUF metadata."""
    architecture: str
    dtype: DTypeName
    max_model_len: int
    auto_max_model_len: bool
    """Shrink max_model_len to what fits instead of refusing to start."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    load_format: str
    seed: int
    max_logprobs: int
    logprobs_mode: str
    implementation: str = "auto"
    """auto, octavo or transformers; see `EngineArgs.model_impl`."""
    quantization: str | None = None
    """How the weights are stored, or rounded while loading where the config has no quantization_config; None: not quantised."""
    served_name: str = ""
    """What clients call it, where that is another name than the user's; see `shown`."""
    pooling: PoolingConfig | None = None
    """The engine pools (embeddings, classes, scores) instead of generating."""

    @property
    def shown(self) -> str:
        """Its name for clients, who are not to learn where it lies."""
        return self.served_name or self.name


@dataclass(frozen=True)
class CacheConfig:
    block_size: int
    memory_utilization: float
    memory_bytes: int | None
    num_blocks_override: int | None
    dtype: CacheDTypeName
    prefix_caching: bool
    calibrate: bool = False
    """Scales of a float8 cache that the checkpoint lacks are found over the first tokens."""

    @property
    def sized(self) -> bool:
        """Whether the user has said how large it is."""
        return self.memory_bytes is not None or self.num_blocks_override is not None


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    policy: Literal["fcfs", "priority", "fair"]
    target_step_ms: float | None
    long_prefill_token_threshold: int
    max_waiting: int
    inflight: int
    """Steps launched ahead of the one being settled (k): 0 is synchronous."""
    stages: int = 1
    """Of a pipeline: steps in flight have different requests then."""
    first_chunk: int = 128
    """Prompt tokens of a step to try while nothing is known of how long they take; of use with a target."""


@dataclass(frozen=True)
class NodesConfig:
    """The hosts that compute a model together."""

    count: int = 1
    rank: int = 0
    """Of this host: the first has the engine."""
    address: str = "127.0.0.1"
    """Of the first host."""
    port: int = 0
    """Where the others come to there; 0 takes a free one."""
    timeout: float = 300.0
    """Seconds that hosts wait for each other at the start."""
    token: str = field(default="", repr=False)
    """What they know each other by; empty on networks where nobody else is."""


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    replica: int = 0
    """Which of these, for people."""
    first_device: int = 0
    """The GPU of the first rank; the others take those behind it."""
    shared_gpus: int = 0
    """GPUs that ranks share where there are more ranks than GPUs, for tests; 0: each has one of its own."""
    whole_experts: bool = False
    """Experts are dealt out to the ranks whole, instead of each being divided."""
    small_sums: bool = True
    """Small sums over GPUs may go through symmetric memory."""
    executor: Literal["mp", "ray"] = "mp"
    """Who starts the ranks but the first: we do, or a Ray cluster."""
    nodes: NodesConfig = NodesConfig()

    @property
    def world(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        """Of a replica where there are several; else empty."""
        return f"replica {self.replica}" if self.data > 1 else ""

    @property
    def per_node(self) -> int:
        """Ranks on each host. Neighbours are on one: so are those of a stage, where they fit."""
        return self.world // self.nodes.count

    def node_of(self, rank: int) -> int:
        """The host that a rank is on."""
        return rank // self.per_node


@dataclass(frozen=True)
class ReliabilityConfig:
    restarts: int
    hang_timeout: float
    """Seconds."""
    scripted_model: str | None
    """Tests: path of the script for the scripted worker."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine process needs. The frontend has the same object."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceInfo
    parallel: ParallelConfig
    reliability: ReliabilityConfig
    enforce_eager: bool = False
    attention: AttentionName = "auto"
    batch_invariant: bool = False
    """A request's logits do not depend on the batch, to the bit."""
    warnings: tuple[str, ...] = field(default=())
    """One line each, shown once at start."""
