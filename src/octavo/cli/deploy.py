"""`octavo deploy`: a fleet of servers in a Ray cluster."""

from __future__ import annotations

import sys

from octavo.cli.flags import add_engine_settings, add_settings, build, check_status, engine_args
from octavo.cli.parser import CommandParser, Namespace
from octavo.cli.serve import environment_settings


def configure(parser: CommandParser) -> None:
    from octavo.fleet.settings import FleetSettings
    from octavo.frontend.http.settings import ServerSettings

    add_settings(parser, FleetSettings)
    add_settings(parser, ServerSettings)
    add_engine_settings(parser)


def run(options: Namespace) -> int:
    from octavo.fleet.settings import FleetSettings
    from octavo.frontend.http.settings import ServerSettings

    fleet = build(FleetSettings, options)
    args = engine_args(options)
    settings = build(ServerSettings, environment_settings(options))
    check_status(settings)
    check_status(args)
    from octavo.fleet.deploy import counted, delete, deploy, describe

    if fleet.delete:
        delete(fleet)
        print(f"The fleet {fleet.fleet_name} has ended.")
        return 0
    if fleet.status:
        now = describe(fleet)
        print(f"{fleet.fleet_name}: {now.state.lower()}")
        for part, state in now.parts.items():
            print(f"  {part}: {state}")
        return 0 if now.healthy else 1
    try:
        made = deploy(args, settings, fleet, say=_say)
    except KeyboardInterrupt:
        _say(
            f"Nobody waits any more. What the cluster has begun goes on; `octavo deploy --delete --fleet-name {fleet.fleet_name}` ends it."
        )
        raise
    most = "" if made.replicas == made.most_replicas else f" (up to {made.most_replicas})"
    print(f"The fleet {made.name} is ready: {counted(made.replicas)}{most} at {made.url}")
    print(f"`octavo deploy --status --fleet-name {made.name}` says how it is, --delete ends it; deploying it again updates it.")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
