"""Every test of the compiled kernels runs at each level that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.ops.cpu import abi


def levels() -> list[str]:
    """The levels that this machine runs, portable first."""
    library = abi.library()
    if library is None:
        return []
    best = library.octavo_level()
    found = [name for number, name in enumerate(abi.LEVELS) if library.octavo_set_level(number)]
    library.octavo_set_level(best)
    return found


@pytest.fixture(
    params=levels() or [pytest.param(None, marks=pytest.mark.skip(reason="the compiled kernels were not built"))], scope="module"
)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces the kernels of one level."""
    library = abi.loaded()
    best = library.octavo_level()
    assert library.octavo_set_level(abi.LEVELS.index(request.param)) == 1
    assert library.octavo_level() == abi.LEVELS.index(request.param)
    yield request.param
    library.octavo_set_level(best)


@pytest.fixture(scope="module")
def engine(level: str) -> abi.Engine:
    """Three threads: more than most loops have pieces for."""
    return abi.Engine(3)
