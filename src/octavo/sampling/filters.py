"""min-p, top-k and top-p: cut unlikely tokens off, after the temperature.

Each row gets one threshold and everything below it becomes -inf; tokens that tie with the last one kept stay. The threshold is
found among the likeliest tokens alone where they suffice, since sorting a whole vocabulary costs more than the forward pass of
a small model.
"""

from __future__ import annotations

import torch

from octavo.sampling.rows import largest_values, logsumexp

CANDIDATES = 512
"""On a CPU, top-p first looks at this many of the likeliest tokens."""
WIDEN = 8
"""For rows whose nucleus is wider it looks at this many times more, and again, up to all."""


def filtered(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    *,
    most_k: int | None,
    any_top_k: bool,
    any_top_p: bool,
    any_min_p: bool,
) -> torch.Tensor:
    """Cut: min-p first, then top-k, then top-p of what is left.

    min-p keeps p_i >= min_p * max p (Nguyen et al. 2024); top-p keeps the smallest set of likeliest tokens whose mass reaches
    top_p, at least one (Holtzman et al. 2020).

    Args:
        logits: [rows, vocab] float32, divided by the temperature.
        top_k, top_p, log_min_p: [rows] float32 on the device; 0, 1 and -inf are off.
        most_k: the largest top_k if every row has one, else None.
        any_top_k, any_top_p, any_min_p: whether any row uses it. Like most_k, known on the host.

    Returns:
        [rows, vocab], -inf where cut.
    """
    vocab = logits.shape[1]
    if any_min_p:
        logits = _cut(logits, logits.amax(-1) + log_min_p)
    if not any_top_k and not any_top_p:
        return logits
    on_cpu = logits.device.type == "cpu"
    n = min(vocab, most_k if most_k is not None else CANDIDATES if on_cpu else vocab)
    threshold, settled = _threshold(logits, largest_values(logits, n), top_k, top_p, most_k=most_k, any_top_p=any_top_p)
    while n < vocab and most_k is None and not bool(settled.all()):  # Only on a CPU, which has nothing to wait for.
        n = min(vocab, n * WIDEN)
        wide = (~settled).nonzero().view(-1)
        rows = logits.index_select(0, wide)
        best = largest_values(rows, n)
        threshold[wide], settled[wide] = _threshold(rows, best, top_k[wide], top_p[wide], most_k=None, any_top_p=any_top_p)
    return _cut(logits, threshold)


def _cut(logits: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """-inf below each row's threshold. (`where`: masked_fill takes several times as long on a CPU.)"""
    return torch.where(logits < threshold.unsqueeze(1), -torch.inf, logits)


def _threshold(
    logits: torch.Tensor,
    best: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    *,
    most_k: int | None,
    any_top_p: bool,
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
        if n < vocab and most_k is None:
            total = torch.where(settled, total, logsumexp(logits).double())
        mass = (best.double() - total.unsqueeze(1)).exp_()
        before = mass.cumsum(-1) - mass
        nucleus = (before < top_p.double().unsqueeze(1)).sum(-1).clamp_(min=1)
        cuts = top_p < 1.0
        settled = settled | (cuts & (k == vocab) & (nucleus < n))
        kept = torch.where(cuts, torch.minimum(kept, nucleus), kept)
    off = (k == vocab) & (top_p >= 1.0)
    threshold = best.gather(1, kept.unsqueeze(1) - 1).view(-1)
    return threshold.masked_fill_(off, -torch.inf), settled | off
