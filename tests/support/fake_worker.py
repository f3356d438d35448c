"""A fake executor with a simulated KV memory, for testing the core without a model.

Each cache entry depends on the entry before it *as read through the block table*, and each sampled token on every entry of its
context. So sharing a wrong block, reusing one too early or forgetting a copy changes tokens, and `expected_tokens` says what they
should have been. What the core must never do whatever the tokens are (two requests writing one block, reusing a block or slot that a
step in flight names) is noted in `violations`.

Steps run when they are submitted and their results wait for `collect`, like an asynchronous device.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from octavo.protocol.engine import EngineReady, LogprobRow
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import CacheKind, CacheShape, SlotInit, StepPlan, StepResult

MASK = (1 << 62) - 1
GARBAGE = -1


def cache_entry(previous: int, token: int, position: int) -> int:
    """The "KV" of a token, given that of the token before it (0 at the start)."""
    return ((previous ^ (token * 0x9E3779B97F4A7C15)) * 0x2545F4914F6CDD1D + position + 1) & MASK


def sample(seen: list[np.ndarray], sampling: SamplingParams, index: int, position: int, outputs: int, eos: list[int], vocab: int) -> int:
    """The token at `position`: a hash of every entry that any kind of layer sees before it, the seed and the sibling index; masked for
    min_tokens."""
    word = 0
    for entries in seen:
        word = zlib.crc32(entries.tobytes(), word)
    token = zlib.crc32(f"{word} {sampling.seed} {index} {position}".encode()) % vocab
    stops = {*(() if sampling.ignore_eos else eos), *(sampling.stop_token_ids or ())}
    while outputs < sampling.min_tokens and token in stops:
        token = (token + 1) % vocab
    return token


def expected_tokens(
    prompt: list[int], sampling: SamplingParams, *, index: int = 0, eos: list[int] | None = None, vocab: int = 50, limit: int = 1 << 30,
    windows: Sequence[int | None] = (None,),
) -> list[int]:  # fmt: skip
    """What a request must produce, computed without any cache.

    Args:
        windows: of the kinds of layers.
    """
    eos = eos or []
    entries: list[int] = []
    tokens = list(prompt)
    for position, token in enumerate(tokens):
        entries.append(cache_entry(entries[-1] if entries else 0, token, position))
    out: list[int] = []
    stops = {*(() if sampling.ignore_eos else eos), *(sampling.stop_token_ids or ())}
    most = min(limit - len(prompt), sampling.max_tokens or limit)
    while len(out) < most:
        seen = [np.array(entries[-window:] if window else entries, np.int64) for window in windows]
        token = sample(seen, sampling, index, len(tokens), len(out), eos, vocab)
        out.append(token)
        if token in stops and len(out) > sampling.min_tokens:
            break
        entries.append(cache_entry(entries[-1], token, len(tokens)))
        tokens.append(token)
    return out


@dataclass
class FakeSlot:
    init: SlotInit
    tokens: list[int]
    tables: list[list[int]]
    """By kind of cache."""


@dataclass
class InFlight:
    step: int
    result: StepResult | Exception
    blocks: dict[int, int]
    """Block -> slot that reads or writes it."""
    sources: set[int]
    slots: set[int]
    sampled: set[int]


@dataclass
class FakeWorker:
    """An `Executor`."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_model_len: int = 64
    vocab: int = 50
    step_seconds: Callable[[StepPlan], float] = lambda plan: 0.0
    fail_submit: Callable[[StepPlan], bool] = lambda plan: False
    fail_collect: Callable[[StepPlan], bool] = lambda plan: False
    row_errors: Callable[[StepPlan], dict[int, str]] = lambda plan: {}
    inflight: int = 0
    stages: int = 1
    """Of a pipeline: the first one knows the tokens that it is told."""
    window: int | None = None
    """Of every layer."""
    sliding_window: int | None = None
    """Of a second kind of layers."""
    sliding_blocks: int = 0
    obeys: bool = False
    """Masks hold."""
    tries: bool = False
    """Tokens may be judged after they are drawn."""
    violations: list[str] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.memory = np.full((self.num_blocks + self.sliding_blocks, self.block_size), GARBAGE, np.int64)
        self.windows = [self.window, self.sliding_window] if self.sliding_window else [self.window]
        self.columns = -(-self.max_model_len // self.block_size) + 1
        """Of the table of one kind."""
        self.slots: dict[int, FakeSlot] = {}
        self._queue: deque[InFlight] = deque()

    @property
    def cache_shape(self) -> CacheShape:
        sliding = CacheKind(self.sliding_blocks, 1, self.sliding_window, self.num_blocks, self.columns) if self.sliding_window else None
        return CacheShape(self.num_blocks, self.block_size, 1, self.window, sliding)

    @property
    def ready_report(self) -> EngineReady:
        return EngineReady(
            pid=0, num_blocks=self.num_blocks, block_size=self.block_size, max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_len,
            vocab_size=self.vocab, weights_bytes=0, cache_bytes=0, activation_bytes=0, total_bytes=0, other_bytes=0, device="fake",
            dtype="none", kv_dtype="none", attention="fake", phases=[],
        )  # fmt: skip

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._check_plan(plan)
        if self.fail_submit(plan):
            raise RuntimeError("the launch failed (simulated)")
        self._check_fences(plan)
        blocks: dict[int, int] = {}
        self._update(plan)
        self._check_told(plan)
        result = self._run(plan, blocks)
        failed = self.fail_collect(plan)
        self._queue.append(
            InFlight(
                plan.step_id,
                RuntimeError("the step failed (simulated)") if failed else result,
                blocks,
                set(plan.copy_src.tolist()),
                set(plan.slots.tolist()),
                set(plan.slots[plan.sample].tolist()),
            )
        )
        if len(self._queue) > self.inflight + 1:
            self._violation(f"{len(self._queue)} steps in flight, at most {self.inflight + 1} allowed")

    def prepare(self, *, idle: bool) -> bool:
        return False

    def collect(self) -> StepResult:
        done = self._queue.popleft()
        if isinstance(done.result, Exception):
            raise done.result
        return done.result

    def shutdown(self) -> None:
        self.closed = True

    def _violation(self, text: str) -> None:
        self.violations.append(text)

    def _check_plan(self, plan: StepPlan) -> None:
        for name in ("free_slots", "slots", "start", "count", "table_slots", "table_index", "table_blocks", "copy_src", "copy_dst"):
            column = getattr(plan, name)
            if column.dtype != np.int32 or column.ndim != 1:
                self._violation(f"{name} is {column.dtype} of {column.ndim} dimensions")
        if not len(plan.slots) or (plan.count < 1).any():
            self._violation("an empty step, or a row of 0 tokens")
        if len(set(plan.slots.tolist())) != len(plan.slots):
            self._violation("a slot has two rows")
        if plan.num_tokens != plan.count.sum() or plan.max_context != (plan.start + plan.count).max():
            self._violation("num_tokens or max_context is wrong")
        ones = plan.count == 1
        if (np.diff(ones.astype(int)) > 0).any():
            self._violation("decodes are not first")
        if len(set(plan.copy_dst.tolist())) != len(plan.copy_dst):
            self._violation("two copies into one block")

    def _check_fences(self, plan: StepPlan) -> None:
        """Nothing that a step in flight names may change hands."""
        starts = dict(zip(plan.slots.tolist(), plan.start.tolist(), strict=True))
        entering = {init.slot: starts[init.slot] // self.block_size for init in plan.init}
        entries = self._entries(plan)
        fresh = {block for slot, _, index, block in entries if index >= entering.get(slot, 0)} | set(plan.copy_dst.tolist())
        for init in plan.init:
            fresh |= set(init.block_ids.tolist()[starts[init.slot] // self.block_size :])
            if any(init.slot in flight.slots for flight in self._queue):
                self._violation(f"slot {init.slot} is reused while a step in flight names it")
        for slot in starts:
            known = self.slots.get(slot)
            if known and known.init.sampling.structured_outputs and any(slot in flight.sampled for flight in self._queue):
                self._violation(f"slot {slot} goes on before its last token has been seen")
        for flight in self._queue:
            if taken := fresh & (set(flight.blocks) | flight.sources):
                self._violation(f"blocks {sorted(taken)} are reused while step {flight.step} is in flight")
        if fresh & set(plan.copy_src.tolist()):
            self._violation("a block is copied from and handed out in the same step")

    def _entries(self, plan: StepPlan) -> list[tuple[int, int, int, int]]:
        """(slot, kind, index, block) of the plan's table entries; blocks of the second kind lie behind those of the first in `memory`."""
        entries = []
        for slot, column, block in zip(plan.table_slots.tolist(), plan.table_index.tolist(), plan.table_blocks.tolist(), strict=True):
            kind, index = divmod(column, self.columns)
            if not 0 <= block < (self.sliding_blocks if kind else self.num_blocks):
                self._violation(f"block {block} is none of cache kind {kind}")
            entries.append((slot, kind, index, block + kind * self.num_blocks))
        return entries

    def _update(self, plan: StepPlan) -> None:
        for slot in plan.free_slots.tolist():
            self.slots.pop(slot, None)
        for init in plan.init:
            if init.slot in self.slots:
                self._violation(f"slot {init.slot} is taken over without being freed")
            if init.sampling.seed is None:
                self._violation("a request without a seed")
            self.slots[init.slot] = FakeSlot(init, init.token_ids.tolist(), [init.block_ids.tolist(), *([] for _ in self.windows[1:])])
        for slot, kind, index, block in self._entries(plan):
            table = self.slots[slot].tables[kind]
            if index != len(table):
                self._violation(f"the table of slot {slot} is written at {index}, it has {len(table)} entries")
            table.append(block)
        self.memory[plan.copy_dst] = self.memory[plan.copy_src]
        if plan.forced is not None:
            known = plan.forced
            for slot, position, token in zip(known.slots.tolist(), known.positions.tolist(), known.tokens.tolist(), strict=True):
                if slot not in plan.slots or position != len(self.slots[slot].tokens):
                    self._violation(f"token {position} of slot {slot} is told, which has {len(self.slots[slot].tokens)}")
                self.slots[slot].tokens.append(token)

    def _check_told(self, plan: StepPlan) -> None:
        """What a first stage reads has been said: in the request's beginning, or with the plan."""
        if self.stages == 1:
            return
        told = [] if plan.told is None else plan.told.tolist()
        for row, (slot, start, count) in enumerate(zip(plan.slots.tolist(), plan.start.tolist(), plan.count.tolist(), strict=True)):
            tokens, said = self.slots[slot].tokens, len(self.slots[slot].init.token_ids)
            if any(slot in flight.sampled for flight in self._queue):
                self._violation(f"slot {slot} goes on before its last token has been seen")
            elif row < len(told) and told[row] != tokens[start]:
                self._violation(f"slot {slot} is told {told[row]} where it has {tokens[start]}")
            elif row >= len(told) and start + count > said:
                self._violation(f"slot {slot} is not told its token {said}")

    def _obeyed(self, plan: StepPlan, slot: int, token: int) -> int:
        """The first token from `token` on that the mask of a slot allows."""
        if not self.obeys or plan.masks is None or slot not in plan.masks.slots:
            return token
        words = plan.masks.words[plan.masks.slots.tolist().index(slot)]
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return int(next((t for t in allowed if t >= token), allowed[0]))

    def _tried(self, plan: StepPlan, slot: int, token: int) -> int:
        """The same, if the plan's trial refuses the token."""
        assert self.tries and plan.trial is not None
        masks = plan.trial.refused(np.array([slot], np.int32), np.array([token], np.int32))
        return token if masks is None else self._obeyed(msgspec.structs.replace(plan, masks=masks), slot, token)

    def _run(self, plan: StepPlan, blocks: dict[int, int]) -> StepResult:
        size = self.block_size
        written: dict[int, int] = {}
        rows = list(zip(plan.slots.tolist(), plan.start.tolist(), plan.count.tolist(), plan.sample.tolist(), strict=True))
        for slot, start, count, _ in rows:
            state = self.slots[slot]
            for table in state.tables:
                for position in range(start, start + count):
                    block = table[position // size]
                    if written.setdefault(block, slot) != slot:
                        self._violation(f"slots {written[block]} and {slot} write block {block} in one step")
                    previous = int(self.memory[table[(position - 1) // size], (position - 1) % size]) if position else 0
                    self.memory[block, position % size] = cache_entry(previous, state.tokens[position], position)
        tokens: list[int] = []
        logprobs: dict[int, list[LogprobRow]] = {}
        prompt_logprobs: dict[int, list[LogprobRow]] = {}
        for slot, start, count, sampled in rows:
            state = self.slots[slot]
            init, end = state.init, start + count
            for table, window in zip(state.tables, self.windows, strict=True):
                first = max(0, start - window + 1) // size if window else 0
                for block in table[first : -(-end // size)]:
                    blocks[block] = slot
                    if written.get(block, slot) != slot:
                        self._violation(f"slot {slot} reads block {block} that slot {written[block]} writes in the same step")
            if init.sampling.prompt_logprobs is not None:
                scored = range(start + 1, min(end, init.num_prompt_tokens - 1) + 1)
                prompt_logprobs[slot] = [LogprobRow(state.tokens[p], -float(p), 1, [], []) for p in scored]
            if not sampled:
                continue
            seen = []
            for table, window in zip(state.tables, self.windows, strict=True):
                first = max(0, end - window) if window else 0
                places = np.arange(first, end)
                seen.append(self.memory[np.array(table)[places // size], places % size])
            token = sample(seen, init.sampling, init.index, end, end - init.num_prompt_tokens, init.eos_token_ids, self.vocab)
            token = (
                self._tried(plan, slot, token) if plan.trial is not None and slot in plan.trial.slots else self._obeyed(plan, slot, token)
            )
            if end != len(state.tokens):
                self._violation(f"slot {slot} samples position {end} of a sequence of {len(state.tokens)} tokens")
            state.tokens.append(token)
            tokens.append(token)
            if init.sampling.logprobs is not None:
                logprobs[slot] = [LogprobRow(token, -1.0, 1, [token], [-1.0])]
        return StepResult(
            plan.step_id,
            plan.slots[plan.sample],
            np.array(tokens, np.int32),
            logprobs=logprobs or None,
            prompt_logprobs=prompt_logprobs or None,
            errors=self.row_errors(plan) or None,
            step_seconds=self.step_seconds(plan),
        )
