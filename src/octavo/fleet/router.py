"""`PrefixRequestRouter`: Ray Serve asks it where a call goes. It answers as `octavo serve` does with several replicas
(`frontend/routing.py`), for replicas that come and go.

Work is counted from the choice on, not from when a replica has accepted it: requests that come together must not all see an idle replica.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from octavo.fleet.call import KEY_CHUNK, Call
from octavo.frontend.routing import PrefixRouter


class PrefixRequestRouter(RequestRouter):
    """See the module. Used from the one loop in which Ray Serve routes."""

    def initialize_state(self, *, several: bool = False, **_: Any) -> None:
        """Ray Serve calls this before it tells of replicas.

        Args:
            several: there are other routers, who know nothing of what this one knows.
        """
        self._prefixes = PrefixRouter(0, chunk=KEY_CHUNK, names=[] if several else None)
        self._numbers: dict[ReplicaID, int] = {}
        self._free: list[int] = []
        """Numbers of replicas that are gone."""
        self._placed: dict[str, int] = {}
        """Call under way -> the number of its replica."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray Serve tells which replicas take requests now."""
        here = {replica.replica_id for replica in replicas}
        for gone in self._numbers.keys() - here:
            number = self._numbers.pop(gone)
            self._prefixes.remove(number)
            self._free.append(number)
        for new in (replica.replica_id for replica in replicas if replica.replica_id not in self._numbers):
            if self._free:
                self._numbers[new] = self._free.pop()
                self._prefixes.rename(self._numbers[new], new.unique_id)
            else:
                self._numbers[new] = self._prefixes.add(new.unique_id)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica for a call, then the others, from the idlest on."""
        if pending_request is None or not pending_request.args or not isinstance(pending_request.args[0], Call):
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where nobody takes it, wait a little before asking again
        call, name = pending_request.args[0], pending_request.metadata.internal_request_id
        able = self.select_available_replicas(candidate_replicas) or candidate_replicas
        by_number = {self._numbers[replica.replica_id]: replica for replica in able if replica.replica_id in self._numbers}
        if not by_number:
            return [candidate_replicas]
        self._forget(name)
        best = self._prefixes.choose(call.key, call.extra_key, allowed=set(by_number))
        self._place(name, best, call.sequences)
        pending_request.future.add_done_callback(lambda future: self._forget(name) if future.cancelled() else None)
        others = sorted((n for n in by_number if n != best), key=lambda n: self._prefixes.loads[n].sequences)
        return [[by_number[best]], *([by_number[n]] for n in others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has accepted the call, perhaps another one than we wanted."""
        name, number = pending_request.metadata.internal_request_id, self._numbers.get(replica_id)
        if number is not None and name in self._placed and self._placed[name] != number:
            sequences = self._forget(name)
            self._place(name, number, sequences)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended, or was refused and is chosen for again."""
        self._forget(internal_request_id)

    def _place(self, name: str, number: int, sequences: int) -> None:
        self._placed[name] = number
        self._prefixes.began(number, name, sequences)

    def _forget(self, name: str) -> int:
        number = self._placed.pop(name, None)
        if number is None:
            return 1
        sequences = self._prefixes.loads[number].requests.get(name, 1)
        self._prefixes.ended(number, name)
        return sequences
