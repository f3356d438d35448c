"""Queries that grow with their position, where a model of `transformers` counts positions by itself.

Llama 4 does, in its layers without rotation: from the first token that it computes at a time, which in a step of several requests is
somebody else's. Its own tuning is switched off, and done here by the positions of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_OWN = "attn_temperature_tuning"


class QueryTemperature:
    """Of one model. Holds which of its modules do so."""

    def __init__(self, model: Any) -> None:
        self._tuned = {id(m): m for m in model.modules() if getattr(m, _OWN, False) and not getattr(m, "use_rope", True)}
        self._switch(on=False)

    def __bool__(self) -> bool:
        return bool(self._tuned)

    @contextmanager
    def left_to_the_model(self) -> Iterator[None]:
        """For a pass over a single sequence from its first token on."""
        self._switch(on=True)
        try:
            yield
        finally:
            self._switch(on=False)

    def applied(self, module: Any, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """
        Args:
            module: whose queries they are.
            q: [tokens, heads, head_dim]
            positions: [tokens]
        """
        if id(module) not in self._tuned:
            return q
        factor: torch.Tensor = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        return (q * factor[:, None, None]).to(q.dtype)

    def _switch(self, *, on: bool) -> None:
        for module in self._tuned.values():
            setattr(module, _OWN, on)
