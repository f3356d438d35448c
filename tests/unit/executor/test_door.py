"""Who comes in at the door, who does not and why; and the link that those inside have."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.config.types import EngineConfig, NodesConfig, ParallelConfig
from octavo.errors import ConfigError, EngineDead
from octavo.executor import door as door_module
from octavo.executor.door import Door, Guest, address_here, come_in, resolve_address
from octavo.executor.frames import FrameBuffer, framed
from octavo.executor.link import LinkReader
from octavo.executor.rank_ends import SILENT_SECONDS, LinkedRank
from octavo.protocol.ranks import RankReady
from tests.support.engine_config import tiny_config


def hosts(port: int = 0, token: str = "", rank: int = 0, timeout: float = 5.0) -> EngineConfig:
    nodes = NodesConfig(2, rank, "127.0.0.1", port, timeout, token)
    return dataclasses.replace(tiny_config(), parallel=ParallelConfig(2, 2, nodes=nodes))


@contextmanager
def open_door(config: EngineConfig) -> Iterator[tuple[Door, int]]:
    door = Door(config, config.parallel.nodes, {2: 1, 3: 1}, rendezvous="10.0.0.1:5", defer=True)
    try:
        yield door, door.address[1]
    finally:
        door.close()


def enter(config: EngineConfig, rank: int, patience: float = 0.5) -> LinkReader:
    reader, welcome = come_in(config, rank, patience=patience, speaks=False, lost=lambda: None)
    assert (welcome.rendezvous, welcome.defer) == ("10.0.0.1:5", True)
    return reader


def arrivals(door: Door, count: int) -> list[Guest]:
    found: list[Guest] = []
    deadline = time.monotonic() + 5
    while len(found) < count:
        assert time.monotonic() < deadline
        found += door.arrivals()
        time.sleep(0.01)
    return found


def test_those_who_belong_come_in_and_get_every_message_in_order() -> None:
    rng = random.Random(2)
    messages = [rng.randbytes(size) for size in (0, 1, 5, 1 << 12, 3 << 20, 7)]
    with open_door(hosts(token="secret")) as (door, port):
        readers = [enter(hosts(port, "secret", 1), rank) for rank in (3, 2)]
        guests = arrivals(door, 2)
        assert {(guest.rank, guest.node, guest.host) for guest in guests} == {(2, 1, "127.0.0.1"), (3, 1, "127.0.0.1")}
        door.check()  # nobody is missing
        for guest, reader in zip(sorted(guests, key=lambda g: -g.rank), readers, strict=True):
            sender = threading.Thread(target=lambda link=guest.link: [link.send(message) for message in messages])
            sender.start()
            assert [reader.receive() for _ in messages] == messages
            sender.join()
            guest.link.close()
            assert reader.receive() is None
        with pytest.raises(EngineDead, match="has not answered at"):  # the door closes behind the last
            enter(hosts(port, "secret", 1), 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: hosts(c.parallel.nodes.port, "other", 1), "Its secret is not that of the first host"),
        (lambda c: hosts(c.parallel.nodes.port, "", 1), "Its secret is not that of the first host"),
        (
            lambda c: dataclasses.replace(c, enforce_eager=True),
            "Node 1 does not have the settings of the first host: --enforce-eager is True",
        ),
        (
            lambda c: dataclasses.replace(c, scheduler=dataclasses.replace(c.scheduler, max_num_seqs=3)),
            r"--max-num-seqs is 3 there and \d+ on the first host",
        ),
        (lambda c: dataclasses.replace(c, parallel=dataclasses.replace(c.parallel, tensor=4)), "--nnodes or the parallel sizes differ"),
    ],
)
def test_who_does_not_belong_is_told_why(change: Callable[[EngineConfig], EngineConfig], words: str) -> None:
    with open_door(hosts(token="secret")) as (door, port):
        with pytest.raises(ConfigError, match=words):
            enter(change(hosts(port, "secret", 1)), 2)
        assert door.arrivals() == []


def test_where_files_lie_may_differ() -> None:
    with open_door(hosts()) as (door, port):
        config = hosts(port, rank=1)
        enter(dataclasses.replace(config, model=dataclasses.replace(config.model, path="/elsewhere", name="other")), 2)
        assert len(arrivals(door, 1)) == 1


def test_a_rank_comes_once() -> None:
    with open_door(hosts()) as (door, port):
        enter(hosts(port, rank=1), 2)
        with pytest.raises(EngineDead, match="Rank 2 is here already"):
            enter(hosts(port, rank=1), 2)
        assert len(arrivals(door, 1)) == 1


def test_an_impostor_at_the_address_is_not_believed() -> None:
    with open_door(hosts(token="theirs")) as (_, port), pytest.raises(ConfigError, match="secret"):
        enter(hosts(port, "ours", 1), 2)

    # One that lets everybody in cannot prove that it has the secret.
    with pytest.MonkeyPatch.context() as patch, open_door(hosts(token="theirs")) as (door, port):
        patch.setattr(door, "_judge", lambda guest, nonce: None)
        with pytest.raises(ConfigError, match="does not have our secret"):
            enter(hosts(port, "ours", 1), 2)


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, framed(b"{}"), framed(b"\x00" * 1000), b"\x05\x00\x00\x00"]
)
def test_noise_at_the_door_changes_nothing(noise: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "KNOCK_SECONDS", 0.5)
    with open_door(hosts()) as (door, port), socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.sendall(noise)
        enter(hosts(port, rank=1), 2, patience=3)
        assert [guest.rank for guest in arrivals(door, 1)] == [2]
        sock.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):  # the greeting, then the end
                pass


def test_who_is_missing_is_named() -> None:
    with open_door(hosts(timeout=0.05)) as (door, port):
        time.sleep(0.1)
        with pytest.raises(ConfigError, match=rf"Node 1 \(ranks 2, 3\) did not come to 127.0.0.1:{port} within 0.05 s.*--node-rank 1"):
            door.check()


def test_a_port_in_use_is_said() -> None:
    with open_door(hosts()) as (_, port), pytest.raises(ConfigError, match=rf"--master-port {port} is in use already on 127.0.0.1"):
        Door(hosts(port), hosts(port).parallel.nodes, {2: 1}, rendezvous="", defer=False)


@pytest.mark.parametrize(
    ("address", "token", "words"),
    [
        ("8.8.8.8", "", "8.8.8.8 is not a private address"),
        ("8.8.8.8", "secret", "8.8.8.8 is not an address of this host"),
        ("0.0.0.0", "secret", "an address of the first host that the others reach"),
        ("no.such.host.invalid", "", "this name is not known here"),
    ],
)
def test_addresses_that_cannot_be(address: str, token: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        address_here(NodesConfig(2, 0, address, 29501, timeout=0.1, token=token))


def test_a_name_that_is_known_only_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known, left = socket.getaddrinfo, [3]

    def find(host: str, *more: object, **settings: object) -> object:
        left[0] -= 1
        if left[0]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1", *more, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    assert address_here(NodesConfig(2, 0, "octavo-0.octavo", 29501)) == "127.0.0.1"


def test_a_name_is_an_address() -> None:
    assert resolve_address(NodesConfig(2, 0, "localhost", 29501)) == "127.0.0.1"


def test_a_silent_rank_is_named_once_it_has_been_ready() -> None:
    with open_door(hosts()) as (door, port):
        reader = enter(hosts(port, rank=1), 2)
        (guest,) = arrivals(door, 1)
        rank = LinkedRank(guest)
        rank._heard -= SILENT_SECONDS + 1
        assert rank.silent() is None  # it may be loading
        reader.say(RankReady())
        deadline = time.monotonic() + 5
        while not rank.ready:
            assert time.monotonic() < deadline
            assert rank.read() is not None
        assert rank.silent() is None
        guest.link.send(b"plan")
        assert rank.trouble() == "rank 2 (node 1, 127.0.0.1) has not taken it"
        assert reader.receive() == b"plan"
        while rank.trouble() is not None:  # it tells so now and then
            assert time.monotonic() < deadline
            rank.read()
        rank._heard -= SILENT_SECONDS + 1
        assert "Rank 2 (node 1, 127.0.0.1) has not been heard of for 1" in str(rank.silent())


def test_a_rank_in_the_middle_of_a_step_learns_that_the_engine_is_gone(tmp_path: Path) -> None:
    gone = threading.Event()
    with open_door(hosts()) as (door, port):
        come_in(hosts(port, rank=1), 2, patience=1, speaks=False, lost=gone.set)  # nobody receives
        (guest,) = arrivals(door, 1)
        guest.link.close()
        assert gone.wait(5)


def test_frames_come_whole_however_they_are_cut() -> None:
    rng = random.Random(3)
    messages = [rng.randbytes(rng.randrange(50)) for _ in range(200)]
    data = b"".join(map(framed, messages))
    frames, got = FrameBuffer(), []
    while data:
        count = rng.randrange(1, 40)
        got += frames.feed(data[:count])
        data = data[count:]
    assert got == messages
