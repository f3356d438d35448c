"""Puts an engine together: worker, executor, core. The only module that knows all three."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.config.types import EngineConfig
from octavo.errors import ConfigError
from octavo.protocol.engine import EngineReady

if TYPE_CHECKING:
    from octavo.core.loop import EngineCore
    from octavo.core.pooling import PoolingCore
    from octavo.executor.base import Executor
    from octavo.executor.inline import Rank
    from octavo.parallel.distributed import Meeting
    from octavo.parallel.group import Ranks
    from octavo.protocol.ranks import RankBoot

Progress = Callable[[str, int, int], None]
"""(phase, done, total), called while the engine loads."""


RANK_MODULE = "octavo.engine.rank"
"""What the process of a rank runs."""

Lost = Callable[[str, str], None]
"""(message, kind of OctavoError)"""


def nothing_to_do(message: str, kind: str) -> None:
    """For callers whose next step fails, which is enough."""


def nothing() -> None:
    """For what has nothing to release."""


def no_progress(phase: str, done: int, total: int) -> None:
    """For callers with nothing to draw."""


def build_server_engine(
    config: EngineConfig, progress: Progress = no_progress, lost: Lost = nothing_to_do
) -> tuple[EngineCore | PoolingCore, EngineReady]:
    """`build_engine`, ready sooner: what is left to prepare is done in gaps, by a loop that calls `EngineCore.prepare`."""
    return build_engine(config, progress, lost, defer=True)


def build_engine(
    config: EngineConfig, progress: Progress = no_progress, lost: Lost = nothing_to_do, *, defer: bool = False
) -> tuple[EngineCore | PoolingCore, EngineReady]:
    """A loaded engine, ready for requests, and what it reports about itself. Takes as long as loading the model takes.

    Args:
        lost: called from some thread when a rank in another process is gone; steps fail from then on, or never end.
        defer: leave for `EngineCore.prepare` what can wait.

    Raises:
        OctavoError: the model cannot be loaded or does not fit.
    """
    if config.model.pooling is not None and config.reliability.scripted_model is None:
        from octavo.core.pooling import PoolingCore
        from octavo.worker.pooling import PoolingWorker

        pooling = PoolingWorker(config, progress)
        return PoolingCore(config, pooling), pooling.ready_report

    from octavo.core.loop import EngineCore
    from octavo.executor.inline import InlineExecutor

    executor: Executor
    if config.reliability.scripted_model is not None:
        # No torch: a scripted server starts in a fraction of a second.
        from octavo.worker.scripted import ScriptedWorker

        executor = InlineExecutor(lambda: ScriptedWorker(config, progress))
    elif config.parallel.world > 1:
        executor = _ranks(config, progress, lost, defer)
    else:
        executor = InlineExecutor(lambda: _one_rank(config, progress, defer))
    try:
        return EngineCore(config, executor), executor.ready_report
    except BaseException:
        executor.shutdown()
        raise


def _one_rank(config: EngineConfig, progress: Progress, defer: bool) -> Rank:
    """The worker of a model on one device: where that can be, one that does without torch."""
    from octavo.worker.compiled_worker import compiled_worker

    if (compiled := compiled_worker(config, progress)) is not None:
        return compiled
    from octavo.worker.worker import Worker

    return Worker(config, progress, defer_graphs=defer)


def _ranks(config: EngineConfig, progress: Progress, lost: Lost, defer: bool) -> Executor:
    """One process a rank; this one is the first."""
    from octavo.executor.door import Door, address_here
    from octavo.executor.ranks import RanksExecutor
    from octavo.models.loader import check_divisible
    from octavo.parallel.distributed import open_meeting
    from octavo.worker.worker import Worker

    parallel = config.parallel
    if parallel.nodes.rank > 0:
        raise ConfigError(f"--node-rank {parallel.nodes.rank}: only the first host takes requests. Run `octavo serve` on the others.")
    check_divisible(config)
    if parallel.executor == "ray":
        from octavo.executor.ray_cluster import RayRanks

        cluster: RayRanks | None = RayRanks(config)
    else:
        cluster = None
    ours, nodes = (config, parallel.nodes) if cluster is None else (cluster.config, cluster.nodes)
    first_far = 1 if cluster is not None else parallel.per_node
    try:
        meeting, address = open_meeting(parallel.world, host=address_here(nodes))
        far = {rank: parallel.node_of(rank) for rank in range(first_far, parallel.world)}
        door = Door(config, nodes, far, rendezvous=address, defer=defer) if far else None
        if cluster is not None and door is not None:
            cluster.start(door.address[1], RANK_MODULE)
    except BaseException:
        if cluster is not None:
            cluster.close()
        raise

    met: list[Ranks] = []

    def abandon() -> None:
        """Also while the first rank loads, which it does together with the others."""
        if cluster is not None:
            cluster.abandon()
        for ranks in met:
            ranks.abandon()

    def first(check: Callable[[], None]) -> Worker:
        def check_all() -> None:
            check()
            if cluster is not None:
                cluster.check()

        meeting.wait_for_everybody(check_all)
        ranks = _together(meeting, ours, 0)
        met.append(ranks)
        try:
            return Worker(ours, progress, defer_graphs=defer, ranks=ranks)
        except BaseException:
            ranks.close()  # this process may try again
            raise

    return RanksExecutor(
        config,
        first,
        rendezvous=address,
        module=RANK_MODULE,
        local=range(1, first_far),
        door=door,
        abandon=abandon,
        release=nothing if cluster is None else cluster.close,
        lost=lost,
        defer=defer,
    )


def join(boot: RankBoot, rendezvous: str) -> Ranks:
    """The place of a rank that another process has started."""
    from octavo.parallel.distributed import join_meeting

    meeting = join_meeting(rendezvous, boot.rank, boot.config.parallel.world)
    meeting.wait_for_everybody(lambda: None)  # the engine ends us if somebody does not come
    return _together(meeting, boot.config, boot.local_rank)


def _together(meeting: Meeting, config: EngineConfig, local_rank: int) -> Ranks:
    from octavo.models.loader import normed_rows
    from octavo.parallel.distributed import World
    from octavo.parallel.group import Ranks

    device = Ranks(local_rank=local_rank).device(config.device.kind, config.parallel)
    world = World(meeting, config.parallel, device, normed_rows(config))
    return Ranks(
        world.tensor,
        world.pipeline,
        world.smallest,
        meeting.rank,
        local_rank,
        world.sums,
        check=world.tensor.check,
        abandon=world.abandon,
        close=world.close,
    )
