"""`octavo serve`: the HTTP server."""

from __future__ import annotations

import os

from octavo.cli.flags import add_engine_settings, add_settings, build, engine_args
from octavo.cli.parser import CommandParser, Namespace


def configure(parser: CommandParser) -> None:
    from octavo.frontend.http.settings import ServerSettings

    add_settings(parser, ServerSettings)
    add_engine_settings(parser)


def run(options: Namespace) -> int:
    from octavo.frontend.http.settings import ServerSettings

    if "api_key" not in options:
        key = os.environ.get("OCTAVO_API_KEY") or os.environ.get("VLLM_API_KEY")
        if key:
            options.api_key = [key]
    args, settings = engine_args(options), build(ServerSettings, options)
    from octavo.frontend.http.server import serve

    return serve(args, settings) or 0
