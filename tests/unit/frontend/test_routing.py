"""Requests with the same beginning meet at one replica, unless that has too much to do."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from benchmarks.replica_routing import compare

from octavo.frontend.routing import CHUNK, SLACK, PrefixRouter


def prompt(beginning: int, end: int, chunks: int = 3) -> list[int]:
    return [beginning] * (CHUNK * chunks) + [end]


def test_the_same_beginning_goes_to_the_same_replica() -> None:
    router = PrefixRouter(4)
    homes = {beginning: router.choose(prompt(beginning, 0)) for beginning in range(8)}
    assert Counter(homes.values()) == dict.fromkeys(range(4), 2)
    for end in range(1, 5):
        assert all(router.choose(prompt(beginning, end)) == home for beginning, home in homes.items())


def test_the_longest_beginning_decides() -> None:
    router = PrefixRouter(2)
    short = router.choose(prompt(1, 0, chunks=1))
    router.began(short, "a", 1)
    long = router.choose([1] * CHUNK + [2] * CHUNK, allowed={1 - short})
    assert router.choose([1] * CHUNK + [2] * CHUNK + [3]) == long
    assert router.choose([1] * CHUNK + [3] * CHUNK) == long  # both know the first chunk; this one has less to do


def test_nothing_in_common_goes_to_whoever_has_least_to_do() -> None:
    router = PrefixRouter(3)
    for i in range(30):
        home = router.choose([i] * CHUNK)
        router.began(home, str(i), 1)
    assert [load.sequences for load in router.loads] == [10, 10, 10]


def test_a_replica_with_too_much_to_do_is_spared() -> None:
    router = PrefixRouter(2)
    homes = []
    for i in range(40):
        homes.append(router.choose(prompt(1, i)))
        router.began(homes[-1], str(i), 1)
    assert homes[:SLACK] == homes[:1] * SLACK
    counts = Counter(homes)
    assert set(counts) == {0, 1}
    assert max(counts.values()) <= 3 * min(counts.values()) + SLACK + 1


def test_what_ends_no_longer_counts_even_if_said_twice() -> None:
    router = PrefixRouter(1)
    router.began(0, "a", 3)
    router.began(0, "b", 1)
    router.ended(0, "a")
    router.ended(0, "a")
    assert router.loads[0].sequences == 1


def test_other_key_material_shares_nothing() -> None:
    router = PrefixRouter(2)
    first = router.choose(prompt(1, 0), "salt")
    router.began(first, "a", 1)
    assert router.choose(prompt(1, 0)) != first


def test_only_allowed_replicas_are_chosen_and_a_forgotten_one_has_no_advantage() -> None:
    router = PrefixRouter(2)
    home = router.choose(prompt(1, 0))
    assert router.choose(prompt(1, 1), allowed={1 - home}) == 1 - home
    router.forget(1 - home)
    assert router.choose(prompt(1, 2)) == home


def test_memory_is_bounded() -> None:
    router = PrefixRouter(2, max_chunks=100)
    source = random.Random(0)
    for _ in range(200):
        router.choose([source.randrange(1000) for _ in range(5 * CHUNK)])
    assert len(router._known) <= 100


@pytest.mark.parametrize("at_once", [8, 32])
def test_four_replicas_keep_nine_tenths_of_the_hits_of_one_with_four_times_the_cache(at_once: int) -> None:
    result = compare(400, at_once)
    assert result["routed_over_single"] >= 0.9
    assert result["in_turns"]["hit_rate"] < 0.6 * result["single"]["hit_rate"]  # the traffic can tell the difference


def test_replicas_come_and_go() -> None:
    router = PrefixRouter(0, chunk=4)
    assert (router.add(), router.add()) == (0, 1)
    first = router.choose(b"a prompt that is known")
    router.began(first, "one", 3)
    assert router.choose(b"a prompt that is known too") == first
    router.remove(first)
    assert router.loads[first].sequences == 0
    assert router.choose(b"a prompt that is known", allowed={1 - first}) == 1 - first
    router.ended(first, "one")  # of the one that is gone
    assert router.loads[first].sequences == 0


def test_several_processes_that_route_agree_on_what_none_of_them_knows() -> None:
    names = ["a", "b", "c"]
    one, two = PrefixRouter(3, names=names), PrefixRouter(3, names=names)
    prompts = [[i] * 200 for i in range(60)]
    places = [one.choose(prompt) for prompt in prompts]
    assert [two.choose(prompt) for prompt in reversed(prompts)] == places[::-1]
    assert all(places.count(replica) > 8 for replica in range(3))
    # One that goes takes nothing else with it; one with the same name gets it back.
    three = PrefixRouter(0, names=[])
    numbers = [three.add(name) for name in names]
    three.remove(numbers[1])
    left = [three.choose(prompt, allowed={0, 2}) for prompt in prompts]
    assert all(now == before for now, before in zip(left, places, strict=True) if before != 1)
    three.forget(0)
    three.forget(2)
    three.rename(1, "b")
    assert [three.choose(prompt) for prompt in prompts] == places
