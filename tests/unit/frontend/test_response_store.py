"""The response store: bounded in time and space, chains, owners, several processes on one file."""

from __future__ import annotations

from pathlib import Path

from octavo.frontend.http.responses.store import ResponseStore, StoredResponse


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stored(name: str, previous: str | None = None, owner: str = "", status: str = "completed", text: str = "x") -> StoredResponse:
    return StoredResponse({"id": name, "previous_response_id": previous, "status": status, "text": text}, [{"id": "i"}], owner)


def test_expires_after_its_last_use() -> None:
    clock = Clock()
    store = ResponseStore(ttl=10, max_bytes=1 << 20, clock=clock)
    store.put(stored("a"))
    clock.now += 8
    assert store.get("a", "") is not None
    clock.now += 8
    assert store.get("a", "") is not None
    clock.now += 11
    assert store.get("a", "") is None
    store.put(stored("b"))  # clears what has expired
    one = ResponseStore(ttl=10, max_bytes=1 << 20, clock=clock)
    one.put(stored("b"))
    assert store.size() == one.size()


def test_the_least_recently_used_go_first() -> None:
    clock = Clock()
    store = ResponseStore(ttl=1000, max_bytes=10_000, clock=clock)
    for name in "abc":
        clock.now += 1
        store.put(stored(name, text="x" * 2000))
    clock.now += 1
    assert store.get("a", "") is not None
    clock.now += 1
    store.put(stored("d", text="x" * 2500))
    assert [name for name in "abcd" if store.get(name, "")] == ["a", "c", "d"]
    assert store.size() <= 10_000


def test_one_that_does_not_fit_at_all_is_not_kept() -> None:
    store = ResponseStore(ttl=1000, max_bytes=1000)
    store.put(stored("big", text="x" * 2000))
    assert store.get("big", "") is None
    assert store.size() == 0


def test_chain() -> None:
    store = ResponseStore(ttl=1000, max_bytes=1 << 20)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(stored(name, previous))
    assert [s.id for s in store.chain("c", "") or []] == ["a", "b", "c"]
    store.delete("a", "")
    assert store.chain("c", "") is None
    assert store.chain("zzz", "") is None


def test_owners_do_not_meet() -> None:
    store = ResponseStore(ttl=1000, max_bytes=1 << 20)
    store.put(stored("a", owner="me"))
    assert store.get("a", "you") is None
    assert not store.delete("a", "you")
    assert store.delete("a", "me")


def test_putting_again_replaces_but_never_revives_a_cancelled_one() -> None:
    store = ResponseStore(ttl=1000, max_bytes=1 << 20)
    store.put(stored("a", status="in_progress"))
    assert not store.cancelled("a")
    store.put(stored("a", status="cancelled"))
    size = store.size()
    store.put(stored("a", status="completed", text="late" * 100))
    assert store.cancelled("a")
    assert store.size() == size


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    one, two = (ResponseStore(str(tmp_path / "r.db"), ttl=1000, max_bytes=1 << 20) for _ in range(2))
    one.put(stored("a"))
    assert two.get("a", "") is not None
    two.put(stored("b", "a"))
    assert [s.id for s in one.chain("b", "") or []] == ["a", "b"]
    assert one.size() == two.size()


def test_items_of_outputs_are_found_as_long_as_their_response_is_kept() -> None:
    clock = Clock()
    store = ResponseStore(ttl=1000, max_bytes=6000, clock=clock)
    for number in range(10):
        clock.now += 1
        response = {"id": f"r{number}", "output": [{"id": f"m{number}", "text": "x" * 300}]}
        store.put(StoredResponse({**response, "output": []}, [], "a"))
        store.put(StoredResponse(response, [], "a"))
    found = [store.output_item(f"m{number}", "a") is not None for number in range(10)]
    assert found == [store.get(f"r{number}", "a") is not None for number in range(10)]
    assert not found[0] and found[9]
    assert store.output_item("m9", "b") is None
    store.delete("r9", "a")
    assert store.output_item("m9", "a") is None
    assert store._db.execute("SELECT count(*) FROM outputs").fetchone()[0] == sum(found) - 1
