"""min-p, top-k and top-p: cut unlikely tokens off, after the temperature.

Each row gets one threshold and everything below it becomes -inf; tokens that tie with the last one kept stay. The threshold is
found among the likeliest tokens alone where they suffice, since sorting a whole vocabulary costs more than the forward pass of
a small model.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.ops.transfer import upload

CANDIDATES = 512
"""On a CPU, top-p first looks at this many of the likeliest tokens, and sorts only rows whose nucleus is wider."""


def apply_filters(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    *,
    most_k: int | None,
    any_top_p: bool,
) -> None:
    """Cut in place: min-p first, then top-k, then top-p of what is left.

    min-p keeps p_i >= min_p * max p (Nguyen et al. 2024); top-p keeps the smallest set of likeliest tokens whose mass reaches
    top_p, at least one (Holtzman et al. 2020).

    Args:
        logits: [rows, vocab] float32, divided by the temperature.
        top_k, top_p, log_min_p: [rows] float32 on the device; 0, 1 and -inf are off.
        most_k: the largest top_k if every row has one, else None. Known on the host, as is any_top_p.
    """
    vocab = logits.shape[1]
    peak = logits.amax(-1, keepdim=True)
    logits.masked_fill_(logits < peak + log_min_p.unsqueeze(1), -torch.inf)
    if most_k is not None:
        best = logits.topk(min(most_k, vocab)).values
    elif logits.device.type == "cpu":
        best = logits.topk(min(CANDIDATES, vocab)).values
    else:
        best = logits.sort(dim=-1, descending=True).values
    threshold, settled = _threshold(logits, best, top_k, top_p, any_top_p=any_top_p)
    if best.shape[1] < vocab and most_k is None and not bool(settled.all()):  # On a CPU: no device waits for this.
        wide = (~settled).nonzero().view(-1)
        rows = logits.index_select(0, wide)
        # numpy sorts a float32 vocabulary many times faster than torch does on a CPU.
        best = upload(-np.sort(-rows.numpy(), axis=-1), logits.device)
        threshold[wide] = _threshold(rows, best, top_k[wide], top_p[wide], any_top_p=any_top_p)[0]
    logits.masked_fill_(logits < threshold.unsqueeze(1), -torch.inf)


def _threshold(
    logits: torch.Tensor, best: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, *, any_top_p: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit each row keeps, judged by its `best` [rows, n] logits, largest first.

    Returns:
        threshold: [rows].
        settled: [rows] bool; false where the row's cut lies beyond `best`.
    """
    vocab, n = logits.shape[1], best.shape[1]
    k = torch.where(top_k > 0, top_k, float(vocab)).clamp(max=vocab).long()
    kept = k.clamp(max=n)
    settled = k <= n
    if any_top_p:
        # Mass is relative to what top-k left: the likeliest k, or everything.
        rank = torch.arange(n, device=logits.device).unsqueeze(0)
        total = best.masked_fill(rank >= k.unsqueeze(1), -torch.inf).double().logsumexp(-1)
        if n < vocab:
            total = torch.where(settled, total, logits.logsumexp(-1).double())
        mass = (best.double() - total.unsqueeze(1)).exp_()
        before = mass.cumsum(-1) - mass
        nucleus = (before < top_p.double().unsqueeze(1)).sum(-1).clamp_(min=1)
        cuts = top_p < 1.0
        settled = settled | (cuts & (k == vocab) & (nucleus < n))
        kept = torch.where(cuts, torch.minimum(kept, nucleus), kept)
    off = (k == vocab) & (top_p >= 1.0)
    threshold = best.gather(1, kept.unsqueeze(1) - 1).view(-1)
    return threshold.masked_fill_(off, -torch.inf), settled | off
