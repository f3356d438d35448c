"""Where a sequence stands in its reasoning, and how that is ended when it has become too long.

The end of the reasoning is found in the text, as the reader of the reply finds it: a marker may be one token or several, and a
model may cut it in any way. Only where markers are control tokens that stand for themselves (`reasoning_end_ids`) are tokens compared.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.grammar.compiler import Words
from octavo.protocol.params import OutputConstraint


class Phase(enum.IntEnum):
    """Where a sequence is."""

    UNDECIDED = 0
    """Its beginning tells whether it reasons."""
    REASONING = 1
    ANSWER = 2


@dataclass(frozen=True)
class Marker:
    """A text that begins or ends reasoning, and the tokens of a vocabulary that have to do with it."""

    text: bytes
    continues: tuple[list[int], ...]
    """[k] tokens by which the marker can go on from its k-th byte: a part of it, or its end and what follows."""
    overruns: tuple[list[int], ...]
    """[k] those of them with more than blanks behind its end. [0] has also those with the whole marker further inside."""
    spelled: tuple[list[int], ...]
    """[k] the fewest tokens that spell the rest from there; empty if there are none."""

    def begun(self, text: bytes) -> list[int]:
        """How many bytes of the marker `text` may end with, each number that is possible; the largest first."""
        return [k for k in range(min(len(self.text) - 1, len(text)), 0, -1) if text.endswith(self.text[:k])]


def marker_of(text: str, tokens: Sequence[bytes]) -> Marker:
    """Look through a vocabulary; takes some 30 ms for 150,000 tokens."""
    marker = text.encode()
    last, size = marker[-1:], len(marker)
    continues: tuple[list[int], ...] = tuple([] for _ in marker)
    overruns: tuple[list[int], ...] = tuple([] for _ in marker)
    pieces: dict[bytes, int] = {}
    for token_id, token in enumerate(tokens):
        if not token or (last not in token and token.strip() not in marker):
            continue
        if marker in token and token.partition(marker)[2].strip():
            overruns[0].append(token_id)
        if token in marker:
            pieces.setdefault(token, token_id)
        for k in range(size):
            part = token if k else token.lstrip()  # blanks may stand before a marker
            if part and marker.startswith(part, k):
                continues[k].append(token_id)
            elif part.startswith(marker[k:]):
                continues[k].append(token_id)
                if k and part[size - k :].strip():
                    overruns[k].append(token_id)
    return Marker(marker, continues, overruns, _spelled(marker, pieces))


def _spelled(text: bytes, pieces: dict[bytes, int]) -> tuple[list[int], ...]:
    best: list[list[int]] = [[] for _ in range(len(text) + 1)]
    for k in range(len(text) - 1, -1, -1):
        ways = [
            [pieces[text[k:end]], *best[end]]
            for end in range(k + 1, len(text) + 1)
            if text[k:end] in pieces and (best[end] or end == len(text))
        ]
        best[k] = min(ways, key=len, default=[])
    return tuple(best[:-1])


class Reasoning:
    """Follows one sequence until its answer begins.

    Args:
        tokens: the texts of all tokens.
        start, end: the markers of `spec`, if it has texts for them.
    """

    def __init__(self, spec: OutputConstraint, tokens: Sequence[bytes], start: Marker | None, end: Marker | None) -> None:
        self._spec = spec
        self._tokens = tokens
        self._start = start
        self._end = end
        self._text = b""
        """What may be the beginning of the marker that comes next."""
        self._tail: deque[int] = deque(maxlen=max(1, len(spec.reasoning_end_ids), len(spec.reasoning_stop_ids)))
        self._count = 0
        self.begun = False
        """There is, or was, reasoning."""
        self._forced: deque[int] = deque()
        if start is not None:
            self.phase = Phase.UNDECIDED
        else:
            self.phase = Phase.REASONING if end is not None or spec.reasoning_end_ids else Phase.ANSWER
            self.begun = self.phase is Phase.REASONING
        self._check_budget()

    @property
    def forced(self) -> int | None:
        """The only token that may come next, if the reasoning is being ended."""
        return self._forced[0] if self._forced else None

    def accept(self, token: int) -> None:
        """The sequence goes on by `token`. Not to be called once the answer has begun."""
        if self.phase is Phase.REASONING:
            self._count += 1
            if self._forced:
                self._forced.popleft()
        if self._end is not None:
            self._text += self._tokens[token] if token < len(self._tokens) else b""
            if self.phase is Phase.UNDECIDED and not self._has_begun():
                return
            ended = self._end.text in self._text
            self._text = self._text[-len(self._end.text) :]
        else:
            self._tail.append(token)
            size = len(self._spec.reasoning_end_ids)
            ended = list(self._tail)[-size:] == self._spec.reasoning_end_ids
        if ended:
            self.phase = Phase.ANSWER
            self._forced.clear()
        else:
            self._check_budget()

    def _has_begun(self) -> bool:
        """Whether the text so far begins with the marker; if it never will, the answer has begun."""
        assert self._start is not None
        text, start = self._text.lstrip(), self._start.text
        if text.startswith(start):
            self.phase, self.begun, self._text = Phase.REASONING, True, text[len(start) :]
            return True
        if not start.startswith(text):
            self.phase = Phase.ANSWER
        return False

    def _check_budget(self) -> None:
        budget = self._spec.reasoning_budget
        if self.phase is Phase.REASONING and budget is not None and self._count >= budget and not self._forced:
            self._forced.extend(self._ending())

    def _ending(self) -> Sequence[int]:
        """Tokens that end the reasoning: only the rest of the marker, where it has been begun."""
        whole = self._spec.reasoning_stop_ids
        if self._end is not None:
            begun = self._end.begun(self._text)
            return (begun and self._end.spelled[begun[0]]) or whole
        tail = list(self._tail)
        return next((whole[k:] for k in range(len(whole) - 1, 0, -1) if tail[-k:] == whole[:k]), whole)

    def allow_start(self, words: Words) -> None:
        """Add the tokens that write the marker of a beginning, as far as the sequence is still one, to a mask."""
        if self._start is not None and self._start.text.startswith(text := self._text.lstrip()):
            allow(words, self._start.continues[len(text)])

    def forbid_overruns(self, words: Words) -> None:
        """Take tokens that end the reasoning and go on from a mask: a grammar begins with a token."""
        if self._end is not None:
            for k in (0, *self._end.begun(self._text)):
                forbid(words, self._end.overruns[k])


def allow(words: Words, tokens: Iterable[int]) -> None:
    """Set the bits of `tokens` in a mask."""
    bits: Any = words.view(np.uint32)
    for token in tokens:
        if token // 32 < len(bits):
            bits[token // 32] |= np.uint32(1 << (token % 32))


def forbid(words: Words, tokens: Iterable[int]) -> None:
    """Clear the bits of `tokens` in a mask."""
    bits: Any = words.view(np.uint32)
    for token in tokens:
        if token // 32 < len(bits):
            bits[token // 32] &= ~np.uint32(1 << (token % 32))
