from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running_server
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a key, as its clients meet it; it answers "hello world"."""
    folder: Path = write_tiny_checkpoint(tmp_path_factory.mktemp("clients"))
    with running_server(folder, ServerSettings(api_key=["secret"])) as server:
        server.script("", "hello world", delay=0.002)
        yield server
