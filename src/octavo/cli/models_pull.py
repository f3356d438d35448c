"""`octavo models pull [NAME]`: fetch a model; without a name the bundled one."""

from __future__ import annotations

from octavo.cli.parser import CommandParser, Namespace
from octavo.cli.progress import LoadingProgress


def configure(parser: CommandParser) -> None:
    parser.usage = "octavo models pull [NAME] [flags]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="A hub name, or nothing for the bundled model.")
    parser.add_argument("--revision", metavar="REV", help="Hub revision (branch, tag or commit).")
    parser.add_argument("--hf-token", dest="token", metavar="TOKEN", help="Token for private hub repositories.")


def run(options: Namespace) -> int:
    from octavo.checkpoint.catalog import pull

    with LoadingProgress() as progress:
        path = pull(
            getattr(options, "name", ""),
            revision=getattr(options, "revision", None),
            token=getattr(options, "token", None),
            progress=progress,
        )
    print(path)
    return 0
