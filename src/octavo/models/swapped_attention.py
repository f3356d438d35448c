"""What a model of `transformers` asks of the attention that is put in the place of its own, seen in a trial run.

A pass through such a model is a sequence of calls, the same ones each time. Each is a layer to us: its keys and values have a place of
their own in the cache, whichever module calls. Whom a token sees is told by the mask that the model asks for. That mask is a function, so
it can be looked at for positions that no trial run has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from octavo.attention.base import Attend, LayerSpec
from octavo.attention.prompt import PromptAttention
from octavo.errors import UnsupportedModel

NAME = "octavo"
"""Of our attention, among those that transformers knows."""
_OWN_MASK = "attention with a mask of the model's own is not supported"
_LOOKED_AT = 32
"""Positions, besides powers of two, for which a mask is looked at."""

Visible = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(query position, key positions) -> which of them it sees."""


@dataclass(frozen=True)
class AskedMask:
    """Stands where a mask would: what the model asked for."""

    function: Any
    """As transformers has them: (batch, head, query position, key position) -> bool."""
    padded: bool
    """Besides, some tokens were to be hidden."""

    def __getitem__(self, part: Any) -> AskedMask:
        """All of it, which some models cut out."""
        if all(isinstance(one, slice) and not one.start and one.stop is None for one in (part if isinstance(part, tuple) else (part,))):
            return self
        raise UnsupportedModel(_OWN_MASK)

    def __getattr__(self, name: str) -> Any:
        """Asked for by models that go on computing with the mask."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModel(_OWN_MASK)


def register() -> None:
    """Make our attention known. Doing it again changes nothing: the functions hold no state."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _ask)


def _ask(*args: Any, mask_function: Any = None, attention_mask: Any = None, **kwargs: Any) -> AskedMask:
    return AskedMask(mask_function, attention_mask is not None)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer.

    Args:
        query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim].

    Returns:
        [1, tokens, heads, head_dim of the values]
    """
    calls: Calls | Recorder = kwargs["octavo_attend"]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if (tempered := kwargs.get("octavo_tempered")) is not None:
        q = tempered(module, q)
    values = v.shape[-1]
    if values != k.shape[-1]:  # a cache has one width: zeros change neither scores nor sums
        width = max(values, k.shape[-1])
        q, k, v = (F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    if isinstance(calls, Recorder):
        calls.record(module, q, k, query.shape[-1], attention_mask, kwargs)
    out = calls(q.contiguous(), k.contiguous(), v.contiguous())
    return out[..., :values].unsqueeze(0), None


class Calls:
    """The calls of one pass, numbered."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.count = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self._attend(self.count - 1, q, k, v)


@dataclass
class Recorder:
    """Notes what each call is like, and computes it without a cache."""

    max_length: int
    """The longest sequence served."""
    layers: list[LayerSpec] = field(default_factory=list)
    _seen: list[tuple[Any, int | None]] = field(default_factory=list)
    """The mask functions that were looked at, and their windows."""

    def record(self, module: Any, q: torch.Tensor, k: torch.Tensor, head_dim: int, mask: Any, given: Mapping[str, Any]) -> None:
        """
        Args:
            q, k: [tokens, heads, width], [tokens, kv_heads, width]
            head_dim: of the queries, before they were filled up to the cache's width.

        Raises:
            UnsupportedModel: the attention is of a kind that ours is not.
        """
        if not getattr(module, "is_causal", True) or given.get("is_causal") is False or given.get("position_bias") is not None:
            raise UnsupportedModel("attention that is not plainly causal is not supported")
        if k.shape[0] != q.shape[0]:
            raise UnsupportedModel("attention to other than the sequence's own tokens is not supported")
        scale, sinks = given.get("scaling"), given.get("s_aux")
        self.layers.append(
            LayerSpec(
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_dim=q.shape[2],
                scale=head_dim**-0.5 if scale is None else float(scale),
                sliding_window=self._window(mask, given.get("sliding_window"), q.device),
                soft_cap=given.get("softcap"),
                sinks=None if sinks is None else tuple(sinks.float().tolist()),
            )
        )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return PromptAttention(self.layers[-1:], [q.shape[0]], q.device, causal=True)(0, q, k, v)

    def _window(self, mask: Any, stated: int | None, device: torch.device) -> int | None:
        if mask is None:
            return stated
        if not isinstance(mask, AskedMask) or mask.function is None or mask.padded:
            raise UnsupportedModel(_OWN_MASK)
        function = mask.function
        if not any(known is function for known, _ in self._seen):
            zero = torch.zeros((), dtype=torch.long, device=device)
            try:
                window = causal_window(lambda q, k: function(zero, zero, q, k), self.max_length, device)
            except (IndexError, RuntimeError, TypeError):  # it reads a tensor that is as long as the trial
                raise UnsupportedModel("attention with a mask that depends on the tokens is not supported") from None
            self._seen.append((function, window))
        return next(window for known, window in self._seen if known is function)


def causal_window(visible: Visible, max_length: int, device: torch.device) -> int | None:
    """The window of a causal mask for sequences up to `max_length`; None: there is none that such a sequence would notice.

    Raises:
        UnsupportedModel: a token sees others than itself and those right before it.
    """

    def seen(position: int) -> torch.Tensor:
        keys = torch.arange(min(position + 3, max_length), device=device)
        return visible(torch.tensor(position, device=device), keys).expand(len(keys))

    last = max_length - 1
    window = int(seen(last).sum())
    for position in _positions(last):
        first = max(0, position + 1 - window)
        expected = torch.zeros(min(position + 3, max_length), dtype=torch.bool, device=device)
        expected[first : position + 1] = True
        if not torch.equal(seen(position), expected):
            chunk = _seen_from_all(visible, max_length, device)
            hint = f" (up to {chunk} it is causal: --max-model-len {chunk})" if chunk > 1 and _causal(visible, chunk, device) else ""
            raise UnsupportedModel(
                f"attention that is neither causal nor in a sliding window is not supported for sequences of {max_length} tokens{hint}"
            )
    return None if window >= max_length else window


def _causal(visible: Visible, length: int, device: torch.device) -> bool:
    try:
        return causal_window(visible, length, device) is None
    except UnsupportedModel:
        return False


def _seen_from_all(visible: Visible, length: int, device: torch.device) -> int:
    """Up to which position the first key is seen: the length of a chunk, where there are chunks. Below `length`."""
    first = torch.zeros(1, dtype=torch.long, device=device)
    low, high = 0, length - 1  # seen from the one, and perhaps not from the other
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bool(visible(torch.tensor(middle, device=device), first)) else (low, middle)
    return high


def _positions(last: int) -> Sequence[int]:
    near = {p + d for p in (2**i for i in range(32)) for d in (-1, 0, 1)}
    spread = {last * i // _LOOKED_AT for i in range(_LOOKED_AT + 1)}
    return sorted(p for p in near | spread if 0 <= p <= last)


class Growing:
    """An `Attend` for one sequence that comes in pieces."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._layers = layers
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Attend`."""
        if layer in self._kept:
            k, v = (torch.cat((old, new)) for old, new in zip(self._kept[layer], (k, v), strict=True))
        self._kept[layer] = (k, v)
        # As if the earlier queries were asked again: what they get is dropped.
        whole = F.pad(q, (0, 0, 0, 0, len(k) - len(q), 0))
        return PromptAttention([self._layers[layer]], [len(k)], q.device, causal=True)(0, whole, k, v)[-len(q) :]
