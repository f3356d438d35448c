"""The main process of a server with several API servers: start, signals and end. What goes on in between is `hub.py`'s."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import pickle
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config.args import EngineArgs
from octavo.config.scratch import remove_scratch, scratch_folder
from octavo.frontend.client import Progress
from octavo.frontend.http.api_servers.hub import ApiServerHub
from octavo.frontend.http.api_servers.load_board import LoadBoard
from octavo.frontend.http.api_servers.text_files import keep
from octavo.frontend.http.batches.store import DATABASE, BatchStore
from octavo.frontend.http.responses.store import ResponseStore
from octavo.frontend.http.settings import ServerSettings
from octavo.frontend.http.sse import cancel
from octavo.frontend.launch import Launch, prepare_launch
from octavo.frontend.process_client import ProcessClient
from octavo.frontend.replicas import ReplicasClient, make_client
from octavo.observe.throughput import log_throughput

if TYPE_CHECKING:
    from octavo.frontend.http.server import Report

logger = logging.getLogger("octavo.server")

LAST_WORDS = 2.0
"""Seconds for API servers to end their connections once there is no engine."""


class MainProcess:
    """Made by `main_process`."""

    def __init__(
        self,
        launch: Launch,
        settings: ServerSettings,
        sockets: Sequence[socket.socket],
        client: ProcessClient | ReplicasClient,
        hub: ApiServerHub,
        progress: Progress | None,
    ) -> None:
        self._launch = launch
        self._settings = settings
        self._sockets = sockets
        self._client = client
        self._hub = hub
        self._progress = progress

    async def run(self, report: Report) -> bool:
        """Serve until SIGTERM or SIGINT.

        Returns:
            whether Ctrl-C ended it before there was a server.

        Raises:
            OctavoError: the server cannot start, or cannot go on: its engine is gone for good, or API servers keep ending.
        """
        from octavo.frontend.http.server import Signals

        stop, stop_now = asyncio.Event(), asyncio.Event()
        signals = Signals(stop.set, stop_now.set, lambda: os._exit(1))
        with signals.installed():
            try:
                served = await self._serve(stop, stop_now, report)
                return not served and signals.first == signal.SIGINT
            finally:
                await self._hub.close()
                await self._client.close()

    async def _serve(self, stop: asyncio.Event, stop_now: asyncio.Event, report: Report) -> bool:
        """Whether it came to that."""
        from octavo.frontend.http.server import death_of, server_url

        hub, settings = self._hub, self._settings
        stopping = asyncio.ensure_future(stop.wait())
        insisting = asyncio.ensure_future(stop_now.wait())
        starting = asyncio.ensure_future(hub.start(self._client.start(self._progress)))
        reporter = failing = dying = None
        try:
            begun: set[asyncio.Future[Any]] = {starting, stopping}
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return False
            starting.result()
            ready, config = self._client.ready_report, self._launch.config
            if ready.max_model_len != config.model.max_model_len:  # `auto` took what fits
                config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=ready.max_model_len))
            report(ready, config, settings)
            logger.info("Listening on %s with %d API servers", server_url(settings, self._sockets[0]), len(self._sockets))
            reporter = asyncio.ensure_future(log_throughput(self._client.stats, settings.log_stats_interval))
            failing = asyncio.ensure_future(hub.wait_failed())
            dying = asyncio.ensure_future(death_of(self._client))
            watched: set[asyncio.Future[Any]] = {failing, dying, stopping}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                failing.result()
            await self._drain(insisting)
            if dying.done():
                raise dying.result()
            return True
        finally:
            await cancel(starting, stopping, insisting, *(task for task in (reporter, failing, dying) if task is not None))

    async def _drain(self, insisting: asyncio.Future[Any]) -> None:
        """Let requests finish until shutdown_timeout or the second signal; then fail the rest."""
        for sock in self._sockets:
            sock.close()  # connections that come now are refused, not kept waiting
        hub, timeout = self._hub, self._settings.shutdown_timeout
        if live := hub.num_requests:
            logger.info("Stopping: %d requests have %.0f s to finish (once more to stop now).", live, timeout)
        hub.drain()
        ending = asyncio.ensure_future(hub.wait_ended())
        waiting: set[asyncio.Future[Any]] = {ending, insisting}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=timeout)
        if not ending.done():
            logger.info("Stopping now: %d requests are ended.", hub.num_requests)
            hub.drain()
            await asyncio.wait({ending}, timeout=LAST_WORDS)
        await cancel(ending)


@contextlib.contextmanager
def main_process(
    args: EngineArgs, settings: ServerSettings, sockets: Sequence[socket.socket], progress: Progress | None
) -> Iterator[MainProcess]:
    """Finds the model and starts to load: the engine, and the API servers beside it.

    Raises:
        OctavoError: the model cannot be found or a setting cannot work.
    """
    launch = prepare_launch(args, progress)
    with contextlib.ExitStack() as stack:
        folder = scratch_folder()
        stack.callback(remove_scratch, folder)
        if settings.state_dir is None:
            settings = dataclasses.replace(settings, state_dir=str(folder / "state"))
            (folder / "state").mkdir(mode=0o700)
        _prepare_stores(folder, settings)
        shared = folder / "shared.pickle"
        shared.write_bytes(pickle.dumps((keep(launch, folder / "tokenizer"), settings)))
        board = LoadBoard.create(len(sockets))
        stack.callback(board.close)
        client = make_client(launch.config)
        hub = ApiServerHub(
            client,
            board,
            [sock.fileno() for sock in sockets],
            str(shared),
            str(folder / "responses.db"),
            launch.config.reliability.hang_timeout,
        )
        try:
            client.spawn()
            hub.spawn()
            yield MainProcess(launch, settings, sockets, client, hub, progress)
        finally:
            hub.kill()
            client.kill()


def _prepare_stores(folder: Path, settings: ServerSettings) -> None:
    """Make the tables that API servers share, and clear away what a crash has left, before there is more than one of them."""
    path = folder / "responses.db"
    ResponseStore(str(path), ttl=settings.response_store_ttl, max_bytes=settings.response_store_bytes).close()
    path.chmod(0o600)
    assert settings.state_dir is not None
    if (Path(settings.state_dir) / DATABASE).exists():
        BatchStore(Path(settings.state_dir), max_bytes=settings.file_store_bytes).close()
