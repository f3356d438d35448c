"""The offline engine of the benchmarks: an `LLM` from the command line, and prompts it can take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from octavo.cli.bench.workload import BenchRequest
from octavo.cli.flags import default_of, engine_args
from octavo.cli.parser import Namespace
from octavo.cli.progress import LoadingProgress
from octavo.errors import OctavoError


def open_llm(options: Namespace) -> Any:
    """An in-process `LLM` with the engine settings of the command line. Raises OctavoError when it cannot start."""
    args = engine_args(options)
    changed = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if getattr(args, f.name) != default_of(f)}
    from octavo.frontend.llm import LLM

    with LoadingProgress() as progress:
        return LLM(**changed, progress=progress)


def engine_of(llm: Any) -> dict[str, Any]:
    """What ran, for the result file."""
    ready = llm.ready_report
    return {
        "model": llm.config.model.name,
        "device": ready.device,
        "dtype": ready.dtype,
        "attention": ready.attention,
        "kv_blocks": ready.num_blocks,
        "max_num_seqs": ready.max_num_seqs,
        "max_num_batched_tokens": llm.config.scheduler.max_num_batched_tokens,
    }


def prompts_of(requests: Sequence[BenchRequest]) -> list[Any]:
    """Requests in the form that `LLM.generate` takes."""
    return [{"prompt_token_ids": r.prompt} if isinstance(r.prompt, list) else r.prompt for r in requests]


def answered(outputs: list[Any]) -> list[Any]:
    """The same outputs.

    Raises:
        OctavoError: a request failed, so that nothing was measured.
    """
    errors = [c.error for o in outputs for c in o.outputs if c.error is not None]
    if errors:
        raise OctavoError(f"{len(errors)} of {len(outputs)} requests failed, so nothing was measured: {errors[0]}")
    return outputs


def sampling_of(requests: Sequence[BenchRequest], temperature: float) -> list[Any]:
    """One SamplingParams a request: exactly `output_len` tokens, no text."""
    from octavo.protocol.params import SamplingParams

    return [SamplingParams(temperature=temperature, max_tokens=r.output_len, ignore_eos=True, detokenize=False) for r in requests]
