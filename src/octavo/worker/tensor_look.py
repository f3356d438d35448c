"""Where the numbers of a model of tensors stop being finite: see `diagnosis`."""

from __future__ import annotations

import torch

from octavo.attention.prompt import PromptAttention
from octavo.models.decoder import Model
from octavo.protocol.step import Int32
from octavo.worker.diagnosis import Look, Watch


def look_into(model: Model, device: torch.device) -> Look:
    """For `Diagnosis`. Attention is computed without a cache, so that a cache of small numbers is not to blame for what is found."""

    @torch.inference_mode()
    def look(prompt: Int32) -> str:
        tokens = torch.from_numpy(prompt).to(device).long()
        watch, plain = Watch(), PromptAttention(model.layer_specs, [len(tokens)], device, causal=True)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = plain(layer, q, k, v)
            watch.note(layer, before=all(bool(torch.isfinite(t).all()) for t in (q, k, v)), within=bool(torch.isfinite(out).all()))
            return out

        hidden = model.forward(tokens, torch.arange(len(tokens), device=device), attend)
        finite = [bool(torch.isfinite(t).all()) for t in (hidden, model.logits(hidden))]
        return watch.tell(len(model.layer_specs), hidden=finite[0], logits=finite[1])

    return look
