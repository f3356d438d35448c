"""Draws that hold whatever is forbidden besides: what a row can be given before anybody has computed its mask. For CPUs: it waits for the device.

The compiled sampler does the same (`sure_draw` in ops/cpu/native/sampling.cpp). A greedy choice is one of every part of the vocabulary that it is
in. So is a draw, if no group of tokens could have won against the token itself with all of its neighbours forbidden: what is forbidden lowers
the mass of groups and raises none. And a filter keeps a token in every part of the vocabulary if it does so with nothing left behind it.
"""

from __future__ import annotations

import torch

from octavo.sampling.random import GROUP, MEMBER_COUNTER, gumbels

SURE_GAP = 1e-3
"""Scores this far apart are so for sure, however probabilities were rounded that were added up over other tokens."""
LEAST_SCORE = -50.0
"""Below what may be lost in float32 beside the likeliest token; log of a mass relative to it."""


def sure_draws(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What `random.categorical` draws from every part of the vocabulary that the token is in.

    Args:
        logits: [rows, vocab] float32.
        keys: [rows, 2] int64 from `keys.row_keys`.

    Returns:
        [rows] int64; -1 where that is not certain.
    """
    rows, vocab = logits.shape
    relative = logits - logits.amax(-1, keepdim=True)
    ragged = -vocab % GROUP
    padded = torch.nn.functional.pad(relative, (0, ragged), value=-torch.inf) if ragged else relative
    mass = padded.exp().view(rows, -1, GROUP).sum(-1)
    noise = gumbels(keys, 0, mass.shape[1])
    scores = mass.double().log_() + noise
    best = scores.topk(min(2, scores.shape[1]), dim=-1)
    group = best.indices[:, :1]
    second = best.values[:, 1].clamp_(min=LEAST_SCORE) if best.values.shape[1] > 1 else torch.full((rows,), LEAST_SCORE).double()
    members = group * GROUP + torch.arange(GROUP, device=logits.device)
    within = padded.gather(1, members).double() + gumbels(keys, MEMBER_COUNTER, GROUP)
    first = within.topk(2, dim=-1)
    tokens = members.gather(1, first.indices[:, :1])
    own = relative.gather(1, tokens.clamp(max=vocab - 1)).double() + noise.gather(1, group)
    sure = (own.view(rows) > second + SURE_GAP) & (first.values[:, 0] > first.values[:, 1] + SURE_GAP)
    return torch.where(sure, tokens.view(rows), -1)  # NaN and infinity make nothing sure


def surely_kept(
    logits: torch.Tensor, tokens: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, log_min_p: torch.Tensor
) -> torch.Tensor:
    """Whether `filters.filtered` keeps a token in every part of the vocabulary that it is in.

    Args:
        logits: [rows, vocab] float32, divided by the temperature.
        tokens: [rows] int64; -1 is kept nowhere.
        top_k, top_p, log_min_p: [rows] float32; 0, 1 and -inf are off.

    Returns:
        [rows] bool.
    """
    most = logits.amax(-1)
    own = logits.gather(1, tokens.clamp(min=0).unsqueeze(1)).view(-1)
    likelier = logits > own.unsqueeze(1)
    before = likelier.sum(-1)
    mass = torch.where(likelier, (logits - most.unsqueeze(1)).exp(), 0.0).double().sum(-1)
    # A part has no more tokens before this one, and its nucleus ends no sooner than where the token itself is all that follows them.
    in_nucleus = (top_p >= 1.0) | (mass * (1.0 - top_p) < (1.0 - SURE_GAP) * top_p * (own - most).double().exp())
    kept = (own >= most + log_min_p) & ((top_k == 0) | (before < top_k)) & in_nucleus
    return (tokens >= 0) & ((own == most) | kept)
