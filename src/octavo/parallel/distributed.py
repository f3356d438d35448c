"""Ranks in processes of their own: how they find each other, and `TensorGroup` over torch.distributed (NCCL on GPUs, Gloo on CPUs)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from octavo.errors import ConfigError

MEET_TIMEOUT = timedelta(seconds=300)
"""The last rank may still be importing or loading when the first is there."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other."""

    store: Store
    rank: int
    size: int


def open_meeting(size: int, *, host: str = "127.0.0.1", port: int = 0) -> tuple[Meeting, str]:
    """Rank 0's side, and the address for the others.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, timeout=MEET_TIMEOUT)
    except (RuntimeError, ValueError) as e:
        raise ConfigError(f"Ranks cannot meet at {host}:{port}: {str(e).splitlines()[0]}") from None
    return Meeting(store, 0, size), f"{host}:{store.port}"


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
    return Meeting(store, rank, size)


class DistributedGroup:
    """Implements `TensorGroup` among all ranks of a meeting.

    Args:
        device: of the tensors that are summed.
    """

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self.rank = meeting.rank
        self.size = meeting.size
        if "GLOO_SOCKET_IFNAME" not in os.environ and _here(meeting.store):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"  # host names need not resolve
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=meeting.store,
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=MEET_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorGroup.sum`."""
        dist.all_reduce(x)
        return x

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorGroup.side_by_side`."""
        rows, columns = x.shape
        gathered = torch.empty(self.size * rows, columns, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(gathered, x.contiguous())
        return gathered.view(self.size, rows, columns).transpose(0, 1).reshape(rows, -1)

    def smallest(self, number: int) -> int:
        """See `TensorGroup.smallest`."""
        least = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def close(self) -> None:
        """Leave. Nobody can sum with this rank any more."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _here(store: Store) -> bool:
    """Whether the ranks meet on this host."""
    host: str = getattr(store, "host", "")
    return host in ("127.0.0.1", "localhost", "::1")
