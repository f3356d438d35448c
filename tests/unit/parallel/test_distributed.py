"""Where ranks meet: on the address that was said, and over an interface that is there."""

from __future__ import annotations

import socket

import pytest

from octavo.errors import ConfigError
from octavo.parallel.distributed import gloo_interface, join_meeting, open_meeting


def test_a_meeting_listens_on_its_address_alone() -> None:
    meeting, address = open_meeting(2, host="127.0.0.1")
    port = int(address.rpartition(":")[2])
    joined = join_meeting(address, 1, 2)
    joined.store.set("said", "heard")
    assert meeting.store.get("said") == b"heard"
    assert (meeting.here, joined.here) == ("127.0.0.1", "127.0.0.1")
    with socket.socket() as sock:
        sock.settimeout(2)
        assert sock.connect_ex(("127.0.0.2", port)) != 0  # any other address of this host


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="Ranks cannot meet at"):
            open_meeting(2, port=taken.getsockname()[1])


def test_the_interface_is_that_of_the_address_or_the_one_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    loopback = gloo_interface("127.0.0.1")
    assert loopback in ("lo", "lo0")
    assert gloo_interface("203.0.113.7") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback)
    assert gloo_interface("203.0.113.7") == loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=eth99: this host has no interface eth99, but lo"):
        gloo_interface("127.0.0.1")
