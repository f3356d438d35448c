"""Log-probabilities of tokens, with rank and the likeliest alternatives. float32, bounded memory, no waiting on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.ops.transfer import download, upload
from octavo.protocol.engine import LogprobRow
from octavo.sampling.rows import count_above, largest, logsumexp


@dataclass(frozen=True)
class LogprobTensors:
    """One entry a scored row. On the device, or (after `to_host`) on the host."""

    tokens: torch.Tensor
    """[rows] int64."""
    logprobs: torch.Tensor
    """[rows] float32."""
    ranks: torch.Tensor
    """[rows] int64; 1 = most likely."""
    top_ids: torch.Tensor
    """[rows, k] int64, most likely first."""
    top_logprobs: torch.Tensor
    """[rows, k] float32."""
    extra_logprobs: torch.Tensor
    """[rows, e] float32 of token ids that a request named."""

    def to_host(self) -> LogprobTensors:
        """Start the copies; see `download`."""
        return LogprobTensors(*(download(getattr(self, name)) for name in self.__dataclass_fields__))

    @staticmethod
    def concatenate(parts: Sequence[LogprobTensors]) -> LogprobTensors:
        if len(parts) == 1:
            return parts[0]
        names = LogprobTensors.__dataclass_fields__
        return LogprobTensors(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def score(logits: torch.Tensor, tokens: torch.Tensor, k: int, extra_ids: Sequence[tuple[int, ...]] = ()) -> LogprobTensors:
    """Score each row's token under log_softmax(logits).

    Args:
        logits: [rows, vocab] float32.
        tokens: [rows] int64.
        k: how many of the likeliest to return; -1 is all.
        extra_ids: a row's further token ids to score, for every row or for none.
    """
    vocab = logits.shape[1]
    k = vocab if k == -1 else min(k, vocab)
    total = logsumexp(logits).unsqueeze(1)
    own = logits.gather(1, tokens.unsqueeze(1))
    values, indices = largest(logits, k) if k else (logits[:, :0], tokens.new_empty(len(tokens), 0))
    width = max(map(len, extra_ids), default=0)
    extra = logits[:, :0]
    if width:
        padded = np.zeros((len(extra_ids), width), np.int64)
        for i, ids in enumerate(extra_ids):
            padded[i, : len(ids)] = ids
        extra = logits.gather(1, upload(padded, logits.device)) - total
    return LogprobTensors(
        tokens=tokens,
        logprobs=(own - total).view(-1),
        ranks=count_above(logits, own) + 1,
        top_ids=indices,
        top_logprobs=values - total,
        extra_logprobs=extra,
    )


def to_rows(scored: LogprobTensors, counts: Sequence[int], extra_ids: Sequence[tuple[int, ...]] = ()) -> list[LogprobRow]:
    """Protocol rows from host tensors.

    Args:
        counts: how many of the top entries each row's request asked for; -1 is all.
        extra_ids: as given to `score`. Ids that are among the top already are not repeated.
    """
    columns = zip(
        scored.tokens.tolist(),
        scored.logprobs.tolist(),
        scored.ranks.tolist(),
        scored.top_ids.tolist(),
        scored.top_logprobs.tolist(),
        counts,
        strict=True,
    )
    rows = []
    for i, (token, logprob, rank, top_ids, top_logprobs, count) in enumerate(columns):
        wanted = len(top_ids) if count == -1 else count
        row = LogprobRow(token, logprob, rank, top_ids[:wanted], top_logprobs[:wanted])
        if extra_ids:
            for other, value in zip(extra_ids[i], scored.extra_logprobs[i].tolist(), strict=False):
                if other not in row.top_ids:
                    row.top_ids.append(other)
                    row.top_logprobs.append(value)
        rows.append(row)
    return rows
