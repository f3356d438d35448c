"""The last stages of the sampler in two launches: thresholds of the filters, then the draw. Reads the logits where they lie.

The draw is the two-level Gumbel-max of `sampling/random.py` with the same random numbers. A group's score is the log of its
mass plus its own Gumbel number, which needs no total: so every thread block scores its groups in one pass over the logits,
and the last one of a row to arrive picks the best group and draws the member. A greedy row is the same with maxima for masses
and no random numbers. All comparisons break ties by the lowest id, so the bits do not depend on how a row was cut.

Filters keep what is at or above one threshold a row. It is found without sorting, by searching the ordered integer images of
the logits for the largest one that still has k entries (top-k), or the wanted mass (top-p), at or above it.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.draw_splits import draw_splits
from octavo.ops.registry import DrawRows
from octavo.ops.triton.split_softmax import arrived_last

_GROUP = 256
"""`sampling.random.GROUP`: part of what a seed means."""
_GROUPS_AT_ONCE = 8
_SEARCH_TILE = 4096
_KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits of a float32 that are the same for every number of the dtype."""


@triton.jit
def _gumbel(key_lo, key_hi, counter):
    """Standard Gumbel number `counter` (uint32) of a row, float64: `sampling.random.gumbels`."""
    x = counter * 0x9E3779B1 + key_lo
    x = x ^ (x >> 17)
    x = x * 0xED5AD4BB
    x = x ^ key_hi
    x = x ^ (x >> 11)
    x = x * 0xAC4C1B51
    x = x ^ (x >> 15)
    x = x * 0x31848BAB
    x = x ^ (x >> 14)
    return -tl.log(-tl.log((x.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def _ordered(x, SHIFT: tl.constexpr):
    """float32 -> int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _load_scaled(base, index, VOCAB: tl.constexpr, temperature):
    """(logits, logits / temperature) in float32; -inf past the end."""
    raw = tl.load(base + index, mask=index < VOCAB, other=-float("inf")).to(tl.float32)
    # A product costs a tenth of an exact quotient, and differs by a rounding at most.
    return raw, raw * (1.0 / temperature)


@triton.jit
def _counts(base, p1, p2, p3, VOCAB: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """How many logits have ordered images of at least p1, p2, p3."""
    c1 = tl.zeros([TILE], tl.int32)
    c2 = tl.zeros([TILE], tl.int32)
    c3 = tl.zeros([TILE], tl.int32)
    for t in range(0, VOCAB, TILE):
        index = t + tl.arange(0, TILE)
        key = _ordered(tl.load(base + index, mask=index < VOCAB, other=-float("inf")).to(tl.float32), SHIFT)
        c1 += (key >= p1).to(tl.int32)
        c2 += (key >= p2).to(tl.int32)
        c3 += (key >= p3).to(tl.int32)
    return tl.sum(c1, 0), tl.sum(c2, 0), tl.sum(c3, 0)


@triton.jit
def _masses(base, temperature, top, floor, least, p1, p2, p3, VOCAB: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """exp(x / temperature - top) summed over entries with images of at least p1, p2, p3, and never below `least` or `floor`."""
    m1 = tl.zeros([TILE], tl.float32)
    m2 = tl.zeros([TILE], tl.float32)
    m3 = tl.zeros([TILE], tl.float32)
    for t in range(0, VOCAB, TILE):
        raw, scaled = _load_scaled(base, t + tl.arange(0, TILE), VOCAB, temperature)
        key = _ordered(raw, SHIFT)
        mass = tl.where((key >= least) & (scaled >= floor) & (scaled > -float("inf")), tl.exp(scaled - top), 0.0)
        m1 += tl.where(key >= p1, mass, 0.0)
        m2 += tl.where(key >= p2, mass, 0.0)
        m3 += tl.where(key >= p3, mass, 0.0)
    return tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0)


@triton.jit
def _filter_kernel(
    logits_ptr,
    slots_ptr,
    modes_ptr,
    count_ptr,
    numbers_ptr,
    cuts_ptr,
    logits_stride,
    numbers_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Leave a row's thresholds in cuts[row]: on the logits, and on the logits over the temperature."""
    row = tl.program_id(0)
    if row >= tl.load(count_ptr):
        return
    if (tl.load(modes_ptr + row) & 2) == 0:
        tl.store(cuts_ptr + row * 2, -float("inf"))
        tl.store(cuts_ptr + row * 2 + 1, -float("inf"))
        return
    numbers = numbers_ptr + tl.load(slots_ptr + row).to(tl.int64) * numbers_stride
    temperature = tl.load(numbers)
    top_k = tl.load(numbers + 1).to(tl.int32)
    top_p = tl.load(numbers + 2)
    base = logits_ptr + row.to(tl.int64) * logits_stride
    best = tl.full([TILE], -float("inf"), tl.float32)
    for t in range(0, VOCAB, TILE):
        index = t + tl.arange(0, TILE)
        best = tl.maximum(best, tl.load(base + index, mask=index < VOCAB, other=-float("inf")).to(tl.float32))
    most = tl.max(best, 0)
    top = most * (1.0 / temperature)
    floor = top + tl.load(numbers + 3)

    key_of_most = _ordered(most, SHIFT).to(tl.int64)
    least = _ordered(tl.full([], -float("inf"), tl.float32), SHIFT).to(tl.int64)
    limited = (top_k > 0) & (top_k < VOCAB)
    if limited:
        # The largest image that has at least k at or above it. Three pivots a pass over the row.
        hi = key_of_most
        while least < hi:
            d = hi - least
            p1 = least + (d + 3) // 4
            p2 = least + (2 * d + 3) // 4
            p3 = least + (3 * d + 3) // 4
            c1, c2, c3 = _counts(base, p1.to(tl.int32), p2.to(tl.int32), p3.to(tl.int32), VOCAB, TILE, SHIFT)
            least = tl.where(c3 >= top_k, p3, tl.where(c2 >= top_k, p2, tl.where(c1 >= top_k, p1, least)))
            hi = tl.where(c3 >= top_k, hi, tl.where(c2 >= top_k, p3 - 1, tl.where(c1 >= top_k, p2 - 1, p1 - 1)))
    if top_p < 1.0:
        kept = least.to(tl.int32)
        total, beyond, _beyond = _masses(base, temperature, top, floor, kept, kept, kept + 1, kept + 1, VOCAB, TILE, SHIFT)
        if limited:
            # Mass is relative to exactly k tokens: of those that tie at the threshold, some may be one too many.
            there, over, _over = _counts(base, kept, kept + 1, kept + 1, VOCAB, TILE, SHIFT)
            total = tl.where(there > top_k, beyond + (total - beyond) * (top_k - over) / (there - over), total)
        wanted = top_p * total
        # Tokens less likely than (1 - p) / vocabulary have less than 1 - p of the mass together: none of them is needed.
        lowest = most + temperature * tl.log(total * (1.0 - top_p) / VOCAB)
        least = tl.maximum(least, tl.minimum(_ordered(lowest, SHIFT).to(tl.int64) - 1, key_of_most))
        hi = key_of_most
        while least < hi:
            d = hi - least
            p1 = least + (d + 3) // 4
            p2 = least + (2 * d + 3) // 4
            p3 = least + (3 * d + 3) // 4
            m1, m2, m3 = _masses(base, temperature, top, floor, kept, p1.to(tl.int32), p2.to(tl.int32), p3.to(tl.int32), VOCAB, TILE, SHIFT)
            least = tl.where(m3 >= wanted, p3, tl.where(m2 >= wanted, p2, tl.where(m1 >= wanted, p1, least)))
            hi = tl.where(m3 >= wanted, hi, tl.where(m2 >= wanted, p3 - 1, tl.where(m1 >= wanted, p2 - 1, p1 - 1)))
    image = least.to(tl.int32) << SHIFT
    cut = (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    # The image of -inf comes back as NaN where the dtype has fewer bits.
    tl.store(cuts_ptr + row * 2, tl.where(cut > -float("inf"), cut, -float("inf")))
    tl.store(cuts_ptr + row * 2 + 1, floor)


@triton.jit
def _draw_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    modes_ptr,
    keys_ptr,
    count_ptr,
    numbers_ptr,
    cuts_ptr,
    out_ptr,
    table_ptr,
    scores_ptr,
    groups_ptr,
    highest_ptr,
    mass_ptr,
    counters_ptr,
    logits_stride,
    numbers_stride,
    table_stride,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_PAD: tl.constexpr,
    FILTERS: tl.constexpr,
    TABLE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    if row >= tl.load(count_ptr):
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    random = (tl.load(modes_ptr + row) & 1) != 0
    temperature = tl.load(numbers_ptr + slot * numbers_stride)
    key_lo = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
    key_hi = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
    base = logits_ptr + row.to(tl.int64) * logits_stride
    if FILTERS:
        cut = tl.load(cuts_ptr + row * 2)
        floor = tl.load(cuts_ptr + row * 2 + 1)
    member = tl.arange(0, GROUP)

    bad = tl.full([AT_ONCE], 0, tl.int32)
    mine = row.to(tl.int64) * SPLITS * SHARE
    for g in range(split * SHARE, tl.minimum((split + 1) * SHARE, (VOCAB + GROUP - 1) // GROUP), AT_ONCE):
        group = g + tl.arange(0, AT_ONCE)
        raw, scaled = _load_scaled(base, group[:, None] * GROUP + member[None, :], VOCAB, temperature)
        usable = raw < float("inf")  # false for NaN too
        bad = tl.maximum(bad, tl.max((~usable).to(tl.int32), 1))
        if FILTERS:
            usable = usable & (raw >= cut) & (scaled >= floor)
        scaled = tl.where(usable, scaled, -float("inf"))
        highest = tl.max(scaled, 1)
        tl.store(highest_ptr + mine + group, highest)
        if random:
            shift = tl.where(highest == -float("inf"), 0.0, highest)
            tl.store(mass_ptr + mine + group, tl.sum(tl.exp(scaled - shift[:, None]), 1))
    # Scores of all groups side by side: in the loop every lane of a warp would compute the same double-precision logarithms.
    tl.debug_barrier()
    s = tl.arange(0, SHARE_PAD)
    group = split * SHARE + s
    there = (s < SHARE) & (group < (VOCAB + GROUP - 1) // GROUP)
    highest = tl.load(highest_ptr + mine + group, mask=there, other=-float("inf"))
    score = highest.to(tl.float64)
    if random:
        mass = tl.load(mass_ptr + mine + group, mask=there, other=1.0)
        noise = _gumbel(key_lo, key_hi, group.to(tl.uint32))
        score = tl.where(highest == -float("inf"), score, score + tl.log(tl.maximum(mass, 1e-30).to(tl.float64)) + noise)
    place = row * SPLITS + split
    chosen = tl.max(score, 0)
    # A bad entry anywhere spoils the row: +inf wins every comparison and says so.
    tl.store(scores_ptr + place, tl.where(tl.max(bad, 0) > 0, float("inf"), chosen))
    tl.store(groups_ptr + place, tl.min(tl.where(there & (score == chosen), group, 0x7FFFFFFF), 0))
    if arrived_last(counters_ptr + row, SPLITS):
        part = tl.arange(0, SPLITS)
        scores = tl.load(scores_ptr + row * SPLITS + part, cache_modifier=".cg")
        groups = tl.load(groups_ptr + row * SPLITS + part, cache_modifier=".cg")
        best = tl.max(scores, 0)
        winner = tl.min(tl.where(scores == best, groups, 0x7FFFFFFF), 0)
        winner = tl.where(winner == 0x7FFFFFFF, 0, winner)
        raw, scaled = _load_scaled(base, winner * GROUP + member, VOCAB, temperature)
        usable = raw < float("inf")
        if FILTERS:
            usable = usable & (raw >= cut) & (scaled >= floor)
        member_score = tl.where(usable, scaled, -float("inf")).to(tl.float64)
        if random:
            member_score += _gumbel(key_lo, key_hi, member.to(tl.uint32) + 0x80000000)
        valid = (best > -float("inf")) & (best < float("inf"))
        token = winner * GROUP + tl.argmax(member_score, 0).to(tl.int32)
        tl.store(out_ptr + row, tl.where(valid, token, -1))
        if TABLE:
            position = tl.load(positions_ptr + row) + AHEAD
            tl.store(table_ptr + slot * table_stride + position, tl.where(valid, token, 0))


def draw_tokens(
    logits: torch.Tensor,
    rows: DrawRows,
    numbers: torch.Tensor,
    out: torch.Tensor,
    token_table: torch.Tensor | None = None,
    *,
    filters: bool = True,
) -> None:
    """See `ops.registry.Draw`."""
    count, vocab = logits.shape
    if not count:
        return
    groups = triton.cdiv(vocab, _GROUP)
    # Enough thread blocks to fill the GPU, but none without groups.
    splits = min(draw_splits(count), triton.next_power_of_2(triton.cdiv(groups, _GROUPS_AT_ONCE)))
    share = triton.cdiv(triton.cdiv(groups, splits), _GROUPS_AT_ONCE) * _GROUPS_AT_ONCE
    device = logits.device
    scores = torch.empty(count, splits, dtype=torch.float64, device=device)
    best_groups = torch.empty(count, splits, dtype=torch.int32, device=device)
    highest, mass = torch.empty(2, count, splits * share, dtype=torch.float32, device=device)
    counters = torch.zeros(count, dtype=torch.int32, device=device)
    cuts = torch.empty(count, 2, dtype=torch.float32, device=device) if filters else numbers
    if filters:
        _filter_kernel[(count,)](
            logits,
            rows.slots,
            rows.modes,
            rows.count,
            numbers,
            cuts,
            logits.stride(0),
            numbers.stride(0),
            VOCAB=vocab,
            TILE=min(_SEARCH_TILE, triton.next_power_of_2(vocab)),
            SHIFT=_KEY_SHIFTS[logits.dtype],
            num_warps=8,
        )
    _draw_kernel[(count, splits)](
        logits,
        rows.slots,
        rows.positions,
        rows.modes,
        rows.keys,
        rows.count,
        numbers,
        cuts,
        out,
        out if token_table is None else token_table,
        scores,
        best_groups,
        highest,
        mass,
        counters,
        logits.stride(0),
        numbers.stride(0),
        0 if token_table is None else token_table.stride(0),
        VOCAB=vocab,
        GROUP=_GROUP,
        AT_ONCE=_GROUPS_AT_ONCE,
        SPLITS=splits,
        SHARE=share,
        SHARE_PAD=triton.next_power_of_2(share),
        FILTERS=filters,
        TABLE=token_table is not None,
        AHEAD=rows.ahead,
        num_warps=4,
    )
