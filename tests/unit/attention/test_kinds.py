"""Which layers of a model form which kind of cache, what the user is told where windows save nothing, and what copies mean in each kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from octavo.attention.base import LayerSpec
from octavo.attention.kinds import CacheKinds, CacheLayout, SlidingBlocks, cache_layout
from octavo.attention.select import layout_of, wasted_windows
from octavo.config.types import EngineConfig
from tests.support.engine_configs import engine_config

FULL, NEAR, FAR = (LayerSpec(2, 1, 64, 0.1, sliding_window=w) for w in (None, 8, 4000))
LENGTH = 1000


@pytest.mark.parametrize(
    ("layers", "margin", "expected"),
    [
        ((FULL, FULL), 0, CacheLayout((0, 1))),
        ((NEAR, NEAR), 128, CacheLayout((0, 1), 136)),
        ((NEAR, FULL, FAR), 128, CacheLayout((1, 2), None, (0,), 136)),
        ((FAR, FAR), 0, CacheLayout((0, 1))),
        ((NEAR, FULL), 995, CacheLayout((0, 1))),
        ((NEAR, FULL), None, CacheLayout((0, 1), wasted=1)),
        ((NEAR, NEAR), None, CacheLayout((0, 1), wasted=2)),
        ((FAR, FULL), None, CacheLayout((0, 1))),
    ],
)
def test_layouts(layers: tuple[LayerSpec, ...], margin: int | None, expected: CacheLayout) -> None:
    assert cache_layout(layers, LENGTH, margin, two_kinds=True) == expected


def test_one_table_keeps_everything_unless_all_layers_slide() -> None:
    assert cache_layout((NEAR, FULL), LENGTH, 0, two_kinds=False) == CacheLayout((0, 1), wasted=1)
    assert cache_layout((NEAR, NEAR), LENGTH, 0, two_kinds=False) == CacheLayout((0, 1), 8)


def config(**parallel: Any) -> EngineConfig:
    made = engine_config(max_model_len=LENGTH)
    return dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, **parallel))


def test_a_pipeline_says_that_windows_save_nothing() -> None:
    layers = (NEAR, FULL)
    alone = config()
    assert layout_of(alone, layers, layers).sliding == (0,)
    assert wasted_windows(alone, layout_of(alone, layers, layers)) is None
    divided = config(pipeline=2)
    layout = layout_of(divided, layers[:1], layers)
    assert (layout.first, layout.sliding) == ((0,), ())
    assert "pipeline" in (wasted_windows(divided, layout) or "")


def test_flashinfer_says_that_windows_save_nothing() -> None:
    from octavo.attention.flashinfer import FlashInferAttention

    layout = cache_layout((NEAR, FULL, NEAR), LENGTH, FlashInferAttention.reads_before_window, two_kinds=True)
    told = wasted_windows(config(), layout)
    assert told is not None
    assert "FlashInfer" in told and "2 layers" in told


def test_copies_are_numbered_by_kind() -> None:
    kinds = CacheKinds(10, SlidingBlocks(frozenset({1}), 5))
    src, dst = torch.tensor([3, 12, 9]), torch.tensor([4, 14, 1])
    assert [t.tolist() for t in kinds.copies(0, src, dst)] == [[3, 0, 9], [4, 0, 1]]
    assert [t.tolist() for t in kinds.copies(1, src, dst)] == [[0, 2, 0], [0, 4, 0]]
    assert (kinds.of(0), kinds.of(1), kinds.blocks(0), kinds.blocks(1)) == (0, 1, 10, 5)
    assert [t.tolist() for t in CacheKinds(10).copies(0, src, dst)] == [src.tolist(), dst.tolist()]
