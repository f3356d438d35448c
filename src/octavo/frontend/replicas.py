"""`ReplicasClient`: several engines with the same model behind the interface of one. Each is supervised by a client of its own.

A request goes to one replica and stays there (`routing.py` says which); what is forked from it follows. While a replica restarts, its
requests wait for it, as they do with one engine, and new ones go to the others. When it is gone for good, they go on with the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence

import msgspec

from octavo.config.types import EngineConfig
from octavo.errors import EngineDead, OctavoError
from octavo.frontend.client import Progress, Sink, State
from octavo.frontend.process_client import ProcessClient
from octavo.frontend.replay import LiveRequest
from octavo.frontend.routing import PrefixRouter
from octavo.protocol.boot import DEFAULT_BUILDER
from octavo.protocol.engine import EngineReady, EngineStats, NewRequest, TokenDelta, Vocabulary

logger = logging.getLogger(__name__)

_SUMMED = tuple(f for f in EngineStats.__struct_fields__ if f not in ("step", "last_step_time"))


def make_client(config: EngineConfig, *, suspect_after: int = 2, builder: str = DEFAULT_BUILDER) -> ProcessClient | ReplicasClient:
    """The client for as many replicas as the configuration has."""
    clients = [ProcessClient(c, suspect_after=suspect_after, builder=builder) for c in replica_configs(config)]
    return clients[0] if len(clients) == 1 else ReplicasClient(clients)


def replica_configs(config: EngineConfig) -> list[EngineConfig]:
    """One a replica: the GPUs are dealt out in order, a CPU's threads evenly."""
    parallel, device = config.parallel, config.device
    threads = max(1, device.threads // parallel.data) if device.kind == "cpu" else device.threads
    return [
        dataclasses.replace(
            config,
            parallel=dataclasses.replace(parallel, replica=i, first_device=parallel.first_device + i * parallel.world),
            device=dataclasses.replace(device, threads=threads),
        )
        for i in range(parallel.data)
    ]


class ReplicasClient:
    """See the module. Implements `frontend.client.RemoteClient`, and what a main process needs besides."""

    def __init__(self, clients: Sequence[ProcessClient]) -> None:
        self._clients = list(clients)
        self._router = PrefixRouter(len(self._clients))
        self._home: dict[str, int] = {}
        """Live or held request -> replica."""
        self._seen_restarts = [0] * len(self._clients)
        self.on_stats: Callable[[EngineStats], None] | None = None
        for client in self._clients:
            client.on_stats = self._on_stats
            client.on_orphans = self._adopt

    @property
    def vocabulary(self) -> Callable[[], Vocabulary] | None:
        """What an engine must know of the tokens before its first constrained request."""
        return self._clients[0].vocabulary

    @vocabulary.setter
    def vocabulary(self, vocabulary: Callable[[], Vocabulary] | None) -> None:
        for client in self._clients:
            client.vocabulary = vocabulary

    # Start and stop

    def spawn(self) -> None:
        """Start the engine processes; `start` waits for them."""
        for client in self._clients:
            client.spawn()

    async def start(self, progress: Progress | None = None) -> EngineReady:
        """Wait until every replica can take requests. Progress is that of the first.

        Raises:
            OctavoError: one cannot start; the others are ended.
        """
        starts = [asyncio.ensure_future(client.start(progress if i == 0 else None)) for i, client in enumerate(self._clients)]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise
        return self.ready_report

    async def close(self) -> None:
        """End all engine processes; live requests fail."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def kill(self) -> None:
        """End processes that were only spawned."""
        for client in self._clients:
            client.kill()

    # Requests

    def add(self, request: NewRequest, sink: Sink, *, bounded: bool = True) -> None:
        """See `ProcessClient.add`."""
        self.check_alive()
        replica = self._home.get(request.parent_id) if request.parent_id else None
        if replica is None:
            replica = self._router.choose(request.prompt_token_ids, request.extra_key, allowed=self._able())
        following = _Following(sink, request.sampling.n, lambda: self._ended(request))
        self._clients[replica].add(request, following, bounded=bounded)
        self._settle(request, replica)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """See `ProcessClient.abort`."""
        replica = self._home.get(request_id)
        if replica is None:
            return
        self._clients[replica].abort(request_id, index)
        if not self._clients[replica].is_live(request_id):
            self._router.ended(replica, request_id)
            self._home.pop(request_id, None)

    def release(self, request_ids: list[str]) -> None:
        """See `ProcessClient.release`."""
        for replica, client in enumerate(self._clients):
            client.release([i for i in request_ids if self._home.get(i) == replica])
        for request_id in request_ids:
            self._home.pop(request_id, None)

    def _settle(self, request: NewRequest, replica: int) -> None:
        self._home[request.request_id] = replica
        self._router.began(replica, request.request_id, request.sampling.n)

    def _ended(self, request: NewRequest) -> None:
        if (replica := self._home.get(request.request_id)) is not None:
            self._router.ended(replica, request.request_id)
        if not request.hold:
            self._home.pop(request.request_id, None)

    def _adopt(self, orphans: list[LiveRequest], error: EngineDead) -> bool:
        """Requests of a replica that is gone for good go on with others; False if there are none."""
        able = self._able()
        if not able:
            return False
        left = sum(client.death is None for client in self._clients)
        logger.error("%d of %d replicas are left; %d requests go on there", left, len(self._clients), len(orphans))
        for orphan in orphans:
            request = orphan.request
            self._router.ended(self._home[request.request_id], request.request_id)
            replica = self._router.choose(request.prompt_token_ids, request.extra_key, allowed=able)
            self._settle(request, replica)
            self._clients[replica].take_over(orphan)
        return True

    def _able(self) -> set[int]:
        """Replicas that take requests now. What a restarted one had cached is forgotten here."""
        for replica, client in enumerate(self._clients):
            if client.restarts != self._seen_restarts[replica]:
                self._seen_restarts[replica] = client.restarts
                self._router.forget(replica)
        running = {i for i, client in enumerate(self._clients) if client.state == "running"}
        return running or {i for i, client in enumerate(self._clients) if client.death is None}

    # Health

    @property
    def state(self) -> State:
        """Running as long as one replica is."""
        states = [client.state for client in self._clients]
        order: tuple[State, ...] = ("running", "restarting", "starting", "closed", "dead")
        return "starting" if "starting" in states else next(state for state in order if state in states)

    @property
    def ready_report(self) -> EngineReady:
        """Of all replicas together that are left: sizes are summed, limits are the smallest."""
        reports = [client.ready_report for client in self._clients if client.death is None or self.death is not None]
        first, all_of_them = reports[0], len(self._clients)
        several = f"{len(reports)}{f' of {all_of_them}' if len(reports) < all_of_them else ''} replicas, each on {first.device}"
        return msgspec.structs.replace(
            first,
            num_blocks=sum(r.num_blocks for r in reports),
            max_num_seqs=sum(r.max_num_seqs for r in reports),
            max_model_len=min(r.max_model_len for r in reports),
            weights_bytes=sum(r.weights_bytes for r in reports),
            weights_kinds={name: nbytes * len(reports) for name, nbytes in first.weights_kinds.items()},
            cache_bytes=sum(r.cache_bytes for r in reports),
            activation_bytes=sum(r.activation_bytes for r in reports),
            device=several,
            warnings=list(dict.fromkeys(w for r in reports for w in r.warnings)),
        )

    @property
    def restarts(self) -> int:
        return sum(client.restarts for client in self._clients)

    @property
    def num_requests(self) -> int:
        return sum(client.num_requests for client in self._clients)

    def num_requests_of(self, replica: int) -> int:
        return self._clients[replica].num_requests

    @property
    def num_sequences(self) -> int:
        return sum(client.num_sequences for client in self._clients)

    @property
    def engine_pid(self) -> int | None:
        """Of the first replica."""
        return self._clients[0].engine_pid

    @property
    def engine_pids(self) -> list[int | None]:
        return [client.engine_pid for client in self._clients]

    @property
    def death(self) -> EngineDead | None:
        """Why there is no replica left, and there will be none."""
        deaths = [client.death for client in self._clients]
        return deaths[0] if all(d is not None for d in deaths) else None

    def check_alive(self) -> None:
        """Raises EngineDead when there is no replica and there will be none."""
        if (death := self.death) is not None:
            raise death
        if all(client.state == "closed" for client in self._clients):
            raise EngineDead("The engine has been shut down.")

    def stats(self) -> EngineStats:
        """Sums over the replicas."""
        snapshots = [client.stats() for client in self._clients]
        total = EngineStats(step=sum(s.step for s in snapshots), last_step_time=max(s.last_step_time for s in snapshots))
        for name in _SUMMED:
            setattr(total, name, sum(getattr(s, name) for s in snapshots))
        return total

    def last_step_age(self) -> float:
        """The longest that a replica with work has been without a finished step."""
        return max(client.last_step_age() for client in self._clients)

    async def ping(self) -> EngineStats:
        """A round trip through every replica that is there."""
        await asyncio.gather(*(self._clients[i].ping() for i in self._able()))
        return self.stats()

    async def reset_prefix_cache(self) -> bool:
        done = await asyncio.gather(*(client.reset_prefix_cache() for client in self._clients))
        for replica in range(len(self._clients)):
            self._router.forget(replica)
        return all(done)

    def _on_stats(self, _: EngineStats) -> None:
        if self.on_stats is not None:
            self.on_stats(self.stats())


class _Following:
    """A sink that notices when its request ends."""

    def __init__(self, sink: Sink, sequences: int, ended: Callable[[], None]) -> None:
        self._sink = sink
        self._left = sequences
        self._ended = ended

    @property
    def request_id(self) -> str:
        return self._sink.request_id

    def on_delta(self, delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            self._left -= 1
            if self._left == 0:
                self._ended()
        self._sink.on_delta(delta)

    def on_error(self, error: OctavoError) -> None:
        self._ended()
        self._sink.on_error(error)
