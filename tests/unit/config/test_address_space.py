"""What is taken for a lack of memory, and what is said of it."""

from __future__ import annotations

import errno

import pytest

from octavo.config import address_space
from octavo.config.address_space import is_refusal, told


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "Cannot allocate memory"), False),
        (OSError("lib.so: cannot allocate memory in static TLS block"), True),
        (ImportError("lib.so: failed to map segment from shared object"), True),
        (ImportError("No module named 'memory'"), False),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("something else"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_is_a_refusal(error: Exception, refusal: bool) -> None:
    assert is_refusal(error) == refusal


def test_the_limit_is_named_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "limit", lambda: 2**29)
    assert "limited to 512.0 MiB (ulimit -v)" in told("to load x")
    monkeypatch.setattr(address_space, "limit", lambda: None)
    assert told("to load x").startswith("There is not enough memory to load x. Free some")


def test_nothing_is_changed_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "limit", lambda: None)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    address_space.be_frugal()
    assert "MALLOC_ARENA_MAX" not in address_space.os.environ
