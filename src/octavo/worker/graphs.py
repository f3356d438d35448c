"""Decode steps as CUDA graphs: the whole step, from the slot tables to the sampled token in its place, is one launch.

A graph is captured for each of a few numbers of rows; a step takes the next larger one, and the rows it lacks compute something
harmless. What differs from step to step is data: one pinned upload holds slots, positions, what rows want of the sampler, new
block-table entries and the attention plan, and is copied over that of the step before, in stream order.

All graphs share one memory pool, which works because no two of them are ever in the stream at once in another order than launched.
On a CPU the same step runs uncaptured, for tests.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from octavo.attention.base import GraphAttention
from octavo.models.decoder import Model
from octavo.ops.registry import Draw, DrawRows
from octavo.ops.triton.block_table_diffs import write_block_table_diffs
from octavo.ops.triton.gather_inputs import DecodeInputs, gather_decode_inputs
from octavo.protocol.step import StepPlan
from octavo.sampling.random import row_keys
from octavo.sampling.state import Feature, SamplerState
from octavo.worker.slots import SlotTables

UPLOADS = 4
"""Pinned buffers in turn: more than there are steps in flight, so that filling one never waits."""

T = TypeVar("T", npt.NDArray[np.int32], torch.Tensor)


@dataclass(frozen=True)
class Columns(Generic[T]):
    """The parts of a step's upload, on the host or on the device; each 1-D."""

    num_rows: T
    num_diffs: T
    slots: T
    starts: T
    modes: T
    keys: T
    """2 numbers a row."""
    diffs: T
    """Slots, then indices, then blocks of new block-table entries."""
    plan: T
    """The attention plan."""


@dataclass(frozen=True)
class Layout:
    """Where the columns of a step of up to `rows` rows lie: offsets in int32 numbers, all at multiples of 16 bytes."""

    rows: int
    plan_size: int

    @property
    def padded(self) -> int:
        """Room for rows, and for block-table diffs."""
        return -(-self.rows // 4) * 4

    @functools.cached_property
    def bounds(self) -> list[tuple[int, int]]:
        n = self.padded
        sizes = [4, 4, n, n, n, 2 * n, 3 * n, -(-self.plan_size // 4) * 4]
        ends = np.cumsum(sizes).tolist()
        return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    @property
    def size(self) -> int:
        return self.bounds[-1][1]

    def split(self, buffer: T) -> Columns[T]:
        return Columns(*(buffer[begin:end] for begin, end in self.bounds))


@dataclass(frozen=True)
class Upload:
    """A pinned buffer, and when the device has read it."""

    tensor: torch.Tensor
    array: npt.NDArray[np.int32]
    read: torch.cuda.Event | None

    @classmethod
    def allocate(cls, size: int, *, cuda: bool) -> Upload:
        tensor = torch.zeros(size, dtype=torch.int32, pin_memory=cuda)
        return cls(tensor, tensor.numpy(), torch.cuda.Event() if cuda else None)  # type: ignore[no-untyped-call]


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that graphs are captured for, ascending: fine where a row more costs much, coarse where it does not."""
    steps = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, max_rows, 64)]
    return [*(rows for rows in steps if rows < max_rows), max_rows]


class DecodeGraphs:
    """Owns the graphs of one worker, and the buffers of fixed address that they work on."""

    def __init__(
        self, model: Model, attention: GraphAttention, tables: SlotTables, state: SamplerState, draw: Draw, sizes: Sequence[int]
    ) -> None:
        self._model = model
        self._attention = attention
        self._tables = tables
        self._state = state
        self._draw = draw
        self._device = tables.device
        self._sizes = sorted(sizes)
        self._layouts = {rows: Layout(rows, attention.graph_plan_size(rows)) for rows in self._sizes}
        largest, size = self._sizes[-1], max(layout.size for layout in self._layouts.values())
        cuda = self._device.type == "cuda"
        self._uploads = [Upload.allocate(size, cuda=cuda) for _ in range(UPLOADS)]
        self._turn = 0
        self._columns = {
            (turn, rows): layout.split(upload.array) for turn, upload in enumerate(self._uploads) for rows, layout in self._layouts.items()
        }
        """Views of each pinned buffer, made once: a step has no time for it."""
        self._received = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._inputs = DecodeInputs.allocate(largest, tables.blocks.shape[1], self._device)
        self._out = torch.zeros(largest, dtype=torch.int32, device=self._device)
        self._replays: dict[int, Callable[[], None]] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture what has not been captured, largest first: the others then fit into the memory it took."""
        if self._device.type != "cuda":
            self._replays = {rows: self._step(rows) for rows in self._sizes}
            return
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for rows in reversed(self._sizes):
                if rows in self._replays:
                    continue
                step = self._step(rows)
                step()  # Whatever is compiled, loaded or chosen at first use must not be so during a capture.
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
                self._graphs.append(graph)
                self._replays[rows] = graph.replay
        stream.synchronize()

    def _step(self, rows: int) -> Callable[[], None]:
        """What a graph of `rows` rows does."""
        layout, tables, inputs = self._layouts[rows], self._tables, self._inputs
        columns = layout.split(self._received)
        mine = DecodeInputs(
            inputs.token_ids[:rows],
            inputs.positions[:rows],
            inputs.cache_slots[:rows],
            inputs.context_lens[:rows],
            inputs.block_tables[:rows],
        )
        diffs = columns.diffs.view(3, -1)
        draws = DrawRows(columns.slots, columns.starts, columns.modes, columns.keys.view(-1, 2), columns.num_rows, ahead=1)
        longest = tables.blocks.shape[1] * tables.block_size
        attend = self._attention.graph_attend(columns.plan[: layout.plan_size], rows, mine.block_tables, mine.cache_slots)

        def step() -> None:
            write_block_table_diffs(diffs, columns.num_diffs, tables.blocks)
            gather_decode_inputs(
                columns.slots, columns.starts, columns.num_rows, tables.tokens, tables.blocks, tables.block_size, longest, mine
            )
            hidden = self._model.forward(mine.token_ids, mine.positions, attend)
            self._draw(self._model.compact_logits(hidden), draws, self._state.numbers, self._out[:rows], tables.tokens)

        return step

    def close(self) -> None:
        """Free the graphs, after the last of them has run."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        self._replays = {}
        for graph in self._graphs:
            graph.reset()
        self._graphs = []

    def fitting(self, plan: StepPlan) -> int | None:
        """The number of rows of the graph that can run `plan`, if one can: only decodes, and nothing special in the sampler."""
        count = len(plan.slots)
        if not 0 < count <= self._sizes[-1] or plan.num_tokens != count or plan.init or not plan.sample.all():
            return None
        rows = self._sizes[bisect.bisect_left(self._sizes, count)]
        state, slots = self._state, plan.slots
        special = (state.features[slots] & ~(Feature.RANDOM | Feature.FILTERS)).any() or state.wants_prompt_logprobs[slots].any()
        if special or rows not in self._replays or len(plan.table_slots) > self._layouts[rows].padded:
            return None
        return rows

    def launch(self, plan: StepPlan, rows: int) -> torch.Tensor:
        """Run a plan with the graph of `rows` rows, block-table diffs included.

        Returns:
            [rows of the plan] int32 on the device: the tokens, -1 where logits were not usable. Overwritten by the next launch.
        """
        layout, upload, columns = self._layouts[rows], self._uploads[self._turn], self._columns[self._turn, rows]
        self._turn = (self._turn + 1) % UPLOADS
        if upload.read is not None:
            upload.read.synchronize()
        self._fill(plan, rows, columns)
        self._received[: layout.size].copy_(upload.tensor[: layout.size], non_blocking=True)
        if upload.read is not None:
            upload.read.record()
        self._replays[rows]()
        return self._out[: len(plan.slots)]

    def _fill(self, plan: StepPlan, rows: int, columns: Columns[npt.NDArray[np.int32]]) -> None:
        slots, state, n, d = plan.slots, self._state, len(plan.slots), len(plan.table_slots)
        columns.num_rows[0], columns.num_diffs[0] = n, d
        columns.slots[:n] = slots
        columns.starts[:n] = plan.start
        columns.modes[:n] = state.features[slots]
        keys = row_keys(state.seeds[slots], state.indices[slots], plan.start + 1)
        columns.keys[: 2 * n] = keys.astype(np.uint32).view(np.int32).reshape(-1)
        if d:
            columns.diffs.reshape(3, -1)[:, :d] = plan.table_slots, plan.table_index, plan.table_blocks
        self._attention.graph_plan(plan.start + 1, rows, columns.plan, self._tables.leading.shared(slots))
