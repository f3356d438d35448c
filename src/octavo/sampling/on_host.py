"""The sampler's stages before the draw over logits in the host's memory, a row at a time. No torch.

What `masks` and `penalties` do for many rows on any device, in the same order and to the same bits. A row's result depends on nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.protocol.step import Int32
from octavo.sampling.state import Column, Feature, Int64, SlotRecord
from octavo.sampling.token_sets import distinct

Float32 = npt.NDArray[np.float32]

ADJUSTING = int(Feature.ALLOWED | Feature.BAD_WORDS | Feature.MIN_TOKENS | Feature.BIAS | Feature.PENALTIES)
"""Features of rows that have something to be adjusted."""


def adjust(logits: Float32, features: int, record: SlotRecord, numbers: Float32, tokens: Int32, num_prompt: int, *, must_end: bool) -> None:
    """Apply all that a greedy request has too, but masks: those forbid the same before and after.

    Args:
        logits: [vocab], changed in place.
        features: `Feature` bits of the row.
        numbers: [columns] see `Column`.
        tokens: all of the request so far.
        num_prompt: how many of them are its prompt.
        must_end: its mask allows nothing but its stop tokens: min_tokens cannot forbid them.
    """
    if features & Feature.ALLOWED and record.allowed_ids is not None:
        kept = logits[record.allowed_ids]
        logits.fill(-np.inf)
        logits[record.allowed_ids] = kept
    if features & Feature.BAD_WORDS:
        _forbid_words(logits, record.bad_words, tokens[num_prompt:])
    if features & Feature.MIN_TOKENS and record.stop_ids is not None and len(tokens) - num_prompt < record.min_tokens and not must_end:
        logits[record.stop_ids] = -np.inf
    if features & Feature.BIAS and record.bias_ids is not None and record.bias_values is not None:
        logits[record.bias_ids] += record.bias_values
    if features & Feature.PENALTIES:
        _penalise(logits, numbers, tokens, tokens[num_prompt:])


def _forbid_words(logits: Float32, words: tuple[tuple[int, ...], ...], output: Int32) -> None:
    """The last token of each word whose other tokens are the last ones generated."""
    longest = max(map(len, words), default=1) - 1
    tail = output[len(output) - min(longest, len(output)) :].tolist()
    for word in words:
        before = len(word) - 1
        if before <= len(tail) and tail[len(tail) - before :] == list(word[:-1]):
            logits[word[-1]] = -np.inf


def _penalise(logits: Float32, numbers: Float32, tokens: Int32, output: Int32) -> None:
    """See `penalties.apply_penalties`."""
    repetition, frequency, presence = (numbers[column] for column in (Column.REPETITION, Column.FREQUENCY, Column.PRESENCE))
    with np.errstate(over="ignore"):  # of large logits; the row is found unusable then
        if repetition != 1.0:
            seen = distinct(tokens)
            scores = logits[seen]
            logits[seen] = np.where(scores > 0, scores / repetition, scores * repetition)
        if frequency != 0.0:
            np.subtract.at(logits, output, frequency)
        if presence != 0.0:
            logits[distinct(output)] -= presence


def only_stops(words: Int32, stop_ids: Int64) -> bool:
    """Whether a mask [vocab / 32] allows nothing but `stop_ids`."""
    bits = words.view(np.uint32).copy()
    inside = stop_ids[stop_ids < 32 * len(bits)]
    np.bitwise_and.at(bits, inside // 32, ~(np.uint32(1) << (inside % 32).astype(np.uint32)))
    return not bits.any()
