"""`serve`: the process behind `octavo serve`. Owns the listening socket, signals, start and shutdown order.

The socket is bound before the engine loads, so that a port in use is an error at once; connections made while the engine
loads wait in the backlog. The first SIGTERM or Ctrl-C stops accepting and lets running requests finish for a bounded time,
the second one ends at once. The engine process dies with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import importlib
import logging
import os
import resource
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import uvicorn

from octavo.config.args import EngineArgs
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError, EngineDead
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.client import Progress
from octavo.frontend.http.batches.store import claim_folder, default_folder
from octavo.frontend.http.connection import connection_class
from octavo.frontend.http.settings import ServerSettings
from octavo.frontend.http.sse import cancel
from octavo.observe.logs import AccessFilter, configure_logging
from octavo.observe.throughput import log_throughput
from octavo.protocol.engine import EngineReady

if TYPE_CHECKING:
    from octavo.frontend.http.context import ServerContext

logger = logging.getLogger("octavo.server")

Report = Callable[[EngineReady, EngineConfig, ServerSettings], None]
"""Shows what was started."""

MAX_OPEN_FILES = 65536
LAST_WORDS = 1.0
"""Seconds for error replies to reach clients whose requests are ended."""
LAST_ANSWERS = 2.0
"""Seconds that a server without an engine still answers, so that clients and health checks (503) hear why, before it ends."""
WATCH_INTERVAL = 0.1
ENGINE_STOP_TIMEOUT = 10.0
"""Seconds the engine process gets to end by itself; it is killed with this process anyway."""


def serve(args: EngineArgs, settings: ServerSettings, *, report: Report | None = None, progress: Progress | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Returns after a clean shutdown.

    A server whose engine is gone for good ends as well: whoever supervises it can start another one, which may have more luck.

    Args:
        report: shows the start-up report; default `octavo.cli.report.startup_report`, else one log line.
        progress: called with (phase, done, total) while the model is fetched and loaded.

    Raises:
        OctavoError: the server cannot start, or its engine is gone for good (EngineDead); the message is for the user.
        KeyboardInterrupt: Ctrl-C before it could serve.
    """
    configure_logging(settings.log_format, settings.uvicorn_log_level, settings.log_config_file)
    if args.disable_log_stats:
        settings = dataclasses.replace(settings, log_stats_interval=0.0)
    _allow_many_connections()
    report = report or _default_report(settings.log_format)
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(bound_sockets(settings))
        settings = stack.enter_context(state_folder(settings))
        runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
        if not settings.uds:
            settings = dataclasses.replace(settings, port=sockets[0].getsockname()[1])
        # Before the loop runs: this may download a model, and Ctrl-C must work meanwhile.
        if len(sockets) > 1:
            from octavo.frontend.http.api_servers.main import main_process

            main = stack.enter_context(main_process(args, settings, sockets, progress))
            interrupted = runner.run(main.run(report))
        else:
            llm = AsyncLLM.from_engine_args(args, progress=progress)
            interrupted = runner.run(_main(llm, settings, sockets[0], report, progress))
    if interrupted:
        raise KeyboardInterrupt


def _allow_many_connections() -> None:
    """Every connection is an open file, and the usual limit of 1024 is meant for programs that do not know better."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def bound_socket(settings: ServerSettings) -> Iterator[socket.socket]:
    """The listening socket: bound, and already queueing connections.

    Raises:
        ConfigError: the address cannot be used.
    """
    with bound_sockets(dataclasses.replace(settings, api_server_count=1)) as sockets:
        yield sockets[0]


@contextlib.contextmanager
def bound_sockets(settings: ServerSettings) -> Iterator[list[socket.socket]]:
    """A listening socket for each API server: one port, between whose sockets the kernel divides connections; one Unix socket for all.

    Raises:
        ConfigError: the address cannot be used.
    """
    count = settings.api_server_count
    with contextlib.ExitStack() as stack:
        if settings.uds:
            first = stack.enter_context(_bind_uds(settings.uds))
            sockets = [first, *(stack.enter_context(first.dup()) for _ in range(count - 1))]
        else:
            sockets = [stack.enter_context(_bind_tcp(settings.host, settings.port, settings.client_timeout))]
            if count > 1:
                # The first one was bound alone, so that another program on the port was an error.
                port = sockets.pop().getsockname()[1]
                stack.pop_all().close()
                for _ in range(count):
                    sockets.append(stack.enter_context(_bind_tcp(settings.host, port, settings.client_timeout, shared=True)))
        try:
            for sock in sockets:
                sock.listen(2048)
                sock.setblocking(False)
            yield sockets
        finally:
            if settings.uds:
                with contextlib.suppress(OSError):
                    os.unlink(settings.uds)


@contextlib.contextmanager
def state_folder(settings: ServerSettings) -> Iterator[ServerSettings]:
    """`settings` with the folder of files and batches, ours alone. None (a temporary one) when the default cannot be used.

    Raises:
        ConfigError: the folder that the user chose cannot be used.
    """
    with contextlib.ExitStack() as stack:
        folder = settings.state_dir
        if folder is not None:
            stack.enter_context(claim_folder(Path(folder)))
        elif settings.port and not settings.uds:
            try:
                stack.enter_context(claim_folder(default_folder(settings.port)))
                folder = str(default_folder(settings.port))
            except ConfigError as e:
                logger.warning("%s Files and batches will not outlast this server.", e)
        yield dataclasses.replace(settings, state_dir=folder)


def _bind_tcp(host: str | None, port: int, client_timeout: float, *, shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Inherited by connections. uvloop asks for it on each, asyncio does not; without it the kernel holds a token back until the
    # client has acknowledged the one before, which clients put off for 40 ms.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if client_timeout > 0 and hasattr(socket, "TCP_USER_TIMEOUT"):
        # Inherited too: a client that takes nothing of what we have sent for so long is gone.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(client_timeout * 1000)))
    try:
        sock.bind((host or "", port))
    except (OSError, UnicodeError) as e:
        sock.close()
        where = f"{host or '0.0.0.0'}:{port}"
        if getattr(e, "errno", None) == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} is already in use ({where}). Stop the other program or choose another --port.") from None
        if getattr(e, "errno", None) == errno.EACCES:
            raise ConfigError(f"Not allowed to listen on {where}. Ports below 1024 need root: choose another --port.") from None
        raise ConfigError(f"Cannot listen on {where}: {e}. Check --host and --port.") from None
    return sock


def _bind_uds(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(f"--uds {path}: there is a file of that name that is not a socket.")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"--uds {path}: another server listens there.")
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o666)
    except OSError as e:
        sock.close()
        raise ConfigError(f"Cannot listen on --uds {path}: {e.strerror or e}.") from None
    except ConfigError:
        sock.close()
        raise
    return sock


def server_url(settings: ServerSettings, sock: socket.socket) -> str:
    """Where a user on this machine reaches the server."""
    if settings.uds:
        return f"unix:{settings.uds}"
    host = settings.host or "localhost"
    host = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{'https' if settings.tls else 'http'}://{host}:{sock.getsockname()[1]}{settings.root_path}"


class Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling: `Signals` decides."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Signals:
    """SIGINT and SIGTERM as steps: the first signal takes the first step, and so on; the last step repeats."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        self._steps = list(steps)
        self.first: signal.Signals | None = None
        """Of those that came since they were installed."""

    def __call__(self, number: signal.Signals | None = None) -> None:
        self.first = self.first or number
        step = self._steps[0]
        if len(self._steps) > 1:
            del self._steps[0]
        step()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for s in signals:
            loop.add_signal_handler(s, self, s)
        try:
            yield
        finally:
            for s in signals:
                loop.remove_signal_handler(s)


async def _main(llm: AsyncLLM, settings: ServerSettings, sock: socket.socket, report: Report, progress: Progress | None) -> bool:
    """Whether Ctrl-C ended it before there was a server."""
    stop, stop_now = asyncio.Event(), asyncio.Event()
    signals = Signals(stop.set, stop_now.set, lambda: os._exit(1))
    with signals.installed():
        try:
            # Only now: the engine loads while this process imports the web framework.
            from octavo.frontend.http.app import build_app
            from octavo.frontend.http.conversation import log_notes

            if not await _ready_before(stop, llm, progress):
                return signals.first == signal.SIGINT
            app = build_app(llm, settings, served_model_names=llm.args.served_model_name)
            server = Uvicorn(uvicorn_config(app, settings))
            report(llm.ready_report, llm.config, settings)
            if not (llm.args.skip_tokenizer_init or llm.ready_report.embedding_size):
                log_notes(llm.tokenizer.templates, settings, llm.default_sampling_params)
            logger.info("Listening on %s", server_url(settings, sock))
            context: ServerContext = app.state.context
            context.batches.start()
            dying = asyncio.ensure_future(death_of(llm))
            dying.add_done_callback(lambda _: stop.set())
            try:
                await serve_until(stop, stop_now, server, sock, context)
                if dying.done():
                    raise dying.result()
            finally:
                await cancel(dying)
                await context.close()
        finally:
            await _end(llm)
    return False


class Mortal(Protocol):
    """Something with an engine."""

    @property
    def death(self) -> EngineDead | None: ...


async def death_of(engine: Mortal) -> EngineDead:
    """Returns once there has been no engine for `LAST_ANSWERS`, and there will be none."""
    while (death := engine.death) is None:
        await asyncio.sleep(WATCH_INTERVAL)
    logger.error("Without an engine the server ends. Until then it answers 503.")
    await asyncio.sleep(LAST_ANSWERS)
    return death


async def serve_until(
    stop: asyncio.Event, stop_now: asyncio.Event, server: Uvicorn, sock: socket.socket, context: ServerContext, *, announce: bool = True
) -> None:
    """Serves until `stop`; then lets requests finish until shutdown_timeout or `stop_now`; then fails the rest and returns.

    Args:
        announce: say in the log how the stopping goes; off where another process says it for all.
    """
    llm, settings = context.llm, context.settings
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    reporter = asyncio.ensure_future(log_throughput(llm.stats, settings.log_stats_interval))
    stopping, insisting = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(stop_now.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await context.batches.stop()
        if announce and (live := llm.live_requests()):
            logger.info("Stopping: %d requests have %.0f s to finish (once more to stop now).", live, settings.shutdown_timeout)
        await asyncio.wait({serving, insisting}, return_when=asyncio.FIRST_COMPLETED, timeout=settings.shutdown_timeout)
        if not serving.done():
            # Without an engine every stream ends with an error that says so, and its connection closes.
            if announce:
                logger.info("Stopping now: %d requests are ended.", llm.live_requests())
            await _end(llm)
            await asyncio.wait({serving}, timeout=LAST_WORDS)
        if serving.done():
            serving.result()
    finally:
        await cancel(serving, reporter, stopping, insisting)


async def _ready_before(stop: asyncio.Event, llm: AsyncLLM, progress: Progress | None) -> bool:
    """Waits for the engine. False: asked to stop first."""
    starting = asyncio.ensure_future(llm.wait_ready(progress, shows_warnings=True))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return starting.done()
    finally:
        await cancel(starting, stopping)


async def _end(llm: AsyncLLM) -> None:
    try:
        await asyncio.wait_for(llm.shutdown(), ENGINE_STOP_TIMEOUT)
    except TimeoutError:
        logger.warning("The engine did not end within %.0f s; it is killed.", ENGINE_STOP_TIMEOUT)


def uvicorn_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    quiet = AccessFilter(settings.disable_access_log_for_endpoints or ())
    logging.getLogger("uvicorn.access").filters = [quiet]
    try:
        config = uvicorn.Config(
            app,
            http=connection_class(settings.client_timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=not settings.disable_uvicorn_access_log,
            server_header=False,
            timeout_keep_alive=settings.timeout_keep_alive,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=settings.ssl_cert_reqs,
        )
        config.load()
    except (ssl.SSLError, OSError) as e:
        raise ConfigError(f"The TLS files cannot be used: {e}.") from None
    return config


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return cast("Callable[[], asyncio.AbstractEventLoop]", uvloop.new_event_loop)


def _default_report(log_format: str) -> Report:
    if log_format == "json":
        return _log_report  # a table would not be JSON lines
    # By name: the command line sits above the frontend and must not become an import of it.
    try:
        report: Report = importlib.import_module("octavo.cli.report").startup_report
    except (ImportError, AttributeError):
        return _log_report
    return report


def _log_report(ready: EngineReady, config: EngineConfig, _settings: ServerSettings) -> None:
    fields = {
        "device": ready.device,
        "dtype": ready.dtype,
        "kv_tokens": ready.num_blocks * ready.block_size,
        "max_model_len": ready.max_model_len,
        "max_num_seqs": ready.max_num_seqs,
        "seconds": round(sum(p.seconds for p in ready.phases), 2),
    }
    logger.info("%s is loaded", config.model.name, extra=fields)
