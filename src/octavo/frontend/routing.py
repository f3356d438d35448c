"""Which replica takes a request: the one that holds the longest beginning of its prompt, unless others have much less to do.

What each replica's prefix cache holds is not asked but remembered, from the prompts that were sent there (Zheng et al. 2024, SGLang, do the
same within one engine; Srivatsa et al. 2024, Preble, across several). A wrong memory costs time, never correctness.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

CHUNK = 64
"""Tokens of a prompt that are remembered together, if nothing else is said."""
MAX_CHUNKS = 1 << 17
"""Remembered in all: the ones not seen for longest are forgotten first. 8 million tokens."""
PATIENCE = 1.5
"""A replica may have so many times the mean work before prompts that it knows go elsewhere."""
SLACK = 4
"""And so many sequences more than the idlest one in any case."""


@dataclass
class Load:
    """Of one replica."""

    sequences: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    """Live request -> its sequences."""


class PrefixRouter:
    """Decides, and remembers. Not thread-safe.

    Args:
        replicas: how many there are at first.
        chunk: see `CHUNK`.
        names: of the replicas, the same in every process. Given where several processes route, each for itself: a prompt that one of them
            does not know goes to where the others would send it too, instead of to whoever has least to do.
        max_chunks: see `MAX_CHUNKS`.
    """

    def __init__(self, replicas: int, *, chunk: int = CHUNK, max_chunks: int = MAX_CHUNKS, names: Sequence[str] | None = None) -> None:
        self.loads = [Load() for _ in range(replicas)]
        self._names = None if names is None else list(names)
        self._chunk = chunk
        self._max_chunks = max_chunks
        self._known: OrderedDict[tuple[int, str], set[int]] = OrderedDict()
        """(hash of all tokens up to the end of a chunk, extra key) -> replicas that computed them; oldest use first."""
        self._next = 0

    def add(self, name: str = "") -> int:
        """One more replica; its number."""
        self.loads.append(Load())
        if self._names is not None:
            self._names.append(name)
        return len(self.loads) - 1

    def rename(self, replica: int, name: str) -> None:
        """The number of one that was removed is given to another."""
        if self._names is not None:
            self._names[replica] = name

    def remove(self, replica: int) -> None:
        """It is gone: nothing of it is known any more. Its number may be given to another one, and must not be allowed before."""
        self.forget(replica)
        self.loads[replica] = Load()

    def choose(self, tokens: Sequence[int], extra_key: str = "", *, allowed: set[int] | None = None) -> int:
        """The replica for a prompt.

        Args:
            tokens: of the prompt, or anything else whose beginnings are alike where those of prompts are (the bytes of their text).
            extra_key: prompts with different ones share no cache.
            allowed: those that can take requests now; None: all.
        """
        among = [i for i in range(len(self.loads)) if allowed is None or i in allowed] or list(range(len(self.loads)))
        idlest = min(self.loads[i].sequences for i in among)
        mean = sum(self.loads[i].sequences for i in among) / len(among)
        most = max(idlest + SLACK, PATIENCE * mean)
        ready = [i for i in among if self.loads[i].sequences <= most]
        keys = _keys(tokens, extra_key, self._chunk)
        best = self._longest(keys, set(ready))
        if best is None and self._names is not None and keys:
            best = self._agreed(tokens, extra_key, ready)
        if best is None:
            self._next += 1  # equally idle ones take turns
            best = min(ready, key=lambda i: (self.loads[i].sequences, (i - self._next) % len(self.loads)))
        self._remember(keys, best)
        return best

    def began(self, replica: int, request_id: str, sequences: int) -> None:
        """A request was sent."""
        load = self.loads[replica]
        load.requests[request_id] = sequences
        load.sequences += sequences

    def ended(self, replica: int, request_id: str) -> None:
        """It is no longer live. Saying so twice does no harm."""
        load = self.loads[replica]
        load.sequences -= load.requests.pop(request_id, 0)

    def forget(self, replica: int) -> None:
        """A replica's cache is empty now."""
        for key, holders in list(self._known.items()):
            holders.discard(replica)
            if not holders:
                del self._known[key]

    def _longest(self, keys: list[tuple[int, str]], ready: set[int]) -> int | None:
        """Among the replicas that are ready: the one that knows most of the prompt; the idlest of several."""
        found: set[int] = set()
        for key in keys:
            holders = self._known.get(key, set()) & ready
            if not holders:
                break
            found = holders
        return min(found, key=lambda i: self.loads[i].sequences) if found else None

    def _agreed(self, tokens: Sequence[int], extra_key: str, ready: list[int]) -> int:
        """By the first chunk and the names alone. When a replica comes or goes, only prompts that it gets or had change their place
        (rendezvous hashing, Thaler and Ravishankar 1998)."""
        assert self._names is not None
        beginning = f"{extra_key}\0{','.join(map(str, tokens[: self._chunk]))}\0".encode()
        names = self._names
        return max(ready, key=lambda i: hashlib.blake2b(beginning + names[i].encode(), digest_size=8).digest())

    def _remember(self, keys: list[tuple[int, str]], replica: int) -> None:
        for key in reversed(keys):  # the beginnings last: they are the last to be forgotten
            self._known.setdefault(key, set()).add(replica)
            self._known.move_to_end(key)
        while len(self._known) > self._max_chunks:
            self._known.popitem(last=False)


def _keys(tokens: Sequence[int], extra_key: str, chunk: int) -> list[tuple[int, str]]:
    """One for each whole chunk of a prompt, which stands for everything up to its end."""
    keys, before = [], 0
    for end in range(chunk, len(tokens) + 1, chunk):
        before = hash((before, *tokens[end - chunk : end]))
        keys.append((before, extra_key))
    return keys
