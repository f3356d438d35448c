"""Steps that a worker makes up for itself: the first ones (lazy initialisation, kernel selection) and the worst legal one.

Their block tables hold nothing but the null block, so they need no pool and disturb no request.
"""

from __future__ import annotations

import numpy as np

from octavo.config.types import EngineConfig
from octavo.ops.draw_splits import rows_of_other_splits
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import Int32, SlotInit, StepPlan

WARMUP_TOKENS = 32
GPU_CHUNKS = (4, 8, 32, 512, 9000)


def every_feature(vocab_size: int) -> SamplingParams:
    """Sampling parameters that make all stages of the sampler run."""
    token = vocab_size - 1
    return SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        temperature=0.7,
        top_p=0.9,
        min_p=0.01,
        seed=0,
        logprobs=min(20, vocab_size),
        logit_bias={token: 1.0},
        min_tokens=1,
        max_tokens=2,
    )


def made_up_step(counts: list[int], sampling: SamplingParams, *, start: int = 0) -> StepPlan:
    """A step of fresh requests in slots 0, 1, ...: `counts` tokens each from position `start`, all sampled. Behind others a block is
    copied, as where a prefix ends within one: the null block, onto itself."""
    rows = len(counts)
    nothing: Int32 = np.zeros(0, np.int32)
    copied: Int32 = np.zeros(min(start, 1), np.int32)
    init = [
        SlotInit(
            slot=slot,
            token_ids=np.zeros(start + count, np.int32),
            num_prompt_tokens=start + count,
            block_ids=nothing,
            sampling=sampling,
            index=0,
            eos_token_ids=[0],
        )
        for slot, count in enumerate(counts)
    ]
    count = np.asarray(counts, np.int32)
    return StepPlan(
        step_id=-1,
        init=init,
        free_slots=nothing,
        slots=np.arange(rows, dtype=np.int32),
        start=np.full(rows, start, np.int32),
        count=count,
        sample=np.ones(rows, np.bool_),
        table_slots=nothing,
        table_index=nothing,
        table_blocks=nothing,
        copy_src=copied,
        copy_dst=copied,
        num_tokens=int(count.sum()),
        max_context=start + int(count.max()),
    )


def _lengths(config: EngineConfig) -> tuple[int, list[int]]:
    """A short chunk that fits twice into a sequence, and the lengths of whole prompts to try."""
    longest = config.model.max_model_len - 1
    most = min(config.scheduler.max_num_batched_tokens, longest)
    chunk = max(1, min(WARMUP_TOKENS, config.scheduler.max_num_batched_tokens, longest // 2))
    return chunk, [chunk] if config.device.kind == "cpu" else sorted({min(n, most) for n in GPU_CHUNKS})


def first_steps(config: EngineConfig) -> list[StepPlan]:
    """A prompt chunk, a chunk with a prefix, and a decode. On a GPU also chunks of the lengths that take different kernels, so that
    none is compiled while a user waits. Code that was compiled before needs only its scratch memory: one chunk."""
    chunk, lengths = _lengths(config)
    if config.device.native_kernels:
        return [made_up_step([chunk], SamplingParams(temperature=0.7, seed=0, max_tokens=2))]
    sampling = every_feature(config.model.vocab_size)
    plain = SamplingParams(temperature=0.7, seed=0, max_tokens=2)
    return [
        *(made_up_step([length], plain if length > 1 else sampling) for length in lengths),
        made_up_step([chunk], sampling, start=chunk),
        made_up_step([1], sampling, start=chunk),
    ]


def rehearsal_steps(config: EngineConfig) -> list[StepPlan]:
    """Steps that call the kernels of uncaptured ones, and in which nothing is looked up by what a kernel has computed: so they can be
    played where kernels are compiled but not run. The largest comes first, since its kernels take longest to compile."""
    chunk, lengths = _lengths(config)
    plain = SamplingParams(temperature=0.7, seed=0, max_tokens=2)
    filtered = SamplingParams(temperature=0.7, top_p=0.9, seed=0, max_tokens=2)
    rows = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens // 2)
    many = [made_up_step([2] * n, sampling) for n in rows_of_other_splits() if n <= rows for sampling in (plain, filtered)]
    return [
        *(made_up_step([length], plain) for length in reversed(lengths)),
        made_up_step([chunk], plain, start=chunk),
        made_up_step([1], filtered, start=chunk),
        *many,
    ]


def worst_step(config: EngineConfig) -> StepPlan:
    """The most tokens and the most sampled rows that one step may have, with every sampler stage in use."""
    tokens = config.scheduler.max_num_batched_tokens
    rows = min(config.scheduler.max_num_seqs, tokens)
    longest = config.model.max_model_len - 1
    counts = [1] * rows
    spare = tokens - rows
    for row in reversed(range(rows)):
        more = min(spare, longest - 1)
        counts[row] += more
        spare -= more
    return made_up_step(counts, every_feature(config.model.vocab_size))


def all_slots(config: EngineConfig) -> Int32:
    """Every slot that these steps may have used."""
    return np.arange(config.scheduler.max_num_seqs, dtype=np.int32)
