"""`octavo serve`: the HTTP server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from octavo.cli.flags import add_engine_settings, add_settings, build, check_status, engine_args
from octavo.cli.parser import CommandParser, Namespace
from octavo.cli.progress import LoadingProgress

if TYPE_CHECKING:
    from octavo.config.args import EngineArgs
    from octavo.config.types import EngineConfig
    from octavo.frontend.http.settings import ServerSettings
    from octavo.protocol.engine import EngineReady


def configure(parser: CommandParser) -> None:
    from octavo.frontend.http.settings import ServerSettings

    add_settings(parser, ServerSettings)
    add_engine_settings(parser)


def run(options: Namespace) -> int:
    from octavo.frontend.http.settings import ServerSettings

    args = engine_args(options)
    settings = build(ServerSettings, environment_settings(options))
    check_status(settings)
    if args.node_rank > 0:
        return _node(args, settings)
    from octavo.cli.report import startup_report
    from octavo.frontend.http.server import serve

    with LoadingProgress() as progress:

        def report(ready: EngineReady, config: EngineConfig, settings: ServerSettings) -> None:
            progress.close()
            startup_report(ready, config, settings)

        serve(args, settings, report=report, progress=progress)
    return 0


def _node(args: EngineArgs, settings: ServerSettings) -> int:
    """A host other than the first: no server, only ranks."""
    from octavo.engine.node import run_node
    from octavo.frontend.launch import prepare_launch
    from octavo.observe.logs import configure_logging

    configure_logging(settings.log_format, settings.uvicorn_log_level, settings.log_config_file)
    with LoadingProgress() as progress:
        config = prepare_launch(args, progress).config
    run_node(config)
    return 0


def environment_settings(options: Namespace) -> Namespace:
    """`options`, with what the environment says where no flag was given."""
    key = os.environ.get("OCTAVO_API_KEY") or os.environ.get("VLLM_API_KEY")
    if key and not hasattr(options, "api_key"):
        options.api_key = [key]
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0") and not hasattr(options, "server_dev_mode"):
        options.server_dev_mode = True
    return options
