"""What a fleet is refused for, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.errors import ConfigError
from octavo.fleet.settings import FleetSettings, check_replica
from octavo.frontend.http.settings import ServerSettings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fleet_name": "a b"}, "--fleet-name must be"),
        ({"min_replicas": 0}, "--min-replicas must be at least 1"),
        ({"min_replicas": 3, "max_replicas": 2}, "--max-replicas 2 is less than --min-replicas 3"),
        ({"routers": 0}, "--routers must be at least 1"),
        ({"update_surge": 101}, "--update-surge must be between 0 and 100"),
        ({"target_requests": float("nan")}, "--target-requests must be more than 0"),
        ({"upscale_delay": -1.0}, "--upscale-delay must not be negative"),
        ({"drain_timeout": float("inf")}, "--drain-timeout must not be negative"),
        ({"proxies": "some"}, "--proxies must be one of every-host, head"),
        ({"delete": True, "status": True}, "not both"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FleetSettings(**given)


def test_without_a_most_there_is_no_autoscaling() -> None:
    assert FleetSettings(min_replicas=3).most_replicas == 3


@pytest.mark.parametrize(
    ("engine", "server", "words"),
    [
        ({"data_parallel_size": 2}, {}, "--min-replicas"),
        ({"nnodes": 2}, {}, "runs on one host"),
        ({"distributed_executor_backend": "ray"}, {}, "octavo serve"),
        ({}, {"uds": "/tmp/socket"}, "--uds: not in a fleet"),
        ({}, {"api_server_count": 2}, "--api-server-count: not in a fleet"),
        ({}, {"state_dir": "/tmp/state"}, "--state-dir: not in a fleet"),
        ({}, {"port": 0}, "needs a port of its own"),
    ],
)
def test_what_makes_no_sense_in_a_replica_is_refused(engine: dict[str, Any], server: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_replica(EngineArgs(**engine), ServerSettings(**server))


def test_what_serves_can_be_a_replica() -> None:
    check_replica(EngineArgs(tensor_parallel_size=2, distributed_executor_backend="mp"), ServerSettings(port=9000))
