"""Presence, frequency and repetition penalties, computed from the token table at each step.

Nothing is counted from step to step, so a resumed or replayed request is penalised exactly as if it had never stopped. Only
the places of tokens that occurred are touched: the cost goes with the context, not with the vocabulary.
"""

from __future__ import annotations

import torch

from octavo.ops.transfer import upload
from octavo.protocol.step import Int32

MOST_ELEMENTS = 2**22
"""Most (row, token) pairs at once: bounds temporary memory for long contexts."""


def apply_penalties(
    logits: torch.Tensor,
    token_table: torch.Tensor,
    slots: Int32,
    lengths: Int32,
    prompt_lens: Int32,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Penalise logits in place.

    For each distinct token of prompt and output: l / repetition if l > 0 else l * repetition (CTRL, Keskar et al. 2019). For
    each distinct token of the output: minus presence, minus frequency times its count (as OpenAI defines them).

    Args:
        logits: [rows, vocab] float32, all with penalties.
        token_table: [slots, width] int32.
        slots, lengths, prompt_lens: [rows] on the host: the slot, and how many tokens it holds in all and in the prompt.
        presence, frequency, repetition: [rows] float32 on the device.
    """
    rows = max(1, MOST_ELEMENTS // int(lengths.max()))
    for begin in range(0, len(slots), rows):
        part = slice(begin, begin + rows)
        _apply(
            logits[part],
            token_table,
            slots[part],
            lengths[part],
            prompt_lens[part],
            presence[part],
            frequency[part],
            repetition[part],
        )


def _apply(
    logits: torch.Tensor,
    token_table: torch.Tensor,
    slots: Int32,
    lengths: Int32,
    prompt_lens: Int32,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    device = logits.device
    length = int(lengths.max())
    place = torch.arange(length, device=device).unsqueeze(0)
    total = upload(lengths, device).unsqueeze(1)
    prompt = upload(prompt_lens, device).unsqueeze(1)
    history = token_table[:, :length].index_select(0, upload(slots, device)).long()

    # Several places may name one token. A plain scatter is then still exact, because they all write the same number; padding
    # repeats a token that is there anyway.
    tokens = torch.where(place < total, history, history[:, :1])
    scores = logits.gather(1, tokens)
    factor = repetition.unsqueeze(1)
    logits.scatter_(1, tokens, torch.where(scores > 0, scores / factor, scores * factor))

    longest_output = int((lengths - prompt_lens).max())
    if longest_output == 0:
        return
    shortest_prompt = int(prompt_lens[lengths > prompt_lens].min())
    place = place[:, shortest_prompt:]
    output = (place >= prompt) & (place < total)
    # The last place of a row with output is an output token. A row without any repeats one token and takes nothing from it.
    last = history.gather(1, (total.long() - 1).clamp_(min=0))
    tokens = torch.where(output, history[:, shortest_prompt:], last)
    logits.scatter_add_(1, tokens, torch.where(output, -frequency.unsqueeze(1), 0.0))
    amount = presence.unsqueeze(1) * (total > prompt)
    logits.scatter_(1, tokens, logits.gather(1, tokens) - amount)
