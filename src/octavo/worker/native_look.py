"""Where the numbers of a compiled model stop being finite: see `diagnosis`. No torch."""

from __future__ import annotations

import numpy as np

from octavo.attention.base import LayerSpec
from octavo.ops.cpu.cpu_program import CpuProgram
from octavo.ops.program import Float32
from octavo.protocol.step import Int32
from octavo.worker.diagnosis import Look, Watch


def look_into(program: CpuProgram, layers: tuple[LayerSpec, ...]) -> Look:
    """For `Diagnosis`. Attention is computed without a cache, so that a cache of small numbers is not to blame for what is found."""

    def look(prompt: Int32) -> str:
        watch = Watch()

        def attend(layer: int, q: Float32, k: Float32, v: Float32) -> Float32:
            out = attended(layers[layer], q, k, v)
            watch.note(layer, before=all(bool(np.isfinite(x).all()) for x in (q, k, v)), within=bool(np.isfinite(out).all()))
            return out

        with np.errstate(all="ignore"):  # these numbers are the reason to look
            hidden = program.run_layers(prompt.astype(np.int64), np.arange(len(prompt), dtype=np.int64), attend)
            finite = [bool(np.isfinite(x).all()) for x in (hidden, program.logits(hidden))]
        return watch.tell(len(layers), hidden=finite[0], logits=finite[1])

    return look


def attended(spec: LayerSpec, q: Float32, k: Float32, v: Float32) -> Float32:
    """Causal attention of one sequence: [tokens, heads, head_dim]. A few hundred tokens: all scores of a head are there at once."""
    tokens, heads, _ = q.shape
    behind = np.arange(tokens)[:, None] - np.arange(tokens)
    unseen = (behind < 0) if spec.sliding_window is None else (behind < 0) | (behind >= spec.sliding_window)
    out, group = np.empty_like(q, order="C"), heads // spec.num_kv_heads
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T * np.float32(spec.scale)
        if spec.soft_cap is not None:
            scores = np.tanh(scores / np.float32(spec.soft_cap)) * np.float32(spec.soft_cap)
        scores[unseen] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, head // group]
    return out
