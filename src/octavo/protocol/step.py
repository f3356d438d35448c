"""The one step contract between the core (which plans) and the workers (which compute).

There is no prefill batch and no decode batch. A step is *some tokens of some requests*: a prompt chunk, a decode, the rest of
a cache hit. A request keeps one slot (one row of every device-side table) from admission to end. Token ids stay on the device:
the worker writes a sampled token into its slot's row, and the next step reads it there, so the core may plan step N+1 before
it has seen the tokens of step N.

Lifetimes: a slot, block or copy source named by step N is not reused before step N has been settled (step-fenced frees).
Order inside a step: slot resets and table diffs, block copies, forward, sampling.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.protocol.engine import LogprobRow
from octavo.protocol.params import SamplingParams

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]


class SlotInit(msgspec.Struct):
    """A request enters a slot (first admission, or resume after preemption).

    `token_ids` are all known tokens: the prompt, then `len(token_ids) - num_prompt_tokens` outputs. `block_ids` is its whole
    block table so far (shared prefix blocks, a copied partial block, fresh ones), of the first kind of cache.
    """

    slot: int
    token_ids: Int32
    num_prompt_tokens: int
    block_ids: Int32
    sampling: SamplingParams
    """With `seed` set."""
    index: int
    """Sibling index: the random number of a token depends on (seed, index, position) alone."""
    eos_token_ids: list[int]
    adapter: str = ""


class TokenMasks(msgspec.Struct):
    """Which tokens rows of a step may sample. Rows that are not named may sample any."""

    slots: Int32
    words: Int32
    """[len(slots), vocabulary / 32] one bit a token, lowest bit first; tokens past the last word are forbidden."""


class Trial(Protocol):
    """Rows of a step whose tokens are drawn before it is known what they may be, and judged then. A mask costs ten times as much as a look
    at one token, and most tokens of a model that follows its grammar pass."""

    slots: Int32
    """The rows that may be tried; `TokenMasks` do not name them."""

    def refused(self, slots: Int32, tokens: Int32) -> TokenMasks | None:
        """The masks of those of `slots` whose tokens may not come; None if all may.

        Args:
            tokens: what was drawn. -1: nothing, or something else might be drawn under a mask that has it.
        """


class KnownTokens(msgspec.Struct):
    """Tokens that the core knows although nobody sampled them: token i stands at `positions[i]` of the sequence in `slots[i]`. They are
    written into the slots' rows before the step."""

    slots: Int32
    positions: Int32
    tokens: Int32


class StepPlan(msgspec.Struct):
    """What to compute in one step. All arrays are 1-D int32 and describe scheduled rows in one order, decodes first.

    For row r: tokens `start[r] .. start[r] + count[r] - 1` (positions in the sequence) of the request in `slots[r]` are
    computed. Where `sample[r]` is true the chunk ends at the last known token and one new token is sampled at position
    `start[r] + count[r]`.
    """

    step_id: int
    init: list[SlotInit]
    free_slots: Int32
    """Slots whose request has left; the worker may drop what it keeps for them. May be reused by `init` of the same plan."""
    slots: Int32
    start: Int32
    count: Int32
    sample: Bool
    table_slots: Int32
    """Block-table diffs, also of slots in `init`: block_table[table_slots[i], table_index[i]] = table_blocks[i]."""
    table_index: Int32
    table_blocks: Int32
    copy_src: Int32
    """Whole-block copies (copy-on-write) to make before the forward pass."""
    copy_dst: Int32
    num_tokens: int
    """sum(count)."""
    max_context: int
    """max(start + count): an upper bound known without a device sync."""
    masks: TokenMasks | None = None
    """For rows with `sample` and an output constraint."""
    trial: Trial | None = None
    """For others of those. Only for workers in the core's process, which say that they take it (`Executor.tries`): it cannot be sent."""
    forced: KnownTokens | None = None
    """Of rows of this step whose grammars left no choice."""
    told: Int32 | None = None
    """The token at `start` of the first len(told) rows, where ranks that do not sample need to be told it."""


class StepResult(msgspec.Struct):
    """What one step produced. `tokens[i]` is the token sampled for `slots[i]` (the rows with sample=True, in plan order)."""

    step_id: int
    slots: Int32
    tokens: Int32
    counts: Int32 | None = None
    """Tokens a slot when some step yields other than one (speculation): `tokens` is then their concatenation."""
    logprobs: dict[int, list[LogprobRow]] | None = None
    """By slot, for requests that asked."""
    prompt_logprobs: dict[int, list[LogprobRow]] | None = None
    """By slot: rows for prompt tokens start+1 .. of this chunk, in order (a token is scored by the position before it)."""
    errors: dict[int, str] | None = None
    """By slot: this request failed in this step (NaN logits, ...); no token of it counts."""
    step_seconds: float = 0.0
    """Device time of the step, for the scheduler's learned step-time model."""


SPARE_BLOCKS = 3
"""Beyond those that hold a window: it begins and ends inside a block, and the sequence goes on in a new one."""


def window_blocks(window: int, block_size: int) -> int:
    """Blocks with which a sequence of any length can go on, in layers with a window."""
    return -(-window // block_size) + SPARE_BLOCKS


class CacheKind(msgspec.Struct):
    """A second kind of cache: for layers with a sliding window, in a model whose other layers see everything.

    Its part of each slot's block table lies behind that of the first kind, and names its own blocks: 0 is its null block.
    """

    num_blocks: int
    """Including a null block of its own."""
    bytes_per_block: int
    window: int
    """Of the layer that sees most."""
    first_block: int
    """In `StepPlan.copy_src` and `copy_dst`, its blocks are numbered from here on."""
    first_column: int
    """Of its part of the block table."""


class CacheShape(msgspec.Struct):
    """What the worker measured, and the core builds its pools from."""

    num_blocks: int
    """Physical blocks including the reserved null block 0."""
    block_size: int
    bytes_per_block: int
    window: int | None = None
    """Every layer sees at most so many tokens, the last one included: older blocks are let go of."""
    sliding: CacheKind | None = None
