"""Whole decoding steps as one call into the compiled kernels: from the slot tables to the sampled tokens in their places."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.cpu import abi
from octavo.protocol.step import Int32, StepPlan


@dataclass(frozen=True)
class SlotMemory:
    """The tables that a step reads and writes. Fixed addresses: they must outlive the steps."""

    tokens: Int32
    """[slots, length]: each request's tokens."""
    blocks: Int32
    """[slots, max_blocks]: each request's block table; with a second kind of cache, its table beside it."""
    numbers: npt.NDArray[np.float32]
    """[slots, >= 4], as `ops.registry.Draw` takes them."""
    block_size: int
    sliding_column: int
    """Where in a row of `blocks` the table of a second kind of cache begins; 0: there is none."""


class CpuSteps:
    """Runs steps of one decoder over one KV cache. Not thread-safe.

    Args:
        engine, decoder: of the decoder.
        caches: by layer.
        owner: keeps alive what they point into.
    """

    def __init__(
        self, engine: abi.Engine, decoder: abi.Decoder, caches: ctypes.Array[abi.Cache], memory: SlotMemory, owner: object
    ) -> None:
        self._library = abi.loaded()
        self._owned = (engine, decoder, caches, memory, owner)
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
        self._fixed = (engine.handle, ctypes.byref(decoder), ctypes.byref(caches), ctypes.byref(self._slots))

    def run(self, plan: StepPlan, modes: Int32, keys: npt.NDArray[np.int32] | None, mask_rows: Int32 | None = None) -> Int32:
        """One step, its block-table diffs included; requests that enter must be in their slots.

        Args:
            modes: [sampled rows] bits: 1 draws at random, 2 has filters.
            keys: [sampled rows, 2] words of `sampling.random.row_keys`; None where no row draws.
            mask_rows: [sampled rows] which of the plan's masks holds for a row, -1 for none; None where no row has one.

        Returns:
            [sampled rows] tokens, -1 where the logits were not usable.
        """
        arrays: list[Any] = [plan.slots, plan.start, plan.count, plan.sample, plan.table_slots, plan.table_index, plan.table_blocks, modes]
        arrays = [np.ascontiguousarray(a) for a in arrays]
        tokens = np.empty(len(modes), np.int32)
        words = None if mask_rows is None or plan.masks is None else np.ascontiguousarray(plan.masks.words)
        described = abi.Plan(
            *map(abi.address, arrays),
            None if keys is None else abi.address(keys),
            None if words is None else abi.address(words),
            None if words is None or mask_rows is None else abi.address(mask_rows),
            len(plan.slots),
            plan.num_tokens,
            len(plan.table_slots),
            0 if words is None else words.shape[1],
        )
        self._library.octavo_step(*self._fixed, ctypes.byref(described), abi.address(tokens))
        return tokens
