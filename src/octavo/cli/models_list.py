"""`octavo models list`: the models on this machine."""

from __future__ import annotations

from octavo.cli.parser import CommandParser, Namespace
from octavo.config.sizes import format_bytes


def configure(parser: CommandParser) -> None:
    pass


def run(options: Namespace) -> int:
    from octavo.checkpoint.catalog import list_models

    models = list_models()
    width = max((len(m.name) for m in models), default=0)
    for m in models:
        where = m.path if m.present else "not here yet: octavo models pull"
        print(f"{m.name:<{width}}  {m.source:<7}  {format_bytes(m.size):>9}  {where}")
    return 0
