"""An API server of several: the HTTP application in a process of its own, with the engine behind the main process.

Started by `hub.py` as `python -m octavo.frontend.http.api_servers.process`. SIGTERM (or the main process) lets requests finish and
ends it; when the main process dies, so does this one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pickle
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import OctavoError
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.http.api_servers.boot import ApiServerBoot
from octavo.frontend.http.api_servers.client import RelayedClient
from octavo.frontend.http.api_servers.text_files import TextFiles
from octavo.frontend.http.server import Signals, Uvicorn, loop_factory, serve_until, uvicorn_config
from octavo.frontend.http.settings import ServerSettings
from octavo.frontend.launch import Launch, open_tokenizer
from octavo.observe.logs import configure_logging
from octavo.protocol.api_server import CannotServe, Serving
from octavo.protocol.boot import die_with_parent

if TYPE_CHECKING:
    from octavo.frontend.http.context import ServerContext

logger = logging.getLogger("octavo.server")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the main process decides
    boot: ApiServerBoot = pickle.load(sys.stdin.buffer)
    die_with_parent(boot.from_main_thread)
    texts, settings = _shared(boot)
    configure_logging(settings.log_format, settings.uvicorn_log_level, settings.log_config_file)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_run(boot, texts, settings))


def _shared(boot: ApiServerBoot) -> tuple[TextFiles, ServerSettings]:
    texts: TextFiles
    settings: ServerSettings
    texts, settings = pickle.loads(Path(boot.shared).read_bytes())
    # The main process has the lines about the engine.
    return texts, dataclasses.replace(settings, log_stats_interval=0.0)


async def _run(boot: ApiServerBoot, texts: TextFiles, settings: ServerSettings) -> None:
    client = RelayedClient(boot, texts.launch.config)
    try:
        await _serve(boot, client, texts.launch, settings)
    except OctavoError as e:
        client.send(CannotServe(texts.told(str(e)), type(e).__name__))
    except Exception as e:
        logger.exception("API server %d failed", boot.number)
        client.send(CannotServe(f"{type(e).__name__}: {e}"))
    finally:
        await client.close()


async def _serve(boot: ApiServerBoot, client: RelayedClient, launch: Launch, settings: ServerSettings) -> None:
    stop, stop_now = asyncio.Event(), asyncio.Event()
    steps = Signals(stop.set, stop_now.set, lambda: os._exit(1))
    client.on_drain = steps
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, steps)
    llm = AsyncLLM(launch, open_tokenizer(launch), client)
    waiting = asyncio.ensure_future(llm.wait_ready(shows_warnings=True))
    from octavo.frontend.http.app import build_app  # takes a while: the engine loads meanwhile
    from octavo.frontend.http.conversation import log_notes

    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not waiting.done():
        waiting.cancel()
        return
    app = build_app(
        llm,
        settings,
        served_model_names=launch.args.served_model_name,
        peers=client,
        responses_path=boot.responses_path,
        number=boot.number,
    )
    context: ServerContext = app.state.context
    context.responses.fail_running("The API server that made this response has ended.")
    server = Uvicorn(uvicorn_config(app, settings))
    if boot.number == 0 and not (launch.args.skip_tokenizer_init or llm.ready_report.embedding_size):
        log_notes(llm.tokenizer.templates, settings, llm.default_sampling_params)  # one for all
    context.batches.start()
    announcing = asyncio.ensure_future(_announce(server, client))
    try:
        with socket.socket(fileno=boot.listen_fd) as sock:
            await serve_until(stop, stop_now, server, sock, context, announce=False)
    finally:
        announcing.cancel()
        await context.close()


async def _announce(server: Uvicorn, client: RelayedClient) -> None:
    while not server.started:
        await asyncio.sleep(0.005)
    client.send(Serving())


if __name__ == "__main__":
    main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all that is ours is closed; threads of libraries must not hold up the end
