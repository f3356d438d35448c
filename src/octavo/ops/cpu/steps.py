"""Decoding steps as calls into the compiled kernels: from the slot tables to the sampled tokens in their places, or to the logits and from there."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.cpu import abi
from octavo.protocol.step import Int32, StepPlan, TokenMasks

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SlotMemory:
    """The tables that a step reads and writes. Fixed addresses: they must outlive the steps."""

    tokens: Int32
    """[slots, length]: each request's tokens."""
    blocks: Int32
    """[slots, max_blocks]: each request's block table; with a second kind of cache, its table beside it."""
    numbers: Float32
    """[slots, >= 4], as `ops.registry.Draw` takes them."""
    block_size: int
    sliding_column: int
    """Where in a row of `blocks` the table of a second kind of cache begins; 0: there is none."""


@dataclass(frozen=True)
class Choice:
    """How the tokens of some rows are chosen."""

    modes: Int32
    """[rows] bits: 1 draws at random, 2 has filters, 4 leaves in the logits what a random row was drawn from, 8 draws no token but one that
    would be drawn too if others were forbidden."""
    keys: npt.NDArray[np.int32] | None
    """[rows, 2] words of `sampling.keys.row_keys`; None where no row draws."""
    masks: TokenMasks | None = None
    mask_rows: Int32 | None = None
    """[rows] which of the masks holds for a row, -1 for none; None where no row has one."""

    @property
    def words(self) -> Int32 | None:
        """The masks that are in use."""
        return None if self.masks is None or self.mask_rows is None else np.ascontiguousarray(self.masks.words)


class CpuSteps:
    """Runs steps of one decoder over one KV cache. Not thread-safe.

    Args:
        engine, decoder: of the decoder.
        caches: by layer.
        owner: keeps alive what they point into.

    Raises (all methods):
        MemoryError: the system gives none for a step of this size. The next one may run.
    """

    def __init__(
        self, engine: abi.Engine, decoder: abi.Decoder, caches: ctypes.Array[abi.Cache], memory: SlotMemory, owner: object
    ) -> None:
        self._library = abi.loaded()
        self._owned = (caches, memory, owner)
        self.vocab, self._hidden = decoder.vocab, decoder.hidden
        self._slots = abi.Slots(
            tokens=abi.address(memory.tokens),
            blocks=abi.address(memory.blocks),
            numbers=abi.address(memory.numbers),
            tokens_stride=memory.tokens.strides[0] // memory.tokens.itemsize,
            blocks_stride=memory.blocks.strides[0] // memory.blocks.itemsize,
            numbers_stride=memory.numbers.strides[0] // memory.numbers.itemsize,
            block_size=memory.block_size,
            sliding_column=memory.sliding_column,
        )
        self._engine, self._decoder = engine, decoder
        self._fixed = (engine.handle, ctypes.byref(decoder), ctypes.byref(caches), ctypes.byref(self._slots))

    def run(self, plan: StepPlan, choice: Choice) -> Int32:
        """One step, its block-table diffs included; requests that enter must be in their slots.

        Args:
            choice: of the sampled rows.

        Returns:
            [sampled rows] tokens, -1 where the logits were not usable.
        """
        tokens = np.empty(len(choice.modes), np.int32)
        described, _arrays = _describe(plan, choice)
        self._library.octavo_step(*self._fixed, ctypes.byref(described), abi.address(tokens))
        return tokens

    def run_to_logits(self, plan: StepPlan, rows: int, *, all_hidden: bool) -> tuple[Float32, Float32 | None]:
        """The same, without the choice of tokens.

        Args:
            rows: sampled ones.
            all_hidden: the hidden states of all tokens are wanted.

        Returns:
            [rows, vocab] logits, to be changed as the choice wants them, and used before the next call; [tokens, hidden] hidden states,
            after the final norm.
        """
        hidden = np.empty((plan.num_tokens, self._hidden), np.float32) if all_hidden else None
        logits = ctypes.POINTER(ctypes.c_float)()
        described, _arrays = _describe(plan, None)
        self._library.octavo_step_logits(*self._fixed, ctypes.byref(described), abi.pointer(hidden), ctypes.byref(logits))
        if not rows:
            return np.empty((0, self.vocab), np.float32), hidden
        return np.ctypeslib.as_array(logits, (rows, self.vocab)), hidden

    def trim(self) -> None:
        """Give back the scratch memory of the largest steps: one that found no room may have kept the most of it."""
        self._library.octavo_engine_trim(self._engine.handle)

    def logits(self, hidden: Float32) -> Float32:
        """[rows, hidden] -> [rows, vocab]."""
        return logits_of(self._engine, self._decoder, hidden)

    def choose(self, logits: Float32, slots: Int32, choice: Choice, places: Int32 | None = None) -> Int32:
        """[rows] tokens from logits, which masks and modes may change; -1 where these are not usable, or for mode 8.

        Args:
            places: [rows] which row of the logits [>= rows, vocab] each is. None: in order.
        """
        tokens = np.empty(len(slots), np.int32)
        arrays = [np.ascontiguousarray(a, np.int32) for a in (slots, choice.modes)]
        words = choice.words
        described = abi.Draw(
            logits=abi.address(logits),
            stride=logits.strides[0] // logits.itemsize,
            vocab=logits.shape[1],
            slots=abi.address(arrays[0]),
            modes=abi.address(arrays[1]),
            keys=abi.pointer(choice.keys),
            numbers=self._slots.numbers,
            numbers_stride=self._slots.numbers_stride,
            masks=abi.pointer(words),
            mask_rows=None if words is None else abi.pointer(choice.mask_rows),
            places=abi.pointer(places),
            rows=len(slots),
            mask_words=0 if words is None else words.shape[1],
        )
        self._library.octavo_draw(self._engine.handle, ctypes.byref(described), abi.address(tokens))
        return tokens


def logits_of(engine: abi.Engine, decoder: abi.Decoder, hidden: Float32) -> Float32:
    """[rows, hidden] -> [rows, vocab]."""
    hidden, out = np.ascontiguousarray(hidden), np.empty((len(hidden), decoder.vocab), np.float32)
    abi.loaded().octavo_logits(engine.handle, ctypes.byref(decoder), abi.address(hidden), len(hidden), abi.address(out))
    return out


def _describe(plan: StepPlan, choice: Choice | None) -> tuple[abi.Plan, object]:
    """The C view of a plan, and what it points into."""
    arrays: list[Any] = [plan.slots, plan.start, plan.count, plan.sample, plan.table_slots, plan.table_index, plan.table_blocks]
    arrays = [np.ascontiguousarray(a) for a in arrays]
    modes = None if choice is None else np.ascontiguousarray(choice.modes)
    keys, words, mask_rows = (None, None, None) if choice is None else (choice.keys, choice.words, choice.mask_rows)
    described = abi.Plan(
        *map(abi.address, arrays),
        abi.pointer(modes),
        abi.pointer(keys),
        abi.pointer(words),
        None if words is None else abi.pointer(mask_rows),
        len(plan.slots),
        plan.num_tokens,
        len(plan.table_slots),
        0 if words is None else words.shape[1],
    )
    return described, (arrays, modes, keys, words, mask_rows)
