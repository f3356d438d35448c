"""Grouping of prompts by length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.pooling import LEAST_FILLED, SHORT, similar


@given(st.lists(st.integers(1, 3000), max_size=40))
def test_groups_hold_every_prompt_once_and_waste_little(lengths: list[int]) -> None:
    groups = similar(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest, shortest = max(lengths[i] for i in group), min(lengths[i] for i in group)
        assert longest <= SHORT or shortest >= longest * LEAST_FILLED
