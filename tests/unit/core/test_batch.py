import numpy as np
import pytest

from octavo.core.batch import STOP_COLUMNS, Batch
from octavo.core.request import Request, expand
from tests.support.core_engine import new_request


def request(request_id: str = "a", **options: object) -> Request:
    return expand(new_request(request_id, [1, 2, 3], **options), 100, 0)[0]


def test_a_seat_is_kept_until_left_and_then_announced() -> None:
    batch = Batch(2)
    first, second = request("a"), request("b")
    assert {batch.seat(first, 0, 1, 2), batch.seat(second, 2, 1, 2)} == {0, 1}
    assert (batch.num_free, batch.num_seated, batch.num_running) == (0, 2, 2)
    with pytest.raises(IndexError):
        batch.seat(request("c"), 0, 1, 1)
    slot = first.slot
    batch.leave(slot)
    batch.leave(slot)
    assert first.slot == -1
    assert batch.take_left().tolist() == [slot]
    assert batch.take_left().tolist() == []
    with pytest.raises(LookupError):
        batch.occupant(slot)
    assert batch.occupant(second.slot) is second


def test_columns_say_where_the_request_stands() -> None:
    batch = Batch(2)
    slot = batch.seat(request(max_tokens=9, min_tokens=4, stop_token_ids=[5, 6]), 2, 1, 3)
    assert (batch.known[slot], batch.total[slot], batch.scheduled[slot], batch.settled[slot]) == (3, 3, 2, 2)
    assert (batch.limit[slot], batch.stop_from[slot]) == (12, 7)
    assert batch.stop_ids[slot, :3].tolist() == [1, 5, 6]
    assert batch.stop_width == 3
    assert not batch.many_stops[slot]


def test_more_stop_ids_than_columns() -> None:
    batch = Batch(1)
    slot = batch.seat(request(stop_token_ids=list(range(2, 2 + STOP_COLUMNS))), 0, 1, 1)
    assert batch.many_stops[slot]
    assert (batch.stop_ids[slot] == -1).all()


def test_a_new_occupant_inherits_nothing() -> None:
    batch = Batch(1)
    slot = batch.seat(request(stop_token_ids=[5, 6, 7]), 0, 1, 1)
    batch.last_step[slot] = 9
    batch.leave(slot)
    batch.seat(request("b", ignore_eos=True), 0, 1, 1)
    assert (batch.stop_ids[slot] == -1).all()
    assert batch.last_step[slot] == -1


def test_slots_of_a_lost_plan_are_announced_again_once() -> None:
    batch = Batch(3)
    for name in "abc":
        batch.seat(request(name), 0, 1, 1)
    batch.leave(1)
    lost = batch.take_left()
    batch.leave(0)
    batch.announce_again(lost)
    batch.announce_again(np.array([1], np.int32))
    assert batch.take_left().tolist() == [1, 0]


def test_outstanding_blocks_count_what_is_expected_but_never_more_than_possible() -> None:
    batch = Batch(4)
    lengths = np.zeros(4, np.int32)
    for name, have, reserve, most in (("a", 2, 5, 9), ("b", 6, 5, 9), ("c", 9, 5, 9)):
        lengths[batch.seat(request(name), 0, reserve, most)] = have
    # a lacks 3 of its 5; b outgrew its 5, so at least one more; c has all it can need.
    assert batch.outstanding_blocks(lengths) == 4
