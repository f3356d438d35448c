"""Searches and sums over the rows of vocabulary-wide tensors, several times faster than the torch functions of these names.

Two observations. A plain maximum is by far the fastest reduction, so searches find groups by their maxima first and then look
inside few of them. And on a CPU numpy has vectorised selection and sorting, which torch does not.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.ops.transfer import upload

GROUP = 128
"""Entries in a group of a two-level search."""


def _group_maxima(x: torch.Tensor) -> torch.Tensor:
    """[rows, width] -> [rows, whole groups] maxima; a ragged rest is left out."""
    return x[:, : x.shape[1] // GROUP * GROUP].reshape(x.shape[0], -1, GROUP).amax(-1)


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry of each row and its index: of equal ones the first; NaN counts as largest.

    Args:
        x: [rows, width]

    Returns:
        ([rows] values, [rows] int64 indices)
    """
    rows, width = x.shape
    if width < 2 * GROUP:
        found = x.max(dim=-1)
        return found.values, found.indices
    whole = width // GROUP * GROUP
    maxima = _group_maxima(x)
    if whole < width:
        maxima = torch.cat([maxima, x[:, whole:].amax(-1, keepdim=True)], dim=1)
    best = maxima.max(dim=-1)
    # The last group may reach back into the one before it: that holds nothing larger, and equals come first either way.
    first = (best.indices * GROUP).clamp_(max=width - GROUP).unsqueeze(1)
    members = x.gather(1, first + torch.arange(GROUP, device=x.device))
    return best.values, first.view(rows) + members.argmax(-1)


def largest(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `n` largest entries of each row and their indices, largest first. They lie in the n groups with the largest maxima.

    Args:
        x: [rows, width]

    Returns:
        ([rows, n] values, [rows, n] int64 indices)
    """
    rows, width = x.shape
    if n * GROUP * 4 > width:
        found = x.topk(n)
        return found.values, found.indices
    groups = _group_maxima(x).topk(n, sorted=False).indices
    candidates = (groups.unsqueeze(2) * GROUP + torch.arange(GROUP, device=x.device)).view(rows, -1)
    whole = width // GROUP * GROUP
    if whole < width:  # A ragged rest is searched in any case.
        rest = torch.arange(whole, width, device=x.device).expand(rows, -1)
        candidates = torch.cat([candidates, rest], dim=1)
    found = x.gather(1, candidates).topk(n)
    return found.values, candidates.gather(1, found.indices)


def largest_values(x: torch.Tensor, n: int) -> torch.Tensor:
    """[rows, n] values of `largest`; all of a row is fine too."""
    if x.device.type != "cpu":
        return largest(x, n)[0] if n < x.shape[1] else x.sort(dim=-1, descending=True).values
    values = x.numpy()
    if n < x.shape[1]:
        values = np.partition(values, x.shape[1] - n, axis=-1)[:, -n:]
    return upload(np.sort(values, axis=-1)[:, ::-1].copy(), x.device)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """[rows, width] -> [rows]. NaN for a row of nothing but -inf."""
    if x.device.type != "cpu" and (ragged := -x.shape[1] % 4):
        # Rows at all alignments would be added up in different orders: a row's bits must not depend on its place.
        x = torch.nn.functional.pad(x, (0, ragged), value=-torch.inf)
    # softmax is fused; its largest entry is 1 / sum(exp(x - max)).
    return x.amax(-1) - torch.softmax(x, -1).amax(-1).log()


def count_above(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """How many entries of each row exceed its bound. x: [rows, width], bound: [rows, 1]; [rows] int64."""
    # Ones and zeros in float32 sum faster than booleans, and exactly up to 2**24.
    return torch.gt(x, bound, out=torch.empty_like(x)).sum(-1).long()
