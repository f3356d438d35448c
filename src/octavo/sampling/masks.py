"""Stages that forbid tokens or shift their logits: allowed_token_ids, bad_words, min_tokens, logit_bias, and the masks of a plan.

Each takes the rows that use it, and turns their lists into flat (row, token) pairs: one transfer and one scatter a stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.ops.transfer import upload
from octavo.protocol.step import Int32
from octavo.sampling.state import Int64, SlotRecord


def _pairs(rows: Int64, lists: Sequence[Int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat (row, token) index pairs on the device, [total] each."""
    sizes = [len(ids) for ids in lists]
    both = upload(np.stack([np.repeat(rows, sizes), np.concatenate(lists)]), device)
    return both[0], both[1]


def apply_allowed(logits: torch.Tensor, rows: Int64, records: Sequence[SlotRecord]) -> None:
    """Forbid everything but `allowed_ids`. logits: [all rows, vocab]; `rows` says which use this, here and below."""
    row, token = _pairs(rows, [r.allowed_ids for r in records if r.allowed_ids is not None], logits.device)
    kept = logits[row, token]
    logits.index_fill_(0, upload(rows, logits.device), -torch.inf)
    logits[row, token] = kept


def apply_min_tokens(logits: torch.Tensor, rows: Int64, records: Sequence[SlotRecord], outputs: Int32) -> None:
    """Forbid EOS and stop tokens where fewer than min_tokens are out. outputs: [len(rows)] tokens generated so far."""
    blocked = [(row, r.stop_ids) for row, r, n in zip(rows, records, outputs, strict=True) if n < r.min_tokens and r.stop_ids is not None]
    if blocked:
        row, token = _pairs(np.asarray([b[0] for b in blocked], np.int64), [b[1] for b in blocked], logits.device)
        logits[row, token] = -torch.inf


def apply_words(logits: torch.Tensor, rows: Int64, words: Int32) -> None:
    """Forbid what has no bit in `words` [len(rows), vocab / 32]. The bits are spread on the device: a mask is 8 times smaller so."""
    vocab = logits.shape[1]
    packed = upload(np.ascontiguousarray(words).view(np.uint8), logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = ((packed.unsqueeze(2) >> shifts) & 1).view(len(rows), -1)[:, :vocab] == 0
    if forbidden.shape[1] < vocab:
        forbidden = torch.nn.functional.pad(forbidden, (0, vocab - forbidden.shape[1]), value=True)
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        index = upload(rows, logits.device)
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(forbidden, -torch.inf))


def apply_bias(logits: torch.Tensor, rows: Int64, records: Sequence[SlotRecord]) -> None:
    """Add logit_bias."""
    row, token = _pairs(rows, [r.bias_ids for r in records if r.bias_ids is not None], logits.device)
    values = np.concatenate([r.bias_values for r in records if r.bias_values is not None])
    logits.index_put_((row, token), upload(values, logits.device), accumulate=True)


def apply_bad_words(
    logits: torch.Tensor,
    rows: Int64,
    records: Sequence[SlotRecord],
    token_table: torch.Tensor,
    slots: Int32,
    lengths: Int32,
    outputs: Int32,
) -> None:
    """Forbid the last token of each bad word whose other tokens are the last ones generated.

    Args:
        token_table: [slots, width] int32; read on the device, where the newest tokens may be all there is of them.
        slots, lengths, outputs: [len(rows)] the slot, and how many tokens it holds in all and of output.
    """
    entries = [
        (row, slot, length, word)
        for row, record, slot, length, out in zip(rows.tolist(), records, slots.tolist(), lengths.tolist(), outputs.tolist(), strict=True)
        for word in record.bad_words
        if len(word) - 1 <= out
    ]
    if not entries:
        return
    width = max(len(word) for *_, word in entries) - 1
    prefixes = np.full((len(entries), width), -1, np.int64)
    places = np.zeros((len(entries), width), np.int64)
    for i, (_, _, length, word) in enumerate(entries):
        n = len(word) - 1
        prefixes[i, :n] = word[:-1]
        places[i, :n] = np.arange(length - n, length)
    device = logits.device
    index = upload(np.asarray([(row, slot, word[-1]) for row, slot, _, word in entries], np.int64).T, device)
    prefix = upload(prefixes, device)
    written = token_table[index[1].unsqueeze(1), upload(places, device)]
    hit = ((written == prefix) | (prefix < 0)).all(dim=1)
    # Adding 0 or -inf stays right when two bad words of a row end in the same token.
    logits.index_put_((index[0], index[2]), torch.where(hit, -torch.inf, 0.0), accumulate=True)
