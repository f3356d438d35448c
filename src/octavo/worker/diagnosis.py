"""Where a model's numbers stop being numbers: looked for once a request has failed of it, so that the message can name the layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from octavo.attention.base import LayerSpec
from octavo.attention.prompt import PromptAttention
from octavo.models.decoder import Model
from octavo.sampling.state import SamplerState
from octavo.worker.slots import SlotTables

MOST_TOKENS: Final = 256
"""Of a prompt that are looked at."""
ATTEMPTS: Final = 3
"""Requests that may be looked into: each costs a small prompt's time, and what breaks one model breaks it every time."""


class _Watch:
    """Attention that notes the first layer whose queries, keys or values, or whose result, are not finite. Implements `Attend`."""

    def __init__(self, layers: Sequence[LayerSpec], tokens: int, device: torch.device) -> None:
        self._attend = PromptAttention(layers, [tokens], device, causal=True)
        self.before: int | None = None
        self.within: int | None = None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = self._attend(layer, q, k, v)
        if self.before is None and self.within is None:
            if not all(bool(torch.isfinite(t).all()) for t in (q, k, v)):
                self.before = layer
            elif not bool(torch.isfinite(out).all()):
                self.within = layer
        return out


class Diagnosis:
    """Looks into failed requests of one model, a few times at most."""

    def __init__(self, model: Model, tables: SlotTables, state: SamplerState) -> None:
        self._model = model
        self._tables = tables
        self._state = state
        self._left = ATTEMPTS
        self._found = ""

    def explain(self, slots: Sequence[int]) -> str:
        """A sentence to end the message of these requests with; empty where nothing was found."""
        if self._found or self._left == 0 or not slots:
            return self._found
        self._left -= 1
        try:
            self._found = self._look(slots[0])
        except Exception:  # a look that fails must not hurt the requests that go on
            return ""
        return self._found

    @torch.inference_mode()
    def _look(self, slot: int) -> str:
        count = max(1, min(int(self._state.prompt_lens[slot]), MOST_TOKENS))
        tokens = self._tables.tokens[slot, :count].long()
        watch = _Watch(self._model.layer_specs, count, tokens.device)
        hidden = self._model.forward(tokens, torch.arange(count, device=tokens.device), watch)
        if watch.within is not None:
            return f" The attention of layer {watch.within} is where numbers stop being finite."
        if watch.before is not None:
            layers = f"layer {watch.before}" if watch.before == 0 else f"layer {watch.before - 1} or {watch.before}"
            return f" Numbers stop being finite in {layers}, before the attention of layer {watch.before}: its weights may be damaged."
        last = len(self._model.layer_specs) - 1
        if not bool(torch.isfinite(hidden).all()):
            return f" Numbers stop being finite in layer {last}, behind its attention: its weights may be damaged."
        if not bool(torch.isfinite(self._model.logits(hidden)).all()):
            return " Numbers stop being finite in the head (lm_head), behind the last layer."
        return ""
