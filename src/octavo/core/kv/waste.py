"""How much of the KV cache holds nothing: the paged cache against reserving a contiguous range a sequence.

Runs the real scheduler, block pool and prefix tree over random traffic, without a model, and looks at the memory after every step.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from octavo.core.loop import EngineCore
from octavo.core.simulate import EOS_TOKEN, InstantExecutor, simulation_config
from octavo.protocol.engine import NewRequest
from octavo.protocol.params import SamplingParams


@dataclass(frozen=True)
class WasteReport:
    """Shares of reserved KV memory that hold no token, 0 to 1, over the steps of one run."""

    requests: int
    block_size: int
    max_model_len: int
    max_tokens: int
    num_blocks: int
    steps: int
    peak_running: int
    preemptions: int
    tokens: int
    """Prompt and output tokens."""
    paged_average: float
    paged_peak: float
    """The worst step among those with at least a tenth of the peak's live tokens."""
    contiguous_max_model_len: float
    """Average waste if each running sequence reserved max_model_len tokens."""
    contiguous_max_tokens: float
    """Average waste if each running sequence reserved its prompt + max_tokens."""

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


def measure_waste(
    *,
    requests: int = 256,
    input_tokens: tuple[int, int] = (100, 1024),
    output_tokens: tuple[int, int] = (100, 1024),
    block_size: int = 16,
    max_model_len: int = 2048,
    max_num_seqs: int = 256,
    num_blocks: int | None = None,
    seed: int = 0,
) -> WasteReport:
    """Serve `requests` random requests that all arrive at once and report the waste.

    Lengths are uniform in the given ranges, ends included; every request may generate up to the top of `output_tokens` and stops by
    itself before. Averages are weighted by memory: tokens that hold nothing, summed over steps, by tokens reserved.

    Args:
        num_blocks: size of the cache; None is enough for all requests at once.
    """
    rng = random.Random(seed)
    config = simulation_config(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)
    if num_blocks is None:
        num_blocks = requests * -(-(input_tokens[1] + output_tokens[1]) // block_size) + 1
    core = EngineCore(config, InstantExecutor(config, num_blocks))
    reserved_tokens: dict[str, int] = {}
    tokens = 0
    for i in range(requests):
        prompt = [rng.randrange(3, 1 << 15) for _ in range(rng.randint(*input_tokens))]
        length = rng.randint(*output_tokens)
        tokens += len(prompt) + length
        sampling = SamplingParams(max_tokens=output_tokens[1], min_tokens=length - 1, seed=i)
        reserved_tokens[str(i)] = min(max_model_len, len(prompt) + output_tokens[1])
        core.add(NewRequest(str(i), prompt, sampling, arrival_time=0.0, eos_token_ids=[EOS_TOKEN]))

    samples: list[tuple[int, int, int, int]] = []
    """(live tokens, paged room, contiguous room by max_model_len, by prompt + max_tokens)"""
    peak_running = 0
    while core.has_work():
        stats = core.step().stats or core.stats()
        peak_running = max(peak_running, stats.running)
        seated = [r for r in core.batch.requests if r is not None]
        room = stats.kv_blocks_used * block_size
        samples.append((stats.kv_tokens_live, room, len(seated) * max_model_len, sum(reserved_tokens[r.id] for r in seated)))

    live, paged, by_length, by_tokens = (sum(column) for column in zip(*samples, strict=True))
    busy = max(s[0] for s in samples) / 10
    stats = core.stats()
    return WasteReport(
        requests=requests,
        block_size=block_size,
        max_model_len=max_model_len,
        max_tokens=output_tokens[1],
        num_blocks=num_blocks,
        steps=stats.step,
        peak_running=peak_running,
        preemptions=stats.preemptions,
        tokens=tokens,
        paged_average=1 - live / paged,
        paged_peak=max(1 - s[0] / s[1] for s in samples if s[0] > busy),
        contiguous_max_model_len=1 - live / by_length,
        contiguous_max_tokens=1 - live / by_tokens,
    )
