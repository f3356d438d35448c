"""The engine's end of a connection to a rank on another host: how it tells that the rank is gone."""

from __future__ import annotations

import select
import socket

import pytest

from octavo.executor.door import Guest
from octavo.executor.link import LinkWriter
from octavo.executor.rank_ends import LinkedRank


@pytest.mark.parametrize("unread", [False, True])
def test_a_rank_that_ends_is_named_alike_whether_it_had_read_everything_or_not(unread: bool) -> None:
    """With something unread, its kernel resets the connection instead of closing it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    with near:
        rank = LinkedRank(Guest(1, 1, "10.0.0.2", LinkWriter(near)))
        if unread:
            rank.link.send(b"a plan")
            select.select([far], [], [], 5)
        far.close()
        select.select([near], [], [], 5)
        assert rank.read() is None
        assert rank.farewell() == "Rank 1 (node 1, 10.0.0.2) has ended, or its host has."
