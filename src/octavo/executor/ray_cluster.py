"""Ranks on the hosts of a Ray cluster. Ray finds the places and starts the processes; plans travel over our own links (`door`).

Rank 0 stays in the engine's process, on this host: an actor that does nothing holds its place. When the engine ends, however it does, Ray
ends its actors, and with each the rank that it has started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from octavo.config.types import EngineConfig, NodesConfig
from octavo.errors import ConfigError, EngineDead, error_of
from octavo.executor.frames import FrameBuffer
from octavo.executor.rank_ends import describe_exit
from octavo.protocol.boot import start_process
from octavo.protocol.ranks import LinkPlace, RankBoot, RankFailed, decode_up

logger = logging.getLogger(__name__)

RAYS_NICENESS = 15
"""What Ray gives its workers, unless RAY_worker_niceness says otherwise where a host's `ray start` is."""
REMIND_SECONDS = 20.0
KNOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Seat:
    """What an actor says of its place."""

    host: str
    devices: tuple[str, ...]
    """GPUs that Ray gives it, as its environment variable names them."""


class RankHost:
    """The actor: on some host of the cluster, the parent of one rank's process."""

    def seat(self) -> Seat:
        import ray

        return Seat(socket.gethostname(), tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))))

    def run(self, config: EngineConfig, rank: int, module: str, patience: float, log_level: int) -> tuple[str, str]:
        """From the start of the rank to its end.

        Returns:
            (why it ended, kind of the OctavoError behind it); empty when it was told to.
        """
        read_status, write_status = os.pipe()
        place = LinkPlace(patience, False, write_status)
        boot = RankBoot(config=config, rank=rank, local_rank=0, place=place, from_main_thread=False, log_level=log_level)
        take_usual_priority()
        process = start_process(module, boot, (write_status,))
        os.close(write_status)
        said = b""
        while data := os.read(read_status, 1 << 16):
            said += data
        os.close(read_status)
        failed = [m for m in map(decode_up, FrameBuffer().feed(said)) if isinstance(m, RankFailed)]
        if failed:
            return failed[0].message, failed[0].kind
        ended = describe_exit(process)
        return ("" if process.returncode == 0 else ended), ""


class RayRanks:
    """Places for all ranks, held until `close`; then the ranks in them.

    Raises:
        ConfigError: there is no Ray, or not enough in its cluster.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._ray = connect("--distributed-executor-backend ray")
        self._config = config
        self._kind = "GPU" if config.device.kind == "cuda" else "CPU"
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        try:
            self._reserve()
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        from ray.util.placement_group import placement_group

        world, patience = self._config.parallel.world, self._config.parallel.nodes.timeout
        address = str(self._ray.util.get_node_ip_address())
        self._check_size(address)
        bundles: list[dict[str, float]] = [{self._kind: 1} for _ in range(world)]
        bundles[0][f"node:{address}"] = 0.001
        self._group = placement_group(bundles, strategy="PACK")
        ready, began, reminded = self._group.ready(), time.monotonic(), time.monotonic()
        while not self._ray.wait([ready], timeout=1.0)[0]:
            now = time.monotonic()
            if now - began > patience:
                raise ConfigError(
                    f"The Ray cluster did not give {world} {self._kind}s to this model within {patience:g} s, one of them on this host "
                    f"({address}). {self._inventory()} {self._free()} are free now."
                )
            if now - reminded > REMIND_SECONDS:
                reminded = now
                logger.info("Waiting for %d %ss of the Ray cluster, of which %s are free", world, self._kind, self._free())
        self._actors = [self._actor(index) for index in range(world)]
        seats: list[Seat] = self._ray.get([actor.seat.remote() for actor in self._actors], timeout=patience)
        logger.info("Ray has placed the ranks on %s", ", ".join(f"{i}: {seat.host}" for i, seat in enumerate(seats)))
        mine = _device_index(seats[0].devices)
        self.config = replace(self._config, parallel=replace(self._config.parallel, first_device=mine))
        """For rank 0."""
        self.nodes = NodesConfig(address=address, port=0, timeout=patience, token=secrets.token_hex(16))
        """Where the others come to."""

    def _actor(self, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        amounts = {"num_gpus": 1, "num_cpus": 0} if self._kind == "GPU" else {"num_cpus": 1}
        return self._ray.remote(RankHost).options(scheduling_strategy=strategy, max_restarts=0, **amounts).remote()

    def start(self, port: int, module: str) -> None:
        """Start the ranks but the first; they come to `port` of this host."""
        nodes = replace(self.nodes, port=port)
        config = replace(self._config, parallel=replace(self._config.parallel, nodes=nodes, first_device=0))
        level = logging.getLogger().getEffectiveLevel()
        self._runs = [
            self._actors[rank].run.remote(config, rank, module, nodes.timeout, level) for rank in range(1, self._config.parallel.world)
        ]

    def check(self) -> None:
        """Go no further if a rank has ended before it came.

        Raises:
            OctavoError: one has.
        """
        done, _ = self._ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        for run in done:
            rank = self._runs.index(run) + 1
            try:
                message, kind = self._ray.get(run)
            except Exception as e:
                raise EngineDead(f"Ray could not run rank {rank}: {str(e).strip().splitlines()[-1]}") from None
            raise error_of(kind, f"Rank {rank}: {message}") or EngineDead(f"Rank {rank} {message or 'has ended'}.")

    def abandon(self) -> None:
        """End the ranks, whatever they do. From any thread."""
        with contextlib.suppress(Exception):  # the cluster may be gone; then so are they
            for actor in self._actors:
                self._ray.kill(actor)

    def close(self) -> None:
        """Give the places back."""
        self.abandon()
        with contextlib.suppress(Exception):
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
        self._ray.shutdown()

    def _check_size(self, address: str) -> None:
        parallel = self._config.parallel
        hosts = hosts_with(self._ray, self._kind)
        total = sum(hosts.values())
        sizes = {"--tensor-parallel-size": parallel.tensor, "--pipeline-parallel-size": parallel.pipeline}
        flag = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        if total < parallel.world:
            raise ConfigError(f"{flag}: needs {parallel.world} {self._kind}s. {self._inventory()}")
        here = sum(count for host, count in hosts.items() if f"({address})" in host)
        if here < 1:
            raise ConfigError(
                f"{flag}: the first rank runs on this host ({address}), which gives the cluster no {self._kind}. {self._inventory()}"
            )

    def _inventory(self) -> str:
        return listed(hosts_with(self._ray, self._kind))

    def _free(self) -> int:
        return int(self._ray.available_resources().get(self._kind, 0))


def take_usual_priority() -> None:
    """For this process of Ray's and those that it starts, if it may (as root): Ray's workers give way to everything else on their host, as befits
    work that nobody waits for. A rank that did would hold up those of other hosts."""
    with contextlib.suppress(OSError, AttributeError):  # not allowed, or not on Linux
        if os.getpriority(os.PRIO_PROCESS, 0) == RAYS_NICENESS:
            for thread in os.listdir("/proc/self/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def hosts_with(ray: Any, kind: str) -> dict[str, int]:
    """Host -> how many of a kind (GPU, CPU) it gives to the cluster. Several Ray nodes on one host are told apart."""
    hosts: dict[str, int] = {}
    for node in ray.nodes():
        if node["Alive"]:
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            name = name if name not in hosts else f"{name} {node['NodeID'][:6]}"
            hosts[name] = int(node["Resources"].get(kind, 0))
    return hosts


def listed(hosts: dict[str, int]) -> str:
    """A sentence of `hosts_with`."""
    each = ", ".join(f"{host} has {count}" for host, count in hosts.items())
    return f"The Ray cluster has {sum(hosts.values())}: {each}."


def connect(who: str, *, start: bool = True, log_to_driver: bool = True) -> Any:
    """`ray`, connected: to the cluster that this host is in, else to one of this host alone.

    Args:
        who: wants it, for messages.
        start: start that one, if there is no cluster.
        log_to_driver: show here what processes of ours log on other hosts.

    Raises:
        ConfigError: it is not installed, or there is no cluster, or it does not answer.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(f"{who}: Ray is not installed. pip install 'octavo[ray]' on every host.") from None
    if ray.is_initialized():
        return ray
    _knock(os.environ.get("RAY_ADDRESS", ""))
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": log_to_driver}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError as e:
        if os.environ.get("RAY_ADDRESS"):
            raise ConfigError(
                f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: something listens there, but Ray cannot join it ({str(e).splitlines()[0]}). If it is a "
                "cluster that asks for a token, set RAY_AUTH_MODE=token, and bring its token in RAY_AUTH_TOKEN or ~/.ray/auth_token."
            ) from None
        if not start:
            raise ConfigError(
                f"{who}: this host is in no Ray cluster. Start one with `ray start --head`, or name one in RAY_ADDRESS (host:port)."
            ) from None
        logger.info("This host is in no Ray cluster: starting one of its own")
        ray.init(include_dashboard=False, **quiet)
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray brings its own
    return ray


def _knock(address: str) -> None:
    """Ray tries for minutes to reach an address where nobody is.

    Raises:
        ConfigError: nobody is.
    """
    if address.startswith("ray://"):
        raise ConfigError(f"RAY_ADDRESS={address}: run octavo on a host of the cluster, and give the address of its head, host:port.")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # auto, or none
    try:
        socket.create_connection((host, int(port)), KNOCK_SECONDS).close()
    except OSError as e:
        raise ConfigError(f"RAY_ADDRESS={address}: no Ray cluster answers there ({e.strerror or e}).") from None


def _device_index(devices: tuple[str, ...]) -> int:
    """Which of the GPUs that this process sees Ray means for it."""
    if not devices:
        return 0
    visible = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return visible.index(devices[0]) if devices[0] in visible else int(devices[0]) if devices[0].isdigit() else 0
