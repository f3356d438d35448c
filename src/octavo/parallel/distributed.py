"""Ranks in processes of their own: how they find each other, and what they do together over torch.distributed (NCCL on GPUs, Gloo on
CPUs), or over the memory of a GPU that they share."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup, Store, TCPStore  # type: ignore[attr-defined]

from octavo.config.types import ParallelConfig
from octavo.errors import ConfigError
from octavo.parallel.group import Rows
from octavo.parallel.shared_gpu import SharedGpu
from octavo.parallel.small_sums import TEST_SECONDS, SmallSums, Verdict, off, try_out, what_fails
from octavo.parallel.symmetric import SymmetricSums, catch_up
from octavo.protocol.boot import NO_MULTICAST

if TYPE_CHECKING:
    from octavo.parallel.fused_sums import FusedSums

logger = logging.getLogger(__name__)

MEET_TIMEOUT = timedelta(seconds=300)
"""The last rank may still be importing or loading when the first is there."""
MEET_PAUSE = 0.02
NO_WARNINGS = {"TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false"}
"""That what is sent in a group waits for what was sent before: in that of all ranks, stages send in order and nobody does anything else."""

_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other."""

    store: Store
    rank: int
    size: int
    here: str
    """This host's address among those of the ranks."""

    def wait_for_everybody(self, check: Callable[[], None]) -> None:
        """Until all ranks have come as far as this.

        Args:
            check: called while some are missing; what it raises ends the wait. What follows waits for everybody without asking.
        """
        self.store.add("here", 1)
        while self.store.add("here", 0) < self.size:
            check()
            time.sleep(MEET_PAUSE)


def open_meeting(size: int, *, host: str = "127.0.0.1", port: int = 0) -> tuple[Meeting, str]:
    """Rank 0's side, and the address for the others.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    # The store would listen on every interface, whatever its name says: it gets a socket that does not.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, port))
        listener.listen(128)
        port = listener.getsockname()[1]
        store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, timeout=MEET_TIMEOUT, master_listen_fd=listener.detach())
    except (RuntimeError, ValueError, OSError) as e:
        listener.close()
        raise ConfigError(f"Ranks cannot meet at {host}:{port}: {str(e).splitlines()[0]}") from None
    return Meeting(store, 0, size, host), f"{host}:{port}"


def join_meeting(address: str, rank: int, size: int) -> Meeting:
    """Another rank's side.

    Raises:
        ConfigError: nobody listens at the address.
    """
    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(host, int(port), size, is_master=False, timeout=MEET_TIMEOUT)
    except RuntimeError as e:
        raise ConfigError(f"Rank {rank} finds nobody at {address}: {str(e).splitlines()[0]}") from None
    return Meeting(store, rank, size, _address_towards(host, int(port)))


def _address_towards(host: str, port: int) -> str:
    """This host's own address on the way to another one's."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))  # sends nothing
        return str(sock.getsockname()[0])


def gloo_interface(here: str) -> str | None:
    """The interface that has an address of this host, which Gloo is told to use: host names need not resolve, or not to it.

    Raises:
        ConfigError: the user has named an interface that is not there.
    """
    import psutil

    interfaces = psutil.net_if_addrs()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is None:
        return next((name for name, addresses in interfaces.items() if any(a.address == here for a in addresses)), None)
    for name in chosen.split(","):
        if name not in interfaces:
            raise ConfigError(f"GLOO_SOCKET_IFNAME={chosen}: this host has no interface {name}, but {', '.join(interfaces)}.")
    return chosen


@contextlib.contextmanager
def _gloo_over(interface: str | None) -> Iterator[None]:
    """Gloo's choice while groups are made. Not for longer: this process may meet others elsewhere later."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


class Carrier(Protocol):
    """Takes tensors of any size between the ranks of a group. They all call for the same things in the same order."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def patience(self) -> float:
        """Seconds that quicker ways may take for their tests."""

    def sum(self, x: torch.Tensor) -> None:
        """Contiguous x becomes the sum of all ranks' x, the same bits on each."""

    def gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Fill `out` with all ranks' x, one behind the other. Both are contiguous."""

    def send(self, x: torch.Tensor, to: int) -> None:
        """Hand contiguous x to a rank, which receives it."""

    def receive(self, out: torch.Tensor, sender: int) -> None: ...

    def abandon(self) -> None:
        """From any thread: nothing on this rank's device waits for the others any more."""

    def close(self) -> None:
        """Before the group ends."""


class Library:
    """NCCL or Gloo, through torch.distributed. Implements `Carrier`."""

    name = "NCCL"
    patience = TEST_SECONDS

    def __init__(self, group: ProcessGroup | None, *, on_gpu: bool = False) -> None:
        self._group = group
        self._on_gpu = on_gpu

    def sum(self, x: torch.Tensor) -> None:
        """See `Carrier.sum`."""
        dist.all_reduce(x, group=self._group)

    def gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Carrier.gather`."""
        _gather(out, x, group=self._group)

    def send(self, x: torch.Tensor, to: int) -> None:
        """See `Carrier.send`."""
        dist.send(x, to, group=self._group)

    def receive(self, out: torch.Tensor, sender: int) -> None:
        """See `Carrier.receive`."""
        dist.recv(out, sender, group=self._group)

    def abandon(self) -> None:
        """See `Carrier.abandon`. Gloo needs no word: it sees connections end."""
        if self._on_gpu and self._group is not None:
            with contextlib.suppress(Exception):  # one that is broken already
                self._group.abort()

    def close(self) -> None:
        """See `Carrier.close`."""


class World:
    """This process's place among all ranks of an engine, and the groups that follow from it.

    Rank 0, which the engine talks to, is in the last stage: that one samples. The ranks of a stage are neighbours.
    """

    def __init__(self, meeting: Meeting, parallel: ParallelConfig, device: torch.device, rows: Rows | None = None) -> None:
        """
        Args:
            device: of the tensors that are passed around.
            rows: what is added up and then normed, if anything is.
        """
        tensor, rank, size = parallel.tensor, meeting.rank, meeting.size
        self._on_gpu = on_gpu = device.type == "cuda"
        shared = on_gpu and parallel.shared_gpus > 0
        if on_gpu:
            os.environ.update(NO_MULTICAST | NO_WARNINGS)  # who started this process may not have
            torch.cuda.set_device(device)
        with _gloo_over(gloo_interface(meeting.here)):
            _number_groups(meeting)
            dist.init_process_group(
                ("cpu:gloo" if shared else "cpu:gloo,cuda:nccl") if on_gpu else "gloo",
                store=meeting.store,
                rank=rank,
                world_size=size,
                timeout=MEET_TIMEOUT,
                device_id=device if on_gpu and not shared else None,
            )
            # Every rank has to call for every group.
            groups = [dist.new_group(list(range(first, first + tensor))) for first in range(0, size, tensor)]
            if on_gpu:
                catch_up(self.smallest, lambda: [dist.new_group([one], backend="gloo") for one in range(size)][rank], device)
        group, everybody = groups[rank // tensor], dist.group.WORLD
        assert everybody is not None
        between: Carrier = SharedGpu(everybody, device) if shared else Library(everybody, on_gpu=on_gpu)
        within: Carrier = SharedGpu(group, device) if shared and tensor > 1 else Library(group, on_gpu=on_gpu and not shared)
        self._carriers = (within, between)
        verdict, fused = _small_sums(group, within, rank, parallel, device, rows)
        self.sums = verdict.words
        """How small sums go, for people; empty where there is no choice."""
        if self.sums:
            logger.info("Sums over %d GPUs: %s", tensor, self.sums)
        self.tensor = DistributedGroup(within, rank % tensor, tensor, small=verdict.small, fused=fused)
        stage = parallel.pipeline - 1 - rank // tensor
        self.pipeline = DistributedPipeline(between, stage, parallel.pipeline, before=rank + tensor, behind=rank - tensor)

    @staticmethod
    def smallest(number: int) -> int:
        """See `Ranks.smallest`."""
        least = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def abandon(self) -> None:
        """See `Ranks.abandon`."""
        self.tensor.abandon()
        for carrier in self._carriers:
            carrier.abandon()

    def close(self) -> None:
        """Leave the others."""
        if self._on_gpu:
            with contextlib.suppress(RuntimeError):  # a device that is lost anyway
                torch.cuda.synchronize()  # what still waits is let go of until then
        self.tensor.close()
        for carrier in self._carriers:
            carrier.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _number_groups(meeting: Meeting) -> None:
    """Have torch give the groups that are made next numbers that it has given to none before.

    It begins anew when all groups are gone, but remembers by its number which group shares memory: that of an engine that this process
    has had before, if rank 0 is in the user's.
    """
    if meeting.rank == 0:
        meeting.store.set("groups", str(secrets.randbits(40)))
    numbers: Any = dist.distributed_c10d._world
    numbers.group_count = int(meeting.store.get("groups"))


def _small_sums(
    group: ProcessGroup, carrier: Carrier, rank: int, parallel: ParallelConfig, device: torch.device, rows: Rows | None
) -> tuple[Verdict, FusedSums | None]:
    """How the ranks of a layer add up what is small, and what is normed then. Every rank of the group calls it.

    Args:
        carrier: of the group; adds up the rest.
        rank: among all.
    """
    if device.type != "cuda" or parallel.tensor == 1:
        return Verdict(None, ""), None
    if not parallel.small_sums:
        return off("turned off by --disable-custom-all-reduce or --batch-invariant", carrier.name), None

    def reference(x: torch.Tensor) -> torch.Tensor:
        carrier.sum(x)
        return x

    def smallest(number: int) -> int:
        least = torch.tensor(number, dtype=torch.int64)  # on the CPU: it must not wait for the GPU
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        return int(least)

    size = parallel.tensor
    sums = SymmetricSums(group, rank % size, size, device, reference=reference, smallest=smallest, otherwise=carrier.name)
    verdict = try_out(sums, smallest, seconds=carrier.patience, otherwise=carrier.name)
    if verdict.small is None or rows is None:
        return verdict, None
    from octavo.parallel.fused_sums import FusedSums  # Triton, which is not everywhere

    fused = FusedSums(group, rank % size, size, device, rows, reference=reference, first=rank // size * size)
    why = what_fails(fused, smallest, carrier.patience)
    words = f"{verdict.words}; {fused.described if why is None else f'norms in kernels of their own: {why}'}"
    return Verdict(verdict.small, words), fused if why is None else None


class DistributedGroup:
    """Implements `TensorGroup`.

    Args:
        small: adds up what it takes; all else, or everything, goes through the carrier.
        fused: adds up and norms what it takes.
    """

    def __init__(self, carrier: Carrier, rank: int, size: int, *, small: SmallSums | None = None, fused: FusedSums | None = None) -> None:
        self.rank = rank
        self.size = size
        self._carrier = carrier
        self._small = small
        self._fused = fused

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorGroup.sum`."""
        if self.size == 1:
            return x
        if self._small is not None and (total := self._small.sum(x)) is not None:
            return total
        self._carrier.sum(x)
        return x

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `TensorGroup.add_norm`."""
        return None if self._fused is None else self._fused.add_norm(x, residual, weight, eps)

    def check(self) -> None:
        """See `Ranks.check`."""
        if self._fused is not None:
            self._fused.check()

    def abandon(self) -> None:
        """From any thread: no sum that does not go through the carrier waits for the others any more."""
        if self._fused is not None:
            self._fused.abandon()
        if self._small is not None:
            self._small.abandon()

    def close(self) -> None:
        """After the last sum."""
        if self._fused is not None:
            self._fused.close()
        if self._small is not None:
            self._small.close()

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorGroup.side_by_side`."""
        rows, columns = x.shape
        gathered = torch.empty(self.size * rows, columns, dtype=x.dtype, device=x.device)
        self._carrier.gather(gathered, x.contiguous())
        return gathered.view(self.size, rows, columns).transpose(0, 1).reshape(rows, -1)


class DistributedPipeline:
    """Implements `Pipeline`.

    Args:
        carrier: of all ranks.
        before, behind: the ranks with the neighbouring layers, where there are any.
    """

    def __init__(self, carrier: Carrier, stage: int, stages: int, *, before: int, behind: int) -> None:
        self.stage = stage
        self.stages = stages
        self._carrier = carrier
        self._before = before
        self._behind = behind

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """See `Pipeline.receive`."""
        self._carrier.receive(out, self._before)
        return out

    def send(self, x: torch.Tensor) -> None:
        """See `Pipeline.send`."""
        self._carrier.send(x.contiguous(), self._behind)
