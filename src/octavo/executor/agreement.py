"""What ranks on different hosts must have alike: each host resolves its own settings, and a rank that differs is refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata

from octavo._version import __version__
from octavo.config.types import EngineConfig


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """What must be equal, by the names that users give it. Where the model's files lie may differ, and what only the server needs."""
    model, cache, scheduler, parallel = config.model, config.cache, config.scheduler, config.parallel
    values: dict[str, object] = {
        "the version of octavo": __version__,
        "the version of torch": metadata.version("torch").partition("+")[0],
        "the model's config.json": hashlib.sha256(json.dumps(model.hf_config, sort_keys=True, default=str).encode()).hexdigest()[:12],
        "--device": config.device.kind,
        "--dtype": model.dtype,
        "--quantization": model.quantization,
        "--load-format": model.load_format,
        "--seed": model.seed,
        "--model-impl": model.implementation,
        "--max-model-len": "auto" if model.auto_max_model_len else model.max_model_len,
        "--max-logprobs": model.max_logprobs,
        "--logprobs-mode": model.logprobs_mode,
        "--block-size": cache.block_size,
        "--kv-cache-dtype": cache.dtype,
        "--calculate-kv-scales": cache.calibrate,
        "--num-gpu-blocks-override": cache.num_blocks_override,
        "--enable-prefix-caching": cache.prefix_caching,
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "--async-scheduling": scheduler.inflight,
        "--tensor-parallel-size": parallel.tensor,
        "--pipeline-parallel-size": parallel.pipeline,
        "--enable-expert-parallel": parallel.whole_experts,
        "--disable-custom-all-reduce": not parallel.small_sums,
        "--nnodes": parallel.nodes.count,
        "--attention-backend": config.attention,
        "--enforce-eager": config.enforce_eager,
        "--batch-invariant": config.batch_invariant,
    }
    return {name: str(value) for name, value in values.items()}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The settings that are not alike, in words; None if all are."""
    names = [name for name in ours if ours[name] != theirs.get(name)]
    if not names:
        return None
    return "; ".join(f"{name} is {_short(theirs.get(name, 'missing'))} there and {ours[name]} on the first host" for name in names)


def _short(text: str) -> str:
    """Somebody else's text, on one line of ours."""
    return " ".join(text[:60].split())
