"""What the main process hands an API server at birth, pickled through its standard input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ApiServerBoot:
    """Small, because the parent does not wait until it is read: what is large is in the file `shared`."""

    number: int
    """0 to count - 1. A server that takes the place of one that ended has its number."""
    count: int
    shared: str
    """File with a pickled (TextFiles, ServerSettings)."""
    inbox: str
    outbox: str
    listen_fd: int
    board_fd: int
    responses_path: str
    """Database of kept responses."""
    ready: bool
    """The engine has started already: this one replaces another."""
    from_main_thread: bool
