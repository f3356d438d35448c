"""Stop strings in a growing text.

Rules, the same at any split of the text into pieces:
* The first stop string to be complete ends the text; of several that end at the same character, the longest.
* Text that could still be the beginning of a stop string is held back: at most one character less than the longest. With
  `include_stop_str` nothing needs to be.
* No stop string ends the text before `min_tokens` tokens are out: it must begin in the text of a later token. One that began
  earlier does not count, even if it is completed later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopUpdate:
    """What one piece of text came to."""

    text: str
    """Now safe to show."""
    stop: str | None = None
    """The stop string that ended the text, if one did; nothing more is shown then."""


class StopStrings:
    """Watches the text of one sequence for stop strings. Work is constant a character, however many and long they are."""

    def __init__(self, stops: Sequence[str], include_stop_str: bool = False, min_tokens: int = 0) -> None:
        self._automaton = _Automaton(stops) if any(stops) else None
        self._include = include_stop_str
        self._min_tokens = min_tokens
        self._tokens = 0
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, num_tokens: int = 1) -> StopUpdate:
        """Add the text that `num_tokens` more tokens made (it may be empty).

        While `min_tokens` is not reached, push one token at a time: the text of several that pass it counts as before it.
        """
        if self._matched is not None:
            return StopUpdate("", self._matched)
        free = self._tokens < self._min_tokens
        self._tokens += num_tokens
        if self._automaton is None or free:
            return StopUpdate(text)
        automaton, state = self._automaton, self._state
        so_far = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.step(state, char)
            if (stop := automaton.stops[state]) is not None:
                self._matched, self._held = stop, ""
                return StopUpdate(so_far[: end if self._include else end - len(stop)], stop)
        self._state = state
        shown = len(so_far) - (0 if self._include else automaton.depth[state])
        self._held = so_far[shown:]
        return StopUpdate(so_far[:shown])

    def flush(self) -> str:
        """At the end of the sequence: the text still held back, which turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Finds any of several strings in one pass (Aho and Corasick, "Efficient string matching", CACM 18(6), 1975).

    A state is the longest end of the text that is the beginning of a stop string; `depth` is its length.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        self.stops: list[str | None] = [None]
        """By state: the longest string that ends here."""
        for string in strings:
            state = 0
            for char in string:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._fallback.append(0)
                    self.depth.append(self.depth[state] + 1)
                    self.stops.append(None)
                state = self._next[state][char]
            if string:
                self.stops[state] = string
        queue = deque(self._next[0].values())
        while queue:  # breadth first: a fallback is shorter, so it is complete by then
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                queue.append(child)
            if self.stops[state] is None:
                self.stops[state] = self.stops[self._fallback[state]]

    def step(self, state: int, char: str) -> int:
        while (child := self._next[state].get(char)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return child
