"""The sampler's adjustments and filters for one row, slowly, in numpy float64: what the fast stages are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.protocol.params import SamplingParams

Float64 = npt.NDArray[np.float64]


def adjusted(logits: Float64, params: SamplingParams, tokens: Sequence[int], num_prompt: int, eos: Sequence[int]) -> Float64:
    """Masks, bias and penalties: everything before the temperature."""
    out = logits.astype(np.float64).copy()
    output = list(tokens[num_prompt:])
    if params.allowed_token_ids is not None:
        forbidden = np.ones(len(out), np.bool_)
        forbidden[params.allowed_token_ids] = False
        out[forbidden] = -np.inf
    for word in params.bad_words_token_ids or ():
        prefix = word[:-1]
        if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
            out[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        out[[*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos)]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    for token in set(tokens):
        out[token] = out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
    for token in set(output):
        out[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return out


def kept(logits: Float64, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Which tokens survive temperature, min-p, top-k and top-p. Assumes no ties."""
    scaled = logits / params.temperature
    keep = np.isfinite(scaled)
    if params.min_p > 0:
        keep &= np.exp(scaled - scaled.max()) >= params.min_p
    order = np.argsort(-np.where(keep, scaled, -np.inf), kind="stable")
    order = order[keep[order]]
    if params.top_k > 0:
        order = order[: params.top_k]
    mass = np.exp(scaled[order] - scaled.max())
    mass /= mass.sum()
    before = np.cumsum(mass) - mass
    order = order[(before < params.top_p) | (np.arange(len(order)) == 0)]
    result = np.zeros(len(scaled), np.bool_)
    result[order] = True
    return result
