"""Why there was no token for a request: where the model's numbers stop being numbers, or what forbade them all.

Looked for once a request has failed of it, so that the message names the layer and advises only what applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from octavo.attention.base import LayerSpec
from octavo.attention.prompt import PromptAttention
from octavo.config.types import EngineConfig
from octavo.models.decoder import Model
from octavo.sampling.state import Feature, SamplerState
from octavo.worker.slots import SlotTables

MOST_TOKENS: Final = 256
"""Of a prompt that are looked at."""
ATTEMPTS: Final = 3
"""Requests that may be looked into: each costs a small prompt's time, and what breaks one model breaks it every time."""

_FORBIDDING: Final = {
    Feature.ALLOWED: "allowed_token_ids",
    Feature.BAD_WORDS: "bad_words",
    Feature.MIN_TOKENS: "min_tokens",
    Feature.MASKED: "output format",
}
"""What of a request may leave no token to choose."""


@dataclass(frozen=True)
class Circumstances:
    """What advice depends on."""

    dtype: str
    cache_dtype: str
    files: str
    """Where the weights come from; empty where they are made up."""

    @classmethod
    def of(cls, config: EngineConfig) -> Circumstances:
        model = config.model
        return cls(model.dtype, config.cache.dtype, "" if model.load_format == "dummy" else model.path)

    def of_the_model(self) -> str:
        """What to do where the numbers of the model itself are wrong."""
        damaged = f" The weights in {self.files} may be damaged: compare their checksums, or fetch them again." if self.files else ""
        if self.dtype == "float16":
            return "Numbers above 65,504 do not fit into float16: try --dtype bfloat16 or float32." + damaged.replace("may", "may also")
        return damaged

    def of_the_cache(self) -> str:
        """What to do where they are right until they have gone through the KV cache."""
        if self.cache_dtype != self.dtype and self.cache_dtype in ("float16", "float8_e4m3fn"):
            return f" Its keys or values may be too large for a {self.cache_dtype} cache: try --kv-cache-dtype {self._wider_cache}."
        return self.of_the_model()

    @property
    def _wider_cache(self) -> str:
        return "float32" if self.dtype == "float32" else "auto"


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

    def __init__(self, model: Model, tables: SlotTables, state: SamplerState, circumstances: Circumstances) -> None:
        self._model = model
        self._tables = tables
        self._state = state
        self._circumstances = circumstances
        self._left = ATTEMPTS
        self._found = ""

    def explain(self, slots: Sequence[int]) -> dict[int, str]:
        """What to tell these requests, none of which got a token."""
        if not slots:
            return {}
        if not self._found and self._left:
            self._left -= 1
            try:
                self._found = self._look(slots[0])
            except Exception:  # a look that fails must not hurt the requests that go on
                self._found = ""
        return {slot: self._message(slot) for slot in slots}

    def _message(self, slot: int) -> str:
        nan, known = "The model's output for this request was not a number.", self._circumstances
        if self._found:
            return f"{nan} {self._found}{known.of_the_model()}"
        wishes = [name for feature, name in _FORBIDDING.items() if self._state.features[slot] & feature]
        if wishes:
            return f"No token was left for this request: its {' and '.join(wishes)} {'forbid' if len(wishes) > 1 else 'forbids'} every one."
        return f"{nan}{known.of_the_cache()}"

    @torch.inference_mode()
    def _look(self, slot: int) -> str:
        """A sentence; empty where nothing was found."""
        count = max(1, min(int(self._state.prompt_lens[slot]), MOST_TOKENS))
        tokens = self._tables.tokens[slot, :count].long()
        watch = _Watch(self._model.layer_specs, count, tokens.device)
        hidden = self._model.forward(tokens, torch.arange(count, device=tokens.device), watch)
        if watch.within is not None:
            return f"The attention of layer {watch.within} is where numbers stop being finite."
        if watch.before is not None:
            layers = f"layer {watch.before}" if watch.before == 0 else f"layer {watch.before - 1} or {watch.before}"
            return f"Numbers stop being finite in {layers}, before the attention of layer {watch.before}."
        last = len(self._model.layer_specs) - 1
        if not bool(torch.isfinite(hidden).all()):
            return f"Numbers stop being finite in layer {last}, behind its attention."
        if not bool(torch.isfinite(self._model.logits(hidden)).all()):
            return "Numbers stop being finite in the head (lm_head), behind the last layer."
        return ""
