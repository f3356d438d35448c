"""Sets of token ids."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.token_sets import distinct


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50) | st.lists(st.integers(0, 5), max_size=50))
def test_what_numpy_would_give(token_ids: list[int]) -> None:
    for kind in (np.int32, np.int64):
        found = distinct(np.asarray(token_ids, kind))
        assert found.dtype == kind
        assert found.tolist() == np.unique(np.asarray(token_ids, kind)).tolist()
