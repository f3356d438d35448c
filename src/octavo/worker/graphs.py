"""Steps as CUDA graphs: the whole step, from the slot tables to the sampled token in its place, is two launches.

The first ends in the logits, the second draws from them. Where a row wants more of the sampler than a draw (penalties, masks,
logprobs), only the first is a replay, and the sampler goes on from its logits.

A graph is captured for each of a number of shapes (`graph_layout.py`): steps of decodes, and small steps with prompt chunks
among them. A step takes the next larger one, and the rows and tokens it lacks compute something harmless. What differs from step
to step is data: slots, positions, what rows want of the sampler, new block-table entries and the attention plan fill a line of
pinned memory, which the graph reads itself, as it writes the tokens into another (`ops/triton/step_ring.py`).

A stage of a pipeline receives hidden states in front of its graph, into a buffer of fixed address, and sends its own behind it: of the
step's tokens, so that each stage takes the shape that it has. Where other layers follow, the graph ends in hidden states, and nothing is
drawn.

All graphs share one memory pool, which works because no two of them are ever in the stream at once in another order than launched.
On a CPU the same step runs uncaptured, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from octavo.attention.base import GraphAttention, GraphShape, KindTables
from octavo.models.decoder import Model
from octavo.ops.registry import Draw, DrawRows
from octavo.ops.triton.gather_inputs import StepInputs, gather_step_inputs
from octavo.ops.triton.step_ring import publish, receive
from octavo.protocol.step import Int32, StepPlan
from octavo.sampling.keys import row_keys
from octavo.sampling.state import SamplerState
from octavo.worker.graph_layout import HEADER, NUM_DIFFS, NUM_ROWS, NUM_SAMPLED, NUM_TOKENS, Columns, Layout
from octavo.worker.slots import SlotTables

T = TypeVar("T")

SPARE_LINES = 3
"""Lines of the rings beyond the steps in flight: the one being launched, the one being collected, and one for a capture."""


@dataclass(frozen=True)
class Ring:
    """Pinned lines that take turns."""

    tensor: torch.Tensor
    """[lines, size] int32"""
    array: Int32
    """The same memory."""

    @classmethod
    def allocate(cls, lines: int, size: int, *, cuda: bool) -> Ring:
        tensor = torch.zeros(lines, size, dtype=torch.int32, pin_memory=cuda)
        return cls(tensor, tensor.numpy())


@dataclass(frozen=True)
class Captured:
    """A shape that steps can take."""

    layout: Layout
    compute: Callable[[], torch.Tensor]
    """Run the step up to the logits, [rows of the shape, vocab], or to what another stage goes on with, [tokens of the shape, hidden].
    They hold until the next step."""
    finish: Callable[[], None]
    """Draw from logits, and publish the tokens."""
    lines: list[Columns[npt.NDArray[np.int32]]]
    """Views of each line of the upload ring, made once: a step has no time for it."""


class StepGraphs:
    """Owns the graphs of one worker, and the buffers of fixed address that they work on.

    Args:
        shapes: what to capture, when `capture` is called with it.
        inflight: most steps launched and not collected when another is launched.
    """

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        tables: SlotTables,
        state: SamplerState,
        draw: Draw,
        shapes: Sequence[GraphShape],
        inflight: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._tables = tables
        self._state = state
        self._draw = draw
        self._device = tables.device
        self._stage = model.stage
        kinds = len(tables.kinds)
        self._layouts = {shape: Layout(shape, attention.graph_plan_size(shape), tables.block_size, kinds) for shape in shapes}
        rows, tokens = max(shape.rows for shape in shapes), max(shape.tokens for shape in shapes)
        lines, size, cuda = inflight + SPARE_LINES, max(layout.size for layout in self._layouts.values()), self._device.type == "cuda"
        self._uploads = Ring.allocate(lines, size, cuda=cuda)
        self._tokens = Ring.allocate(lines, rows, cuda=cuda)
        self._turn = 0
        self._device_turn = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._received = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._inputs = StepInputs.allocate(rows, tokens, tables.first_column, self._device, kinds=kinds)
        self._out = torch.zeros(rows, dtype=torch.int32, device=self._device)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._entering: torch.Tensor | None = None
        """What the stage before has sent."""
        if self._stage is not None and self._stage.receives:
            self._entering = torch.zeros(tokens, model.spec.hidden_size, dtype=self._stage.dtype, device=self._device)
        self._ready: list[Captured] = []
        """Ascending by tokens; of equal ones, decodes first, then those with room for few rows."""
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def capture(self, shape: GraphShape) -> None:
        """Make steps of a shape quick. No step may be running. The largest shapes first: the others fit into the memory they took."""
        compute, draw = self._step(shape)
        finish: Callable[[], None]
        if self._stream is None:
            compute, finish = _remembering(compute, draw)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._run_empty(compute, draw)  # Whatever is compiled, loaded or chosen at first use must not be so during a capture.
                replay, logits = self._record(compute)
                finish = _nothing_to_draw
                if self._model.makes_logits:
                    finish, _ = self._record(lambda: draw(logits))
            self._stream.synchronize()
            compute = _returning(replay, _borrowed(logits))
        layout = self._layouts[shape]
        self._ready.append(Captured(layout, compute, finish, [layout.split(line) for line in self._uploads.array]))
        self._ready.sort(key=lambda c: (c.layout.shape.tokens, c.layout.shape.chunks, c.layout.shape.rows))

    def _record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A graph of what `work` launches: how to replay it, and where its result will be."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
        self._graphs.append(graph)
        return graph.replay, result

    @torch.inference_mode()
    def rehearse(self, shape: GraphShape) -> None:
        """Call the kernels of a shape's step, where calling one only compiles it."""
        compute, draw = self._step(shape)
        draw(compute())

    def _run_empty(self, compute: Callable[[], torch.Tensor], draw: Callable[[torch.Tensor], None]) -> None:
        """A step of no rows."""
        self._uploads.array[self._turn] = 0
        draw(compute())
        self._turn = (self._turn + 1) % len(self._uploads.array)

    def _step(self, shape: GraphShape) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
        """What the graphs of `shape` do: the step up to the logits, and what is done with them."""
        layout, tables = self._layouts[shape], self._tables
        columns = layout.split(self._received)
        header = [columns.header[4 * i : 4 * i + 1] for i in range(HEADER)]
        inputs = self._inputs.part(shape.rows, shape.tokens)
        where = [KindTables(blocks, places) for blocks, places in zip(inputs.block_tables, inputs.cache_slots, strict=True)]
        attend = self._attention.graph_attend(columns.plan[: layout.plan_size], shape, where)
        slots, positions, last, chunks = columns.slots, columns.contexts, None, {}
        if shape.chunks:
            slots, positions, last = columns.sampled_slots, columns.sampled_positions, columns.last_tokens[: shape.rows]
            chunks = {"row_of_token": columns.row_of_token, "offsets": columns.offsets, "num_tokens": header[NUM_TOKENS]}
        draws = DrawRows(slots, positions, columns.modes, columns.keys.view(-1, 2), header[NUM_SAMPLED])
        out = self._out[: shape.rows]

        def compute() -> torch.Tensor:
            receive(
                self._uploads.tensor,
                self._device_turn,
                self._received,
                layout.diffs_at,
                tables.blocks,
                num_diffs_at=4 * NUM_DIFFS,
                diffs_at=layout.diffs_at,
                capacity=layout.max_diffs,
            )
            gather_step_inputs(
                columns.slots, columns.contexts, header[NUM_ROWS], tables.tokens, tables.kinds, tables.block_size, inputs, **chunks
            )
            if self._stage is None:
                return self._model.compact_logits(self._model.forward(inputs.token_ids, inputs.positions, attend, last))
            # Layers add to what enters in place: rows that later steps do not fill would grow with each of them.
            entering = None if self._entering is None else self._entering[: shape.tokens].clone()
            hidden = self._stage.layers(inputs.token_ids, inputs.positions, attend, last, entering)
            if self._model.makes_logits:
                return self._model.compact_logits(hidden)
            publish(self._out[:1], self._nothing, self._tokens.tensor, self._device_turn)
            return hidden

        def draw(logits: torch.Tensor) -> None:
            if not self._model.makes_logits:
                return
            self._draw(logits, draws, self._state.numbers, out, tables.tokens)
            publish(out, header[NUM_SAMPLED], self._tokens.tensor, self._device_turn)

        return compute, draw

    def close(self) -> None:
        """Free the graphs, after the last of them has run."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        self._ready = []
        for graph in self._graphs:
            graph.reset()
        self._graphs = []

    def fitting(self, plan: StepPlan) -> Captured | None:
        """The graphs that can run `plan`, if any can: they have room for it, and no prompt is to be scored."""
        rows, tokens, state = len(plan.slots), plan.num_tokens, self._state
        if not self._ready or not 0 < tokens <= self._ready[-1].layout.shape.tokens or state.wants_prompt_logprobs[plan.slots].any():
            return None
        all_sampled = bool(plan.sample.all())
        only_decodes = all_sampled and tokens == rows
        chunks = int(np.count_nonzero(plan.count > 1))
        diffs = 0 if plan.init else len(plan.table_slots)
        for captured in self._ready:
            shape = captured.layout.shape
            if tokens > shape.tokens or rows > shape.rows or diffs > captured.layout.max_diffs:
                continue
            if only_decodes or (shape.chunks and chunks <= shape.chunks):
                return captured
        return None

    def launch(self, plan: StepPlan, captured: Captured) -> torch.Tensor:
        """Run a plan, whose rows want nothing but a draw, with graphs that fit it. Its block-table diffs are written unless requests
        enter with it: then the tables have been updated before.

        Returns:
            [sampled rows] int32 on the host, once the stream has come past this: the tokens, -1 where logits were not usable.
            Overwritten when as many steps as the ring has lines have been launched after it.
        """
        turn = self._turn
        self._compute(plan, captured)
        captured.finish()
        return self._tokens.tensor[turn, : int(np.count_nonzero(plan.sample))]

    def compute(self, plan: StepPlan, captured: Captured) -> torch.Tensor:
        """`launch` up to the logits of the sampled rows, [sampled rows, vocab]: they may be overwritten, and hold until the next step."""
        logits = self._compute(plan, captured)
        publish(self._out[:1], self._nothing, self._tokens.tensor, self._device_turn)
        return logits[: int(np.count_nonzero(plan.sample))]

    def pass_on(self, plan: StepPlan, captured: Captured) -> None:
        """`launch` of a stage with others behind it, which get its hidden states."""
        assert self._stage is not None
        self._stage.pipeline.send(self._compute(plan, captured)[: plan.num_tokens])

    def _compute(self, plan: StepPlan, captured: Captured) -> torch.Tensor:
        """Tell the graph what the step is, and replay it."""
        self._fill(plan, captured.layout.shape, captured.lines[self._turn])
        if self._stage is not None and self._entering is not None:
            self._stage.pipeline.receive(self._entering[: plan.num_tokens])
        computed = captured.compute()
        self._turn = (self._turn + 1) % len(self._uploads.array)
        return computed

    def _fill(self, plan: StepPlan, shape: GraphShape, columns: Columns[npt.NDArray[np.int32]]) -> None:
        state, rows, diffs = self._state, len(plan.slots), 0 if plan.init else len(plan.table_slots)
        contexts = plan.start + plan.count
        slots, positions = plan.slots, contexts
        columns.slots[:rows] = slots
        columns.contexts[:rows] = contexts
        if shape.chunks:
            ends = np.cumsum(plan.count, dtype=np.int32)
            slots, positions = slots[plan.sample], contexts[plan.sample]
            columns.offsets[:rows] = contexts - ends
            columns.row_of_token[: plan.num_tokens] = np.repeat(np.arange(rows, dtype=np.int32), plan.count)
            columns.last_tokens[: len(slots)] = ends[plan.sample] - 1
            columns.last_tokens[len(slots) :] = 0
            columns.sampled_slots[: len(slots)] = slots
            columns.sampled_positions[: len(slots)] = positions
        columns.modes[: len(slots)] = state.features[slots]
        keys = row_keys(state.seeds[slots], state.indices[slots], positions)
        columns.keys[: 2 * len(slots)] = keys.astype(np.uint32).view(np.int32).reshape(-1)
        if diffs:
            columns.diffs.reshape(3, -1)[:, :diffs] = plan.table_slots, plan.table_index, plan.table_blocks
        decodes = plan.slots[plan.count == 1] if shape.chunks else plan.slots
        self._attention.graph_plan(plan.start, plan.count, shape, columns.plan, self._tables.leading.shared(decodes))
        columns.header[::4] = rows, plan.num_tokens, len(slots), diffs


@dataclass(frozen=True)
class _Place:
    """Memory on a device, for a tensor that does not own it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    address: int
    number: str

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": self.shape, "strides": self.strides, "data": (self.address, False), "typestr": self.number, "version": 2}


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, in memory that is not kept from the graphs' pool: other graphs may use it when they run. Otherwise each shape
    would keep logits of its own."""
    strides = tuple(n * tensor.itemsize for n in tensor.stride())
    place = _Place(tuple(tensor.shape), strides, tensor.data_ptr(), {2: "<i2", 4: "<i4"}[tensor.itemsize])
    return torch.as_tensor(place, device=tensor.device).view(tensor.dtype)


def _nothing_to_draw() -> None:
    """Of a stage without logits."""


def _returning(replay: Callable[[], None], result: T) -> Callable[[], T]:
    def call() -> T:
        replay()
        return result

    return call


def _remembering(
    compute: Callable[[], torch.Tensor], draw: Callable[[torch.Tensor], None]
) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """The two parts of a step that is not captured: the second finds the result of the first."""
    kept: list[torch.Tensor] = []

    def first() -> torch.Tensor:
        kept[:] = [compute()]
        return kept[0]

    return first, lambda: draw(kept.pop())
