"""Random numbers without state: a pure function of (seed, sibling index, position, counter), the same on every device.

So the token at a position never depends on the batch, the slot, preemption, or a restart of the engine. Everything is integer
arithmetic until the last step, hence bit-identical on CPU and GPU.

* `keys.row_keys` folds (seed, index, position) into 64 bits. It runs on the host: the parts are known when the step is planned.
* `uniforms` hashes (key, counter) to 32 bits with Wellons's triple32, the second half of the key mixed in between rounds.

Tokens are drawn by Gumbel-max: the argmax of log p_i + g_i, g_i = -log(-log u_i), is distributed as p (Gumbel 1954). One number
a vocabulary entry would make the random numbers dearer than the rest of the sampler, so `categorical` draws in two levels: a
group of 256 entries by the groups' total probabilities, then an entry within it. The product is the same distribution.
"""

from __future__ import annotations

import torch

GROUP = 256
"""Vocabulary entries in a group: about the square root of today's vocabularies, which needs the fewest numbers."""

_MASK = 0xFFFFFFFF
MEMBER_COUNTER = 0x8000_0000
"""Counters from here on number the entries inside the drawn group; those below number the groups."""


def uniforms(keys: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Numbers `first .. first + count - 1` of each row.

    Args:
        keys: [rows, 2] int64 from `keys.row_keys`.

    Returns:
        [rows, count] float64, strictly between 0 and 1, in steps of 2**-32.
    """
    # int64 holds 32-bit words as they are, so that >> is a logical shift; products wrap, and their low 32 bits stay exact.
    counter = torch.arange(first, first + count, device=keys.device)
    x = (counter * 0x9E3779B1 + keys[:, :1]).bitwise_and_(_MASK)
    x ^= x >> 17
    x.mul_(0xED5AD4BB).bitwise_and_(_MASK)
    x ^= keys[:, 1:]
    x ^= x >> 11
    x.mul_(0xAC4C1B51).bitwise_and_(_MASK)
    x ^= x >> 15
    x.mul_(0x31848BAB).bitwise_and_(_MASK)
    x ^= x >> 14
    return (x.double() + 0.5) * 2.0**-32


def gumbels(keys: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """[rows, count] float64 draws of the standard Gumbel distribution."""
    return uniforms(keys, first, count).log_().neg_().log_().neg_()


def categorical(logits: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one entry a row with probability softmax(logits).

    Args:
        logits: [rows, vocab] float32; -inf is never drawn.
        keys: [rows, 2] int64 from `keys.row_keys`.

    Returns:
        tokens: [rows] int64.
        valid: [rows] bool; false where logits held NaN, +inf or nothing but -inf (the token is then 0).
    """
    rows, vocab = logits.shape
    probabilities = torch.softmax(logits, dim=-1)
    whole = vocab // GROUP * GROUP
    mass = probabilities[:, :whole].reshape(rows, -1, GROUP).sum(-1)
    if whole < vocab:
        mass = torch.cat([mass, probabilities[:, whole:].sum(-1, keepdim=True)], dim=1)
    valid = ~mass[:, 0].isnan()
    group = (mass.double().log_() + gumbels(keys, 0, mass.shape[1])).argmax(-1, keepdim=True)
    members = group * GROUP + torch.arange(GROUP, device=logits.device)
    weights = probabilities.gather(1, members.clamp(max=vocab - 1)).double().log_()
    weights = weights.masked_fill_(members >= vocab, -torch.inf) + gumbels(keys, MEMBER_COUNTER, GROUP)
    return members.gather(1, weights.argmax(-1, keepdim=True)).view(rows), valid
