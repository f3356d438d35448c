"""The sampler: runs the stages that a step's requests need, in the order that users of other engines expect.

Raw logprobs; allowed tokens, bad words, min_tokens, logit_bias; penalties; greedy choice; temperature, min-p, top-k, top-p;
Gumbel-max. A step of plain greedy requests takes one argmax and nothing else. Which stages run is decided on the host, from
what requests asked for; the device is never waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.ops.registry import Draw, DrawRows
from octavo.ops.transfer import download, upload, upload_many
from octavo.protocol.engine import LogprobRow
from octavo.protocol.step import Int32, TokenMasks, Trial
from octavo.sampling import logprobs, masks
from octavo.sampling.filters import filtered
from octavo.sampling.keys import row_keys
from octavo.sampling.logprobs import LogprobTensors
from octavo.sampling.on_host import only_stops
from octavo.sampling.penalties import apply_penalties
from octavo.sampling.random import categorical
from octavo.sampling.rows import argmax
from octavo.sampling.state import Column, Feature, Int64, SamplerState, SlotRecord
from octavo.sampling.trial import sure_draws, surely_kept

LARGEST = np.iinfo(np.int32).max
SLICE_ELEMENTS = 2**24
"""Rows are sampled in slices of about this many logits, which bounds the memory that the stages need."""


@dataclass(frozen=True)
class Sampled:
    """What came out. Tensors are on the device, or (after `to_host`) on the host."""

    tokens: torch.Tensor
    """[rows], integers."""
    valid: torch.Tensor | None
    """[rows] bool; false where the logits were not usable (NaN, inf, nothing allowed). None: those tokens are -1."""
    scored: LogprobTensors | None
    scored_slots: Int32
    """The slots that `scored` is of."""
    scored_records: tuple[SlotRecord, ...]

    def to_host(self) -> Sampled:
        scored = None if self.scored is None else self.scored.to_host()
        valid = None if self.valid is None else download(self.valid)
        return Sampled(download(self.tokens), valid, scored, self.scored_slots, self.scored_records)

    def valid_rows(self) -> npt.NDArray[np.bool_]:
        """[rows], on the host."""
        valid = self.tokens >= 0 if self.valid is None else self.valid
        return valid.numpy()

    def logprob_rows(self) -> dict[int, list[LogprobRow]] | None:
        """Protocol rows by slot, on the host."""
        if self.scored is None:
            return None
        records = self.scored_records
        rows = logprobs.to_rows(self.scored, [r.logprobs for r in records], [r.logprob_token_ids for r in records])
        return {slot: [row] for slot, row in zip(self.scored_slots.tolist(), rows, strict=True)}


class Sampler:
    """Samples from logits by slot.

    Args:
        state: what requests asked for; kept up to date by the owner.
        token_table: [slots, width] int32 on the device: all tokens of each slot's request so far.
        processed_logprobs: report logprobs after all stages rather than of the model's own logits.
        draw: does what follows the adjustments, where the device has a kernel for it.
    """

    def __init__(
        self, state: SamplerState, token_table: torch.Tensor, *, processed_logprobs: bool = False, draw: Draw | None = None
    ) -> None:
        self._state = state
        self._token_table = token_table
        self._processed = processed_logprobs
        self._draw_tokens = draw

    def only_draws(self, slots: Int32) -> bool:
        """Whether these rows need nothing but the fused draw: it only reads logits, in whatever dtype they are."""
        return self._draw_tokens is not None and not (self._state.features[slots] & ~(Feature.RANDOM | Feature.FILTERS)).any()

    def sample(
        self, logits: torch.Tensor, slots: Int32, positions: Int32, masks: TokenMasks | None = None, trial: Trial | None = None
    ) -> Sampled:
        """One token a row.

        Args:
            logits: [rows, vocab] float32, overwritten; for rows that `only_draws`, any float dtype, and only read.
            slots, positions: [rows] each row's slot, and the position in its sequence that the token will take: the number
                of tokens it has so far.
            masks: what some of them may sample.
            trial: judges what others have drawn.
        """
        words = {} if masks is None else dict(zip(masks.slots.tolist(), masks.words, strict=True))
        rows = max(1, SLICE_ELEMENTS // logits.shape[1])
        if len(slots) <= rows or self.only_draws(slots) or not self._state.features[slots].any():
            return self._sample(logits, slots, positions, words, trial)
        parts = [
            self._sample(logits[begin : begin + rows], slots[begin : begin + rows], positions[begin : begin + rows], words, trial)
            for begin in range(0, len(slots), rows)
        ]
        scored = [part.scored for part in parts if part.scored is not None]
        return Sampled(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.valid for part in parts if part.valid is not None]),
            _merge(scored) if scored else None,
            np.concatenate([part.scored_slots for part in parts]),
            tuple(record for part in parts for record in part.scored_records),
        )

    def _sample(self, logits: torch.Tensor, slots: Int32, positions: Int32, words: Mapping[int, Int32], trial: Trial | None) -> Sampled:
        features = self._state.features[slots]
        scoring = np.flatnonzero(features & Feature.LOGPROBS)
        scores_from = None
        if len(scoring) and not self._processed:
            scores_from = self._take(logits, scoring, copy=bool((features & ~Feature.LOGPROBS).any()))
        self._adjust(logits, features, slots, positions, words)
        if trial is None:
            tokens, valid = self._choose(logits, features, slots, positions)
        else:
            tokens, valid = self._try(trial, logits, features, slots, positions)
        if not len(scoring):
            return Sampled(tokens, valid, None, slots[:0], ())
        if scores_from is None:
            scores_from = self._take(logits, scoring, copy=False)
        records = tuple(self._state.records[slot] for slot in slots[scoring].tolist())
        most = -1 if any(r.logprobs == -1 for r in records) else max(r.logprobs for r in records)
        extra = [r.logprob_token_ids for r in records]
        scored = logprobs.score(scores_from, self._take(tokens, scoring, copy=False), most, extra)
        return Sampled(tokens, valid, scored, slots[scoring], records)

    def _adjust(self, logits: torch.Tensor, features: Int32, slots: Int32, positions: Int32, words: Mapping[int, Int32]) -> None:
        """The stages that greedy requests have too, in place."""
        state = self._state
        outputs = positions - state.prompt_lens[slots]

        def users(feature: Feature) -> tuple[Int64, list[SlotRecord]]:
            rows = np.flatnonzero(features & feature)
            return rows, [state.records[slot] for slot in slots[rows].tolist()]

        present = int(np.bitwise_or.reduce(features, initial=0))
        if present & Feature.ALLOWED:
            masks.apply_allowed(logits, *users(Feature.ALLOWED))
        if present & Feature.BAD_WORDS:
            rows, records = users(Feature.BAD_WORDS)
            masks.apply_bad_words(logits, rows, records, self._token_table, slots[rows], positions[rows], outputs[rows])
        if present & Feature.MIN_TOKENS:
            rows, records = users(Feature.MIN_TOKENS)
            ended = [self._must_end(slot, words) for slot in slots[rows].tolist()]
            masks.apply_min_tokens(logits, rows, records, np.where(ended, LARGEST, outputs[rows]))
        if present & Feature.BIAS:
            masks.apply_bias(logits, *users(Feature.BIAS))
        if present & Feature.MASKED:
            rows = np.asarray([row for row in np.flatnonzero(features & Feature.MASKED) if int(slots[row]) in words], np.int64)
            if len(rows):
                masks.apply_words(logits, rows, np.stack([words[slot] for slot in slots[rows].tolist()]))
        if present & Feature.PENALTIES:
            rows = np.flatnonzero(features & Feature.PENALTIES)
            part = self._take(logits, rows, copy=False)
            numbers = self._numbers(slots[rows])
            apply_penalties(
                part,
                self._token_table,
                slots[rows],
                positions[rows],
                state.prompt_lens[slots[rows]],
                numbers[:, Column.PRESENCE],
                numbers[:, Column.FREQUENCY],
                numbers[:, Column.REPETITION],
            )
            self._put(logits, rows, part)

    def _must_end(self, slot: int, words: Mapping[int, Int32]) -> bool:
        """Whether the mask of `slot` allows nothing but its stop tokens: then min_tokens cannot forbid them."""
        stops = self._state.records[slot].stop_ids
        return slot in words and stops is not None and only_stops(words[slot], stops)

    def _choose(self, logits: torch.Tensor, features: Int32, slots: Int32, positions: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, valid) [rows] from adjusted logits, which are scaled and cut in place for the random rows."""
        if self._draw_tokens is not None and not (self._processed and (features & Feature.LOGPROBS).any()):
            return self._draw_fused(self._draw_tokens, logits, features, slots, positions)
        random = np.flatnonzero(features & Feature.RANDOM)
        if len(random) == 0:
            return _greedy(logits)
        drawn = self._draw(logits, random, features, slots, positions)
        if len(random) == len(slots):
            return drawn
        greedy = np.flatnonzero((features & Feature.RANDOM) == 0)
        chosen = _greedy(self._take(logits, greedy, copy=False))
        order = upload(np.argsort(np.concatenate([greedy, random])), logits.device)
        tokens, valid = (torch.cat(pair).index_select(0, order) for pair in zip(chosen, drawn, strict=True))
        return tokens, valid

    def _try(
        self, trial: Trial, logits: torch.Tensor, features: Int32, slots: Int32, positions: Int32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_choose`, where masks of the rows of `trial` are made for those only whose tokens may not come. Waits for the device."""
        found = np.full(len(slots), -1, np.int64)
        tried = np.flatnonzero(np.isin(slots, trial.slots))
        # Logprobs after all stages are those under a mask.
        open_to = tried[features[tried] & Feature.LOGPROBS == 0] if self._processed else tried
        if len(open_to):
            found[open_to] = self._sure(
                self._take(logits, open_to, copy=False), features[open_to], slots[open_to], positions[open_to]
            ).numpy()
        refused = trial.refused(slots[tried], found[tried].astype(np.int32))
        if refused is not None:
            words = dict(zip(refused.slots.tolist(), refused.words, strict=True))
            rows = np.flatnonzero(np.isin(slots, refused.slots))
            masks.apply_words(logits, rows, np.stack([words[slot] for slot in slots[rows].tolist()]))
            found[rows] = -1
        rest = np.flatnonzero(found < 0)
        tokens, valid = torch.from_numpy(found), torch.ones(len(slots), dtype=torch.bool)
        if len(rest):
            part = self._take(logits, rest, copy=False)
            own, flags = self._choose(part, features[rest], slots[rest], positions[rest])
            self._put(logits, rest, part)
            index = torch.from_numpy(rest)
            tokens, valid = tokens.index_copy_(0, index, own.long()), valid.index_copy_(0, index, flags)
        return tokens, valid

    def _sure(self, logits: torch.Tensor, features: Int32, slots: Int32, positions: Int32) -> torch.Tensor:
        """[rows] the tokens that adjusted logits, which are only read, lead to even if others are forbidden; -1 where that is not certain."""
        tokens, valid = _greedy(logits)
        tokens = torch.where(valid, tokens, -1)
        random = np.flatnonzero(features & Feature.RANDOM)
        if not len(random):
            return tokens
        state, own = self._state, slots[random]
        numbers = self._numbers(own)
        scaled = self._take(logits, random, copy=False) / numbers[:, Column.TEMPERATURE].unsqueeze(1)
        drawn = sure_draws(scaled, torch.from_numpy(row_keys(state.seeds[own], state.indices[own], positions[random])))
        if (features[random] & Feature.FILTERS).any():
            kept = surely_kept(scaled, drawn, numbers[:, Column.TOP_K], numbers[:, Column.TOP_P], numbers[:, Column.LOG_MIN_P])
            drawn = torch.where(kept, drawn, -1)
        return tokens.index_copy_(0, torch.from_numpy(random), drawn)

    def _draw_fused(
        self, draw: Draw, logits: torch.Tensor, features: Int32, slots: Int32, positions: Int32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = row_keys(self._state.seeds[slots], self._state.indices[slots], positions).astype(np.uint32).view(np.int32)
        modes = features & int(Feature.RANDOM | Feature.FILTERS)  # other bits mean something else to a draw
        wanted = [slots, positions, modes, keys, np.asarray([len(slots)], np.int32)]
        on_slots, on_positions, on_modes, on_keys, count = upload_many(wanted, logits.device)
        out = torch.empty(len(slots), dtype=torch.int32, device=logits.device)
        draw(
            logits,
            DrawRows(on_slots, on_positions, on_modes, on_keys, count),
            self._state.numbers,
            out,
            filters=bool((features & Feature.FILTERS).any()),
        )
        return out.clamp(min=0), out >= 0

    def _draw(
        self, logits: torch.Tensor, rows: Int64, features: Int32, slots: Int32, positions: Int32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._state
        part = self._take(logits, rows, copy=False)
        part.div_(self._numbers(slots[rows])[:, Column.TEMPERATURE].unsqueeze(1))
        cut = np.flatnonzero(features[rows] & Feature.FILTERS)
        if len(cut):
            numbers = self._numbers(slots[rows][cut])
            top_k, top_p, min_p = (column[slots[rows][cut]] for column in (state.top_k, state.top_p, state.min_p))
            kept = filtered(
                self._take(part, cut, copy=False),
                numbers[:, Column.TOP_K],
                numbers[:, Column.TOP_P],
                numbers[:, Column.LOG_MIN_P],
                most_k=int(top_k.max()) if top_k.all() else None,
                any_top_k=bool(top_k.any()),
                any_top_p=bool((top_p < 1.0).any()),
                any_min_p=bool(min_p.any()),
            )
            part = kept if len(cut) == len(part) else part.index_copy_(0, upload(cut, part.device), kept)
        if self._processed:
            self._put(logits, rows, part)
        own = slots[rows]
        keys = row_keys(state.seeds[own], state.indices[own], positions[rows])
        return categorical(part, upload(keys, logits.device))

    def _numbers(self, slots: Int32) -> torch.Tensor:
        return self._state.numbers.index_select(0, upload(slots, self._state.device))

    @staticmethod
    def _take(tensor: torch.Tensor, rows: Int64, *, copy: bool) -> torch.Tensor:
        """The given rows; without `copy`, all rows are the tensor itself."""
        if len(rows) == len(tensor):
            return tensor.clone() if copy else tensor
        return tensor.index_select(0, upload(rows, tensor.device))

    @staticmethod
    def _put(tensor: torch.Tensor, rows: Int64, values: torch.Tensor) -> None:
        """Undo `_take`: the given rows become `values`."""
        if values is tensor:
            return
        if len(rows) == len(tensor):
            tensor.copy_(values)
        else:
            tensor.index_copy_(0, upload(rows, tensor.device), values)


def _greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, valid) [rows]: the lowest of the likeliest ids."""
    values, tokens = argmax(logits)
    return tokens, values.isfinite()


def _merge(parts: list[LogprobTensors]) -> LogprobTensors:
    """Slices may have asked for different numbers of alternatives: pad to the widest."""
    k = max(part.top_ids.shape[1] for part in parts)
    e = max(part.extra_logprobs.shape[1] for part in parts)
    pad = torch.nn.functional.pad
    return LogprobTensors.concatenate(
        [
            LogprobTensors(
                part.tokens,
                part.logprobs,
                part.ranks,
                pad(part.top_ids, (0, k - part.top_ids.shape[1])),
                pad(part.top_logprobs, (0, k - part.top_logprobs.shape[1])),
                pad(part.extra_logprobs, (0, e - part.extra_logprobs.shape[1])),
            )
            for part in parts
        ]
    )
