"""Why there was no token for a request: where the model's numbers stop being numbers, or what forbade them all.

Looked for once a request has failed of it, so that the message names the layer and advises only what applies. No torch: `tensor_look` and
`native_look` know how to look into a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from octavo.config.types import EngineConfig
from octavo.protocol.step import Int32
from octavo.sampling.state import Feature, SamplerState

NO_TOKEN: Final = "The model's output for this request was not a number, or every token was forbidden."
"""Of a request whose step gave none, before anybody has looked into it."""
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


@dataclass
class Watch:
    """The first layer whose queries, keys or values, or the result of whose attention, are not finite."""

    before: int | None = None
    within: int | None = None

    def note(self, layer: int, *, before: bool, within: bool) -> None:
        """Which of them are finite."""
        if self.before is None and self.within is None:
            if not before:
                self.before = layer
            elif not within:
                self.within = layer

    def tell(self, layers: int, *, hidden: bool, logits: bool) -> str:
        """A sentence; empty where all is finite.

        Args:
            layers: of the model.
            hidden, logits: whether what comes of the last layer, and of the head, is finite.
        """
        if self.within is not None:
            return f"The attention of layer {self.within} is where numbers stop being finite."
        if self.before is not None:
            names = f"layer {self.before}" if self.before == 0 else f"layer {self.before - 1} or {self.before}"
            return f"Numbers stop being finite in {names}, before the attention of layer {self.before}."
        if not hidden:
            return f"Numbers stop being finite in layer {layers - 1}, behind its attention."
        return "" if logits else "Numbers stop being finite in the head (lm_head), behind the last layer."


Look = Callable[[Int32], str]
"""Computes a prompt once more and says where its numbers stop being finite; empty: nowhere."""


class Diagnosis:
    """Looks into failed requests of one model, a few times at most.

    Args:
        prompt: (slot, count) -> the first tokens of the request there.
    """

    def __init__(self, look: Look, prompt: Callable[[int, int], Int32], state: SamplerState, circumstances: Circumstances) -> None:
        self._look = look
        self._prompt = prompt
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
                count = max(1, min(int(self._state.prompt_lens[slots[0]]), MOST_TOKENS))
                self._found = self._look(self._prompt(slots[0], count))
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
