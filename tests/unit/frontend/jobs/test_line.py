"""Who is next: clients take turns, and a full line has a place for whoever has little in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.jobs.line import Line


def drain(line: Line[str]) -> list[str]:
    found = []
    while (taken := line.take()) is not None:
        line.done(taken[0])
        found.append(taken[1])
    return found


def test_clients_take_turns() -> None:
    line: Line[str] = Line(100, 1)
    for client, job in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]:
        assert line.put(client, job) is None
    assert drain(line) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_client_has_no_more_running_than_it_may() -> None:
    line: Line[str] = Line(100, 1)
    line.put("a", "a1")
    line.put("a", "a2")
    assert line.take() == ("a", "a1")
    assert line.take() is None
    line.put("b", "b1")
    assert line.take() == ("b", "b1")
    line.done("a")
    assert line.take() == ("a", "a2")


def test_a_full_line_takes_a_newcomer_in_place_of_the_last_of_the_greediest() -> None:
    line: Line[str] = Line(3, 1)
    for job in ("a1", "a2", "a3"):
        assert line.put("a", job) is None
    assert line.put("a", "a4") == "a4"
    assert line.put("b", "b1") == "a3"
    assert line.put("c", "c1") == "a2"
    assert line.put("b", "b2") == "b2"  # it has as many as anybody else
    assert len(line) == 3
    assert drain(line) == ["a1", "b1", "c1"]


def test_jobs_can_be_taken_back() -> None:
    line: Line[str] = Line(2, 1)
    line.put("a", "a1")
    assert line.remove("a", "a1")
    assert not line.remove("a", "a1")
    assert not line.remove("z", "a1")
    assert len(line) == 0
    assert line.take() is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["put", "take", "done", "remove"])), max_size=200))
def test_every_job_is_somewhere(steps: list[tuple[str, str]]) -> None:
    line: Line[int] = Line(5, 2)
    waiting: dict[int, str] = {}
    running: list[str] = []
    for number, (client, what) in enumerate(steps):
        if what == "put":
            refused = line.put(client, number)
            waiting[number] = client
            if refused is not None:
                del waiting[refused]
        elif what == "take" and (taken := line.take()) is not None:
            assert waiting.pop(taken[1]) == taken[0]
            running.append(taken[0])
            assert running.count(taken[0]) <= 2
        elif what == "done" and client in running:
            running.remove(client)
            line.done(client)
        elif what == "remove" and (mine := [job for job, owner in waiting.items() if owner == client]):
            assert line.remove(client, mine[0])
            del waiting[mine[0]]
        assert len(line) == len(waiting) <= 5
    assert sorted(line.clear()) == sorted(waiting)
