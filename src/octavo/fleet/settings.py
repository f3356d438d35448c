"""`FleetSettings`: what `octavo deploy` adds to the settings of a server, in the same form."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from octavo.config.args import EngineArgs, setting
from octavo.errors import ConfigError
from octavo.frontend.http.settings import ServerSettings

PROXIES = ("every-host", "head")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class FleetSettings:
    """User settings of a fleet."""

    fleet_name: str = setting("octavo", "Name of the fleet in the cluster: deploying it again updates it.", group="fleet")
    delete: bool = setting(False, "End the fleet of this name, and do nothing else.", group="fleet")
    status: bool = setting(False, "Say how the fleet of this name is, and do nothing else.", group="fleet")
    min_replicas: int = setting(1, "Fewest replicas.", group="fleet")
    max_replicas: int | None = setting(None, "Most replicas. Default: --min-replicas, that is, no autoscaling.", group="fleet")
    target_requests: float = setting(
        32.0, "Requests that a replica should have under way: replicas are added above that, and taken away below.", group="fleet"
    )
    upscale_delay: float = setting(30.0, "Seconds that there has to be more work before a replica is added.", group="fleet")
    downscale_delay: float = setting(600.0, "Seconds that there has to be less work before a replica is taken away.", group="fleet")
    replica_cpus: float = setting(
        1.0, "CPU cores of the cluster that a replica takes besides its GPUs; on a CPU its --threads, if that is given.", group="fleet"
    )
    routers: int = setting(1, "Processes that route requests. Each remembers for itself which prompts went where.", group="fleet")
    proxies: str = setting(
        "every-host", "Hosts with an HTTP port: all that have a replica or router, or the head.", group="fleet", choices=PROXIES
    )
    update_surge: int = setting(
        0,
        "Percent of the replicas that an update starts before it ends old ones; it needs free GPUs. 0: old ones go first, one in five at a time.",
        group="fleet",
    )
    drain_timeout: float = setting(
        120.0, "Seconds that requests may take to finish on a replica that an update or less work ends.", group="fleet"
    )
    deploy_timeout: float = setting(900.0, "Seconds until the fleet has to be ready.", group="fleet")

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.fleet_name):
            raise ConfigError(f"--fleet-name must be up to 64 letters, digits, '.', '_' and '-', got {self.fleet_name!r}.")
        if self.min_replicas < 1:
            raise ConfigError(f"--min-replicas must be at least 1, got {self.min_replicas}.")
        if self.most_replicas < self.min_replicas:
            raise ConfigError(f"--max-replicas {self.max_replicas} is less than --min-replicas {self.min_replicas}.")
        if self.routers < 1:
            raise ConfigError(f"--routers must be at least 1, got {self.routers}.")
        if not 0 <= self.update_surge <= 100:
            raise ConfigError(f"--update-surge must be between 0 and 100, got {self.update_surge}.")
        for name in ("target_requests", "deploy_timeout"):
            if not (value := getattr(self, name)) > 0 or math.isinf(value):
                raise ConfigError(f"{_flag(name)} must be more than 0, got {value}.")
        for name in ("upscale_delay", "downscale_delay", "drain_timeout", "replica_cpus"):
            if not (value := getattr(self, name)) >= 0 or math.isinf(value):
                raise ConfigError(f"{_flag(name)} must not be negative, got {value}.")
        if self.proxies not in PROXIES:
            raise ConfigError(f"--proxies must be one of {', '.join(PROXIES)}, got {self.proxies!r}.")
        if self.delete and self.status:
            raise ConfigError("Give --delete or --status, not both.")

    @property
    def most_replicas(self) -> int:
        return self.min_replicas if self.max_replicas is None else self.max_replicas


def check_replica(args: EngineArgs, server: ServerSettings) -> None:
    """Whether a replica of a fleet can have these settings.

    Raises:
        ConfigError: one of them makes no sense there; says what to do instead.
    """
    if args.data_parallel_size != 1:
        raise ConfigError("--data-parallel-size: a fleet has --min-replicas and --max-replicas instead.")
    if args.nnodes != 1 or args.node_rank != 0:
        raise ConfigError("--nnodes: each replica of a fleet runs on one host. A model that needs several is served without a fleet.")
    if args.distributed_executor_backend == "ray":
        raise ConfigError(
            "--distributed-executor-backend ray: each replica of a fleet runs on one host. Use `octavo serve` for a model that needs several."
        )
    for flag, given in (
        ("--uds", server.uds is not None),
        ("--ssl-certfile", server.tls),
        ("--api-server-count", server.api_server_count != 1),
        ("--state-dir", server.state_dir is not None),
    ):
        if given:
            raise ConfigError(f"{flag}: not in a fleet. Its HTTP port is Ray Serve's: plain HTTP, to be put behind a load balancer.")
    if server.port == 0:
        raise ConfigError("--port 0: a fleet needs a port of its own; it is the same on all hosts.")
