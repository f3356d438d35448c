"""`deploy`: starts a fleet in a Ray cluster, or updates the one of that name, and waits until it is ready. The fleet outlives this process.

Ray Serve keeps the number of replicas, starts them anew when they end, and updates them some at a time; requests under way on an old one are
waited for. Which replica a request goes to is our own affair (`router.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from octavo.config.args import EngineArgs
from octavo.errors import ConfigError, EngineDead
from octavo.executor.ray_cluster import connect, hosts_with, listed
from octavo.fleet.ingress import FleetIngress
from octavo.fleet.replica import FAILURE_MARK, ModelReplica
from octavo.fleet.settings import FleetSettings, check_replica
from octavo.frontend.http.settings import ServerSettings

logger = logging.getLogger(__name__)

MAX_ONGOING = 10_000
"""Requests that a replica takes: more than an engine lets wait, so that it is the engine that says when it is enough (429)."""
MAX_INGRESS = 100_000
POLL_SECONDS = 0.25
GOING_SECONDS = 15.0
REMIND_SECONDS = 20.0
REPLICA, INGRESS = "replica", "router"
"""Names of the two deployments in Ray Serve."""


@dataclass(frozen=True)
class Fleet:
    """What was deployed."""

    name: str
    url: str
    replicas: int
    most_replicas: int


@dataclass(frozen=True)
class Condition:
    """How a fleet is."""

    state: str
    """Ray Serve's word: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY, DELETING."""
    message: str
    parts: dict[str, str]
    """Deployment -> its state and how many of its processes are in which state."""
    healthy: bool
    running: int
    """Replicas that take requests."""


def deploy(args: EngineArgs, server: ServerSettings, fleet: FleetSettings, *, say: Callable[[str], None] = logger.info) -> Fleet:
    """Start or update a fleet, and wait until it is ready.

    Args:
        say: told how it goes.

    Raises:
        ConfigError: it cannot be: a setting, no cluster, a cluster too small.
        EngineDead: it did not become ready; what was new is taken away.
    """
    check_replica(args, server)
    ray = _connected()
    from ray import serve
    from ray.serve.exceptions import RayServeException

    args, resources = _placed(ray, args, fleet)
    before = condition(fleet.fleet_name)
    route = "/" + server.root_path.strip("/")
    _start_serve(server, fleet)
    app = _application(args, server, fleet, resources)
    try:
        serve.run_many(
            [serve.RunTarget(app, name=fleet.fleet_name, route_prefix=route)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    except (RayServeException, ValueError) as e:
        words = _last_line(str(e)).rpartition("Exception: ")[2]
        hint = " Give this one another --root-path." if "refix" in words else ""
        raise ConfigError(f"Ray Serve does not take the fleet {fleet.fleet_name}: {words}{hint}") from None
    say(
        f"{'Updating' if before else 'Starting'} the fleet {fleet.fleet_name}: {counted(fleet.min_replicas)} of {args.model or 'the bundled model'}"
    )
    ready = _wait(fleet, before, say)
    return Fleet(fleet.fleet_name, _url(server, route), ready.running, fleet.most_replicas)


def delete(fleet: FleetSettings) -> None:
    """End a fleet; requests under way get `drain_timeout` of when it was deployed.

    Raises:
        ConfigError: there is none of that name.
    """
    _connected()
    from ray import serve

    if condition(fleet.fleet_name) is None:
        raise ConfigError(f"There is no fleet {fleet.fleet_name!r} in this cluster. {_others()}")
    serve.delete(fleet.fleet_name)


def describe(fleet: FleetSettings) -> Condition:
    """How a fleet is now.

    Raises:
        ConfigError: there is none of that name.
    """
    _connected()
    found = condition(fleet.fleet_name)
    if found is None:
        raise ConfigError(f"There is no fleet {fleet.fleet_name!r} in this cluster. {_others()}")
    return found


def condition(name: str) -> Condition | None:
    """How the fleet of this name is; None if there is none."""
    from ray import serve

    app = serve.status().applications.get(name)
    if app is None or app.status.value == "NOT_STARTED":
        return None
    parts = {}
    for deployment, status in app.deployments.items():
        counts = ", ".join(f"{n} {_word(state)}" for state, n in status.replica_states.items() if n)
        why = f": {_reason(status.message)}" if status.message else ""
        parts[deployment] = f"{_word(status.status)}{f' ({counts})' if counts else ''}{why}"
    replicas = app.deployments.get(REPLICA)
    running = sum(n for state, n in replicas.replica_states.items() if _word(state) == "running") if replicas else 0
    healthy = app.status.value == "RUNNING" and all(_word(d.status) == "healthy" for d in app.deployments.values())
    messages = " ".join([app.message, *(d.message for d in app.deployments.values())])
    return Condition(app.status.value, messages, parts, healthy, running)


def counted(replicas: int) -> str:
    return f"{replicas} replica{'' if replicas == 1 else 's'}"


def _connected() -> Any:
    """
    Raises:
        ConfigError: Ray Serve is not installed, or there is no cluster.
    """
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # what concerns the user is said by us
    try:
        import ray.serve
    except ImportError:
        raise ConfigError("Ray Serve is not installed. pip install 'octavo[deploy]' on every host of the cluster.") from None
    ray = connect("octavo deploy", start=False, log_to_driver=False)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return ray


def _placed(ray: Any, args: EngineArgs, fleet: FleetSettings) -> tuple[EngineArgs, dict[str, float]]:
    """The settings of a replica, and what it takes of the cluster.

    Raises:
        ConfigError: no host has room for one, or all together not for the fewest.
    """
    gpus = hosts_with(ray, "GPU")
    on_gpus = sum(gpus.values()) > 0 if args.device in (None, "auto") else args.device != "cpu"
    if os.path.exists(args.model):  # a replica's folder is another one; the name stays what was typed
        args = dataclasses.replace(args, model=os.path.abspath(args.model), served_model_name=args.served_model_name or [args.model])
    if on_gpus:
        each, kind, hosts = args.tensor_parallel_size * args.pipeline_parallel_size, "GPU", gpus
        resources = {"num_gpus": float(each), "num_cpus": fleet.replica_cpus}
    else:
        each, kind, hosts = max(1, int(args.threads or fleet.replica_cpus)), "CPU", hosts_with(ray, "CPU")
        resources = {"num_cpus": float(args.threads or fleet.replica_cpus)}
        args = dataclasses.replace(args, threads=each)
    room = sum(count // each for count in hosts.values())
    if room < fleet.min_replicas:
        raise ConfigError(
            f"--min-replicas {fleet.min_replicas}: each takes {each} {kind}{'s' if each > 1 else ''} of one host, and there is room for "
            f"{room}. {listed(hosts)}"
        )
    if room < fleet.most_replicas:
        logger.warning("--max-replicas %d: as it is now, the cluster has room for %d. %s", fleet.most_replicas, room, listed(hosts))
    return dataclasses.replace(args, device="cuda" if on_gpus else "cpu"), resources


def _start_serve(server: ServerSettings, fleet: FleetSettings) -> None:
    """
    Raises:
        ConfigError: Ray Serve runs already, on another port, and serves something.
    """
    from ray import serve
    from ray.serve.context import _get_global_client

    location = "EveryNode" if fleet.proxies == "every-host" else "HeadOnly"
    for _ in range(2):
        serve.start(proxy_location=location, http_options={"host": server.host or "0.0.0.0", "port": server.port})
        port = cast(Any, _get_global_client()).http_config.port
        if port == server.port:
            return
        if _serves_something():
            break
        serve.shutdown()  # type: ignore[no-untyped-call]  # what an earlier fleet has left
    names = ", ".join(sorted(serve.status().applications))
    raise ConfigError(
        f"--port {server.port}: Ray Serve runs in this cluster already, on port {port}, for {names}. Give that one, or end what it serves (`octavo deploy --delete --fleet-name NAME`)."
    )


def _serves_something() -> bool:
    """Not counted is what goes, if it has gone soon."""
    from ray import serve

    deadline = time.monotonic() + GOING_SECONDS
    while (apps := serve.status().applications.values()) and all(app.status.value == "DELETING" for app in apps):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    return bool(apps)


def _application(args: EngineArgs, server: ServerSettings, fleet: FleetSettings, resources: dict[str, float]) -> Any:
    from ray import serve

    scaling: dict[str, Any] = {"num_replicas": fleet.min_replicas}
    if fleet.most_replicas > fleet.min_replicas:
        window = max(5.0, min(30.0, fleet.upscale_delay))
        scaling = {
            "autoscaling_config": {
                "min_replicas": fleet.min_replicas,
                "max_replicas": fleet.most_replicas,
                "target_ongoing_requests": fleet.target_requests,
                "upscale_delay_s": fleet.upscale_delay,
                "downscale_delay_s": fleet.downscale_delay,
                "look_back_period_s": window,
                "metrics_interval_s": window / 2,
            }
        }
    replica = serve.deployment(
        name=REPLICA,
        ray_actor_options=resources,
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=fleet.drain_timeout,
        health_check_period_s=5.0,
        max_constructor_retry_count=1,
        max_surge_percent=fleet.update_surge,
        request_router_config={
            "request_router_class": "octavo.fleet.router:PrefixRequestRouter",
            "request_router_kwargs": {"several": fleet.routers > 1},
        },
        **scaling,
    )(ModelReplica)
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=fleet.routers,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_INGRESS,
        graceful_shutdown_timeout_s=fleet.drain_timeout,
        max_surge_percent=100,  # it takes nothing of the cluster, and without it requests would wait
    )(FleetIngress)
    return ingress.bind(replica.bind(args, server), server.max_body_bytes)


def _wait(fleet: FleetSettings, before: Condition | None, say: Callable[[str], None]) -> Condition:
    """Until the fleet is ready. From when Ray Serve has taken new settings until all replicas have them, it says DEPLOYING."""
    began = reminded = time.monotonic()
    while True:
        time.sleep(POLL_SECONDS)
        now = condition(fleet.fleet_name)
        if now is None:
            continue
        late = time.monotonic() - began > fleet.deploy_timeout
        if now.healthy and now.running >= fleet.min_replicas:
            return now
        if now.state in ("DEPLOY_FAILED", "UNHEALTHY") or late:
            why = f"was not ready within {fleet.deploy_timeout:g} s" if late else "did not start"
            raise EngineDead(
                f"The fleet {fleet.fleet_name} {why}: {_reason(now.message) or '; '.join(now.parts.values())} {_undo(fleet, before)}"
            )
        if time.monotonic() - reminded > REMIND_SECONDS:
            reminded = time.monotonic()
            say("; ".join(f"{part}: {state}" for part, state in now.parts.items()))


def _undo(fleet: FleetSettings, before: Condition | None) -> str:
    """Take away what never worked. A fleet that did is left: those of its replicas that were not replaced yet go on."""
    if before is not None:
        return "Replicas that the update had not come to go on as they were; deploy the fleet again with settings that work."
    from ray import serve

    serve.delete(fleet.fleet_name, _blocking=False)
    return "It has been taken away again."


def _reason(message: str) -> str:
    """Of what Ray says, the part for the user: our own words if there are any."""
    if found := re.search(re.escape(FAILURE_MARK) + r"(.+)", message):
        return found.group(1).strip()
    return _last_line(message)


def _others() -> str:
    from ray import serve

    names = sorted(serve.status().applications)
    return f"There are: {', '.join(names)}." if names else "It has none."


def _url(server: ServerSettings, route: str) -> str:
    from ray import util

    host = server.host if server.host not in (None, "", "0.0.0.0", "::") else util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return f"http://{f'[{host}]' if ':' in str(host) else host}:{server.port}{route.rstrip('/')}"


def _word(state: Any) -> str:
    return str(getattr(state, "value", state)).lower()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""
