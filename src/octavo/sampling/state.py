"""What the sampler keeps of each request, by slot: a device table of numbers, and host records that decide which stages run.

A slot's entry is complete from `SlotInit` on and never changes while the request runs. Everything that does change (position,
tokens so far) comes with the step or is read from the token table, so a resume after preemption restores it exactly.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.protocol.params import SamplingParams
from octavo.protocol.step import Int32, SlotInit
from octavo.sampling.token_sets import distinct

if TYPE_CHECKING:
    import torch

Int64 = npt.NDArray[np.int64]


class Feature(enum.IntFlag):
    """Which stages a request needs. No flag means greedy and nothing else."""

    RANDOM = enum.auto()
    FILTERS = enum.auto()
    PENALTIES = enum.auto()
    BIAS = enum.auto()
    ALLOWED = enum.auto()
    BAD_WORDS = enum.auto()
    MIN_TOKENS = enum.auto()
    LOGPROBS = enum.auto()
    MASKED = enum.auto()
    """Its plan's masks say what it may sample."""


class Column(enum.IntEnum):
    """Columns of the device table. float32 holds every top_k below 2**24, more than any vocabulary."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    LOG_MIN_P = 3
    PRESENCE = 4
    FREQUENCY = 5
    REPETITION = 6


@dataclass(frozen=True)
class SlotRecord:
    """The variable-length wishes of one request."""

    logprobs: int = 0
    """How many top logprobs a token; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    bias_ids: Int64 | None = None
    bias_values: npt.NDArray[np.float32] | None = None
    allowed_ids: Int64 | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: Int64 | None = None
    """What min_tokens blocks: EOS (unless ignored) and the stop token ids."""


def features_of(p: SamplingParams) -> Feature:
    """The stages that a request's parameters ask for."""
    wanted = {
        Feature.RANDOM: not p.greedy,
        Feature.FILTERS: not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0),
        Feature.PENALTIES: p.presence_penalty != 0.0 or p.frequency_penalty != 0.0 or p.repetition_penalty != 1.0,
        Feature.BIAS: bool(p.logit_bias),
        # Beside a constraint its masks have the list in them: they know where the grammar ends, and the list has no say.
        Feature.ALLOWED: p.allowed_token_ids is not None and p.constraint is None,
        Feature.BAD_WORDS: bool(p.bad_words_token_ids),
        Feature.MIN_TOKENS: p.min_tokens > 0,
        Feature.LOGPROBS: p.logprobs is not None or p.logprob_token_ids is not None,
        Feature.MASKED: p.constraint is not None,
    }
    features = Feature(0)
    for feature, on in wanted.items():
        if on:
            features |= feature
    return features


def record_of(init: SlotInit) -> SlotRecord:
    p = init.sampling
    blocked = [*(p.stop_token_ids or ()), *(() if p.ignore_eos else init.eos_token_ids)]
    return SlotRecord(
        logprobs=p.logprobs or 0,
        prompt_logprobs=p.prompt_logprobs,
        logprob_token_ids=tuple(p.logprob_token_ids or ()),
        bias_ids=np.fromiter(p.logit_bias, np.int64) if p.logit_bias else None,
        bias_values=np.fromiter(p.logit_bias.values(), np.float32) if p.logit_bias else None,
        allowed_ids=distinct(np.asarray(p.allowed_token_ids, np.int64)) if p.allowed_token_ids is not None else None,
        bad_words=tuple(tuple(word) for word in p.bad_words_token_ids or () if word),
        min_tokens=p.min_tokens,
        stop_ids=distinct(np.asarray(blocked, np.int64)) if blocked else None,
    )


class SamplerState:
    """Owns the sampler's tables of `num_slots` rows.

    Args:
        device: where the numbers are. None: with the rest on the host, for code that does without torch.
    """

    numbers: torch.Tensor
    """[slots, columns] on the device."""
    device: torch.device

    def __init__(self, num_slots: int, device: torch.device | None = None) -> None:
        self.host_numbers = np.zeros((num_slots, len(Column)), np.float32)
        """[slots, columns]; where the device is the host, the same memory as `numbers`."""
        self._on_host = True
        if device is not None:
            self._make_tensor(device)
        self.features = np.zeros(num_slots, np.int32)
        """[slots] `Feature` bits, on the host like all below."""
        self.seeds = np.zeros(num_slots, np.int64)
        self.indices = np.zeros(num_slots, np.int32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.prompt_lens = np.zeros(num_slots, np.int32)
        self.wants_prompt_logprobs = np.zeros(num_slots, np.bool_)
        self.records = [SlotRecord()] * num_slots

    def _make_tensor(self, device: torch.device) -> None:
        import torch

        self.device = device
        self._on_host = device.type == "cpu"
        self.numbers = torch.from_numpy(self.host_numbers)
        if not self._on_host:
            self.numbers = self.numbers.to(device)

    def enter(self, inits: Sequence[SlotInit]) -> None:
        """Requests take their slots. One transfer for all of them."""
        if not inits:
            return
        slots = np.fromiter((init.slot for init in inits), np.int64, len(inits))
        numbers = np.empty((len(inits), len(Column)), np.float32)
        for i, init in enumerate(inits):
            p, slot = init.sampling, init.slot
            numbers[i] = (
                1.0 if p.greedy else p.temperature,
                max(p.top_k, 0),
                p.top_p,
                np.log(p.min_p) if p.min_p > 0.0 else -np.inf,
                p.presence_penalty,
                p.frequency_penalty,
                p.repetition_penalty,
            )
            self.features[slot] = features_of(p)
            self.seeds[slot] = p.seed or 0
            self.indices[slot] = init.index
            self.top_k[slot] = max(p.top_k, 0)
            self.top_p[slot] = p.top_p
            self.min_p[slot] = p.min_p
            self.prompt_lens[slot] = init.num_prompt_tokens
            self.wants_prompt_logprobs[slot] = p.prompt_logprobs is not None
            self.records[slot] = record_of(init)
        if self._on_host:
            self.host_numbers[slots] = numbers
            return
        from octavo.ops.transfer import upload

        self.numbers.index_copy_(0, upload(slots, self.device), upload(numbers, self.device))

    def leave(self, slots: Int32) -> None:
        """Drop what finished requests hold on the host."""
        for slot in slots.tolist():
            self.features[slot] = 0
            self.wants_prompt_logprobs[slot] = False
            self.records[slot] = SlotRecord()
