import numpy as np

from octavo.core.policy import IDLE_KEYS_REMEMBERED, FairShare, Fcfs, Policy, Priority, WaitingQueue, make_policy
from octavo.core.request import Request, RequestState, expand
from octavo.protocol.step import Int32
from tests.support.core_engine import new_request


def request(name: str, order: int, **options: object) -> Request:
    return expand(new_request(name, [1], **options), 100, order)[0]


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while (head := queue.peek()) is not None:
        names.append(head.id)
        queue.remove(head)
    return names


def filled(policy: Policy, *requests: Request) -> WaitingQueue:
    queue = WaitingQueue(policy)
    for item in requests:
        policy.enter(item)
        queue.push(item)
    return queue


def ints(*values: int) -> Int32:
    return np.array(values, np.int32)


def test_fcfs_is_by_arrival_then_by_order() -> None:
    queue = filled(
        Fcfs(), request("late", 0, arrival_time=2.0), request("second", 2, arrival_time=1.0), request("first", 1, arrival_time=1.0)
    )
    assert drain(queue) == ["first", "second", "late"]


def test_the_preempted_go_to_the_front_of_their_class() -> None:
    policy = Priority()
    back = request("back", 9, priority=1, arrival_time=9.0)
    back.state = RequestState.PREEMPTED
    queue = filled(policy, request("low", 0, priority=1), request("high", 1, priority=0, arrival_time=10.0), back)
    assert drain(queue) == ["high", "back", "low"]


def test_priority_is_lower_first() -> None:
    queue = filled(Priority(), request("b", 0, priority=5), request("a", 1, priority=-3), request("c", 2, priority=5))
    assert drain(queue) == ["a", "b", "c"]
    assert Priority().importance(request("x", 0, priority=4)) == 4


def test_fair_share_serves_the_least_served_key() -> None:
    policy = FairShare()
    greedy = [request(f"g{i}", i, fair_key="greedy") for i in range(3)]
    modest = request("m", 3, fair_key="modest", arrival_time=5.0)
    queue = filled(policy, *greedy, modest)
    assert queue.peek() is greedy[0]
    policy.charge(ints(greedy[0].share, greedy[0].share), ints(30, 12))
    assert policy.served("greedy") == 42
    assert drain(queue) == ["m", "g0", "g1", "g2"]


def test_idling_earns_no_credit_and_keeps_debt() -> None:
    policy = FairShare()
    busy, idle = request("a", 0, fair_key="busy"), request("b", 1, fair_key="idle")
    policy.enter(busy)
    policy.enter(idle)
    policy.charge(ints(busy.share, idle.share), ints(100, 500))
    policy.leave(idle)
    policy.enter(request("c", 2, fair_key="new"))
    assert policy.served("new") == 100
    policy.enter(request("d", 3, fair_key="idle"))
    assert policy.served("idle") == 500


def test_fair_share_bookkeeping_is_bounded() -> None:
    policy = FairShare()
    for i in range(IDLE_KEYS_REMEMBERED + 50):
        one = request("a", i, fair_key=f"key {i}")
        policy.enter(one)
        policy.charge(ints(one.share), ints(1))
        policy.leave(one)
    assert len(policy._idle) == IDLE_KEYS_REMEMBERED
    assert len(policy._served) == 16
    many = [request("a", i, fair_key=f"k{i}") for i in range(40)]
    for one in many:
        policy.enter(one)
    assert len({one.share for one in many}) == 40


def test_removing_from_the_middle_leaves_no_garbage() -> None:
    queue = filled(Fcfs(), *(request(f"r{i}", i) for i in range(400)))
    everyone = [entry[3] for entry in queue._lanes[0]]
    for item in everyone[1:]:
        queue.remove(item)
        queue.remove(item)
    assert len(queue) == 1
    assert sum(len(lane) for lane in queue._lanes.values()) < 140
    assert drain(queue) == ["r0"]
    assert queue.peek() is None
    assert not queue._lanes


def test_make_policy() -> None:
    assert isinstance(make_policy("fcfs"), Fcfs)
    assert isinstance(make_policy("priority"), Priority)
    assert isinstance(make_policy("fair"), FairShare)
