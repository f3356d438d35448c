"""Tiny random checkpoints of each family, made with transformers, and `EngineConfig`s that load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.config.types import (
    CacheConfig,
    DeviceInfo,
    DTypeName,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ReliabilityConfig,
    SchedulerConfig,
)

FAMILIES: dict[str, str] = {
    "arcee": "Arcee",
    "bloom": "Bloom",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "dots1": "Dots1",
    "ernie4_5": "Ernie4_5",
    "exaone4": "Exaone4",
    "falcon": "Falcon",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3Text:Gemma3",
    "glm": "Glm",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "gpt2": "GPT2:GPT2LMHead",
    "gpt_neox": "GPTNeoX",
    "gpt_oss": "GptOss",
    "granite": "Granite",
    "granitemoe": "GraniteMoe",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "llama": "Llama",
    "minimax_m2": "MiniMaxM2",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "mpt": "Mpt",
    "nemotron": "Nemotron",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "phi": "Phi",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}
"""Family -> its name in transformers: that of the config, and that of the model where it differs."""

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


_ABSENT = {
    ("bloom", "head_dim"),
    ("mpt", "head_dim"),
    ("falcon", "head_dim"),
    ("gpt2", "intermediate_size"),
    ("gpt2", "head_dim"),
    ("gpt_neox", "head_dim"),
    ("deepseek_v2", "head_dim"),
    ("deepseek_v3", "head_dim"),
    ("glm4_moe_lite", "head_dim"),
}
"""Sizes that a family's config takes from others."""


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A random model in float32. Norms and biases are random too: at their usual 1 and 0 a mixed-up one would go unnoticed."""
    config_name, _, model_name = FAMILIES[family].partition(":")
    config_class = getattr(transformers, f"{config_name}Config")
    model_class = getattr(transformers, model_name + "Model" if model_name.endswith("Head") else f"{model_name or config_name}ForCausalLM")
    config = config_class(**{k: v for k, v in (SIZES | overrides).items() if (family, k) not in _ABSENT})
    # The eager attention of transformers adds Falcon's linear biases twice.
    config._attn_implementation = "sdpa" if getattr(config, "alibi", False) else "eager"
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                norm = "norm" in name or ".ln_" in name
                parameter.normal_(1.0 if norm and not name.endswith("bias") else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def save_tiny(folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> transformers.PreTrainedModel:
    """Write a checkpoint (config.json and safetensors, no tokenizer) into `folder`; the model that it holds."""
    model = tiny_model(family, seed=seed, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def config_for(
    path: Path | str,
    *,
    hf_config: dict[str, Any] | None = None,
    dtype: DTypeName = "float32",
    max_model_len: int = 256,
    load_format: str = "auto",
    seed: int = 0,
    total_bytes: int = 2**34,
) -> EngineConfig:
    """An `EngineConfig` for a checkpoint, with small limits. `hf_config` defaults to the folder's config.json."""
    hf_config = json.loads((Path(path) / "config.json").read_text()) if hf_config is None else hf_config
    architecture = (hf_config.get("architectures") or [""])[0]
    return EngineConfig(
        model=ModelConfig(
            path=str(path),
            name="tiny",
            hf_config=hf_config,
            architecture=architecture,
            dtype=dtype,
            max_model_len=max_model_len,
            auto_max_model_len=False,
            vocab_size=hf_config.get("vocab_size", 0),
            eos_token_ids=(2,),
            load_format=load_format,
            seed=seed,
            max_logprobs=20,
            logprobs_mode="raw_logprobs",
        ),
        cache=CacheConfig(
            block_size=16, memory_utilization=0.9, memory_bytes=None, num_blocks_override=64, dtype=dtype, prefix_caching=True
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=256,
            chunked_prefill=True,
            policy="fcfs",
            target_step_ms=None,
            long_prefill_token_threshold=0,
            max_waiting=16,
            inflight=0,
        ),
        device=DeviceInfo(kind="cpu", name="test CPU", total_bytes=total_bytes, free_bytes=total_bytes, threads=2),
        parallel=ParallelConfig(),
        reliability=ReliabilityConfig(restarts=0, hang_timeout=60.0, scripted_model=None),
    )
