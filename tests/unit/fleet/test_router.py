"""The router of a fleet, as Ray Serve calls it, with replicas that come, are full, refuse and go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.fleet.call import Call

pytest.importorskip("ray.serve", reason="needs ray[serve]")

from ray.serve.request_router import RequestRouter

from octavo.fleet.router import PrefixRequestRouter

LONG = b"x" * 1024


class Name(str):
    """A replica's id."""

    @property
    def unique_id(self) -> str:
        return str(self)


class Fake:
    """Replicas by name, and the calls of Ray Serve."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.full: set[str] = set()
        monkeypatch.setattr(RequestRouter, "update_replicas", lambda router, replicas: None)
        monkeypatch.setattr(
            PrefixRequestRouter, "select_available_replicas", lambda router, among: [r for r in among if r.replica_id not in self.full]
        )
        self.router = object.__new__(PrefixRequestRouter)
        self.router.initialize_state()
        self.names: list[str] = []
        self.have(*names)
        self.pending: dict[str, Any] = {}

    def have(self, *names: str) -> None:
        self.names = list(names)
        self.replicas = [SimpleNamespace(replica_id=Name(name)) for name in names]
        self.router.update_replicas(self.replicas)  # type: ignore[arg-type]

    async def choose(self, name: str, key: bytes = b"", sequences: int = 1) -> str:
        """The replica that is asked first."""
        call = Call("POST", "/v1/completions", b"", (), b"", key=key, sequences=sequences)
        pending = self.pending.setdefault(
            name,
            SimpleNamespace(
                args=[call],
                metadata=SimpleNamespace(internal_request_id=name),
                routing_context=SimpleNamespace(should_backoff=False),
                future=asyncio.get_running_loop().create_future(),
            ),
        )
        ranks: list[Any] = await self.router.choose_replicas(self.replicas, pending)  # type: ignore[arg-type]
        assert pending.routing_context.should_backoff
        assert sorted(rank[0].replica_id for rank in ranks) == sorted(set(self.names) - self.full or self.names)
        return str(ranks[0][0].replica_id)

    def loads(self) -> dict[str, int]:
        return {name: self.router._prefixes.loads[n].sequences for name, n in self.router._numbers.items()}  # type: ignore[misc]


async def test_a_prompt_goes_to_where_its_beginning_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, "a", "b", "c")
    first = await fake.choose("1", LONG)
    assert await fake.choose("2", LONG + b"more") == first
    assert await fake.choose("3", b"y" * 1024) != first


async def test_calls_that_come_together_are_spread_before_any_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, "a", "b", "c")
    for i in range(9):
        await fake.choose(str(i), bytes([i]) * 1024)
    assert fake.loads() == {"a": 3, "b": 3, "c": 3}
    for i in range(9):
        fake.router.on_request_completed("?", str(i))  # type: ignore[arg-type]
        fake.router.on_request_completed("?", str(i))  # type: ignore[arg-type]
    assert fake.loads() == {"a": 0, "b": 0, "c": 0}


async def test_one_that_is_accepted_elsewhere_counts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, "a", "b")
    wanted = await fake.choose("1", LONG, sequences=4)
    other = "b" if wanted == "a" else "a"
    fake.router.on_request_routed(fake.pending["1"], other, None)  # type: ignore[arg-type]
    assert fake.loads() == {wanted: 0, other: 4}
    fake.router.on_request_completed(other, "1")  # type: ignore[arg-type]
    assert fake.loads() == {wanted: 0, other: 0}


async def test_choosing_again_counts_once_and_a_client_that_gives_up_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, "a", "b")
    first = await fake.choose("1", LONG)
    fake.full = {first}
    second = await fake.choose("1", LONG)
    assert second != first
    assert fake.loads() == {first: 0, second: 1}
    fake.pending["1"].future.cancel()
    await asyncio.sleep(0)
    assert fake.loads() == {first: 0, second: 0}


async def test_one_that_is_gone_is_forgotten_with_all_it_knew(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, "a", "b")
    first = await fake.choose("1", LONG)
    other = "b" if first == "a" else "a"
    fake.have(other, "new")
    assert fake.loads() == {other: 0, "new": 0}
    await fake.choose("2", b"y" * 1024)
    await fake.choose("3", b"z" * 1024)
    assert sorted(fake.loads().values()) == [1, 1]
    fake.router.on_request_completed("gone", "1")  # type: ignore[arg-type]
    assert sorted(fake.loads().values()) == [1, 1]


async def test_where_all_are_full_one_is_asked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, "a", "b")
    fake.full = {"a", "b"}
    assert await fake.choose("1") in ("a", "b")
