"""`octavo complete "text"`: continue one text, streaming it to stdout."""

from __future__ import annotations

import sys

from octavo.cli.flags import add_engine_settings
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.cli.sampling import add_sampling_flags, add_server_flags, sampling_options


def configure(parser: CommandParser) -> None:
    parser.usage = "octavo complete TEXT [flags]"
    parser.add_argument("text", nargs="?", metavar="TEXT", help="The text to continue; - or nothing reads stdin.")
    parser.add_argument("--echo", action="store_true", help="Print the text itself first.")
    add_sampling_flags(parser)
    add_server_flags(parser)
    add_engine_settings(parser, positional=False, skip=("seed",))


def run(options: Namespace) -> int:
    sampling = sampling_options(options)
    text = _text(options)
    from octavo.cli.backends import Loop, open_backend

    loop = Loop()
    try:
        backend = open_backend(loop, options)
        try:
            if getattr(options, "echo", False):
                sys.stdout.write(text)
            for piece in loop.iterate(lambda: backend.complete(text, sampling)):
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
        finally:
            loop.run(backend.close())
    finally:
        loop.stop()
    return 0


def _text(options: Namespace) -> str:
    given: str = getattr(options, "text", "-")
    if given == "-":
        if sys.stdin.isatty():
            raise UsageError('Give the text to continue: octavo complete "Once upon a time".')
        given = sys.stdin.read().removesuffix("\n")
    if not given:
        raise UsageError("The text to continue is empty.")
    return given
