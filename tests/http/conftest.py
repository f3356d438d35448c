from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_server import RunningServer, running_server
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def _shared_server(checkpoint: Path) -> Iterator[RunningServer]:
    with running_server(checkpoint) as server:
        yield server


@pytest.fixture
def server(_shared_server: RunningServer) -> RunningServer:
    """One server for all tests, with the default answer "hello world"."""
    _shared_server.fake.rules.clear()
    _shared_server.script("", "hello world")
    return _shared_server
