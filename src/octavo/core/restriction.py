"""Tokens that a request forbids by lists (allowed_token_ids, bad_words, min_tokens): whether they leave any.

The sampler applies the lists itself. What they leave together with a grammar, or with words that end where the text has come to, is not known
before it has come there; beside a grammar, words are looked for in whichever tokens they are written.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.reasoning import allow, forbid
from octavo.grammar.compiler import Matcher
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import Int32

if TYPE_CHECKING:
    from octavo.core.request import Request


class Spellings:
    """The tokens of a vocabulary by their texts. Takes some 10 ms and 25 MB for 150,000 tokens: made once, where it is needed."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self.longest = max(map(len, tokens), default=0)
        """Bytes of the longest token."""
        self._ids: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(tokens):
            if text:
                self._ids.setdefault(text, []).append(token_id)

    def text(self, token: int) -> bytes:
        return self._tokens[token] if token < len(self._tokens) else b""

    def ids(self, text: bytes) -> Sequence[int]:
        """The tokens that are this text."""
        return self._ids.get(text, ())


Begun = tuple[int, int, int]
"""Words that have been begun: the range of them in a sorted list, and how many bytes of each are there."""


class BadWords:
    """The words that a request forbids, beside a grammar.

    A grammar makes a model write a word in other tokens than its own: with `yes` forbidden, what may still come is `ye`, and then `s`. So a
    word counts here in whichever tokens it is written, as long as it begins with a token and ends with one (`es` says nothing against the
    token `yes`): the token that would complete it is forbidden.

    Args:
        bad: the tokens of each word.
    """

    def __init__(self, bad: Sequence[Sequence[int]], spellings: Spellings) -> None:
        self._spellings = spellings
        self.sequences: list[Sequence[int]] = []
        """Words of which some token has no text: these tokens and no others."""
        words: set[bytes] = set()
        for ids in bad:
            parts = [spellings.text(token) for token in ids]
            if all(parts):
                words.add(b"".join(parts))
            else:
                self.sequences.append(ids)
        self._words = sorted(words)
        self._none: Begun = (0, len(self._words), 0)
        self._completing: dict[Begun, tuple[int, ...]] = {}

    def after(self, begun: Sequence[Begun], token: int) -> list[Begun]:
        """What is begun behind `token`, given what was before it."""
        words, text, found = self._words, self._spellings.text(token), []
        for low, high, size in (*begun, self._none) if words and text else ():
            prefix = words[low][:size] + text
            first = bisect_left(words, prefix, low, high)
            last = bisect_left(words, prefix + b"\xff", first, high)  # a byte that no text has
            if first < last and words[first] == prefix:
                first += 1
            if first < last:
                found.append((first, last, size + len(text)))
        return found

    def completing(self, begun: Sequence[Begun]) -> Iterator[Sequence[int]]:
        """The tokens that would complete a word."""
        for place in (*begun, self._none):
            if (ids := self._completing.get(place)) is None:
                if len(self._completing) >= MAX_PLACES:
                    self._completing.clear()
                low, high, size = place
                rests = (word[size:] for word in self._words[low:high] if len(word) - size <= self._spellings.longest)
                ids = self._completing[place] = tuple(token for rest in rests for token in self._spellings.ids(rest))
            yield ids


MAX_PLACES = 4096
"""Beginnings of which it is remembered what completes them."""


class Restriction:
    """The lists of one request beside a grammar, for masks of `num_words` words. Follows one sequence.

    Args:
        bad: the bad words, if there are any; siblings share them.
    """

    def __init__(self, sampling: SamplingParams, num_words: int, bad: BadWords | None = None) -> None:
        self._bad = bad
        self._allowed: Int32 | None = None
        self.fields = ["bad_words"] if bad is not None else []
        """Names of the lists."""
        if sampling.allowed_token_ids is not None:
            self.fields.insert(0, "allowed_token_ids")
            bits = np.zeros(32 * num_words, np.uint8)
            ids = np.asarray(sampling.allowed_token_ids, np.int64)
            bits[ids[ids < len(bits)]] = 1
            self._allowed = np.packbits(bits, bitorder="little").view(np.int32)
        self._longest = max(map(len, bad.sequences), default=0) if bad is not None else 0
        self._tail: list[int] = []
        """The last tokens, as many as `_longest` needs."""
        self._begun: list[Begun] = []

    @classmethod
    def of(cls, sampling: SamplingParams, num_words: int, bad: BadWords | None = None) -> Restriction | None:
        """None for a request without such lists."""
        return cls(sampling, num_words, bad) if sampling.allowed_token_ids is not None or bad is not None else None

    def fork(self) -> Restriction:
        return copy.copy(self)  # its lists are replaced, never changed

    def accept(self, token: int) -> None:
        """The sequence goes on by `token`."""
        if self._bad is not None:
            self._begun = self._bad.after(self._begun, token)
            if self._longest > 1:
                self._tail = [*self._tail, token][1 - self._longest :]

    def narrow(self, words: Int32, ends: frozenset[int] = frozenset()) -> None:
        """Take what is forbidden next out of a mask [num_words].

        Args:
            ends: tokens that end the sequence where its grammar is complete. Of those in the mask one may come if `allowed_token_ids` would
                leave nothing: the end of the grammar ends the reply.
        """
        if self._allowed is not None:
            complete = [token for token in ends if token >> 5 < len(words) and int(words[token >> 5]) >> (token & 31) & 1]
            words &= self._allowed
            if complete and not words.any():
                allow(words, complete)
        if self._bad is not None:
            forbid(words, _ending(self._bad.sequences, self._tail))
            for ids in self._bad.completing(self._begun):
                forbid(words, ids)


MAX_CHOICES = 24
"""With more tokens to choose from, one of them is taken to lead on."""
MAX_LOOKS = 24
"""Masks that are computed to see which tokens lead on, before one step."""


def drop_dead_ends(words: Int32, matcher: Matcher, restriction: Restriction, ends: frozenset[int]) -> None:
    """Take tokens behind which nothing can come, since grammar and lists have no text in common there, out of a mask that both have been asked
    about. Looks a few tokens ahead, and only where there is little to choose from.

    Args:
        ends: tokens that end the sequence.
    """
    allowed = _bits(words)
    if len(allowed) > MAX_CHOICES:
        return
    left = MAX_LOOKS
    for token in allowed:
        if token in ends:
            continue
        left, leads_on = _leads_on(matcher, restriction, token, len(words), ends, left)
        if not leads_on:
            forbid(words, (token,))
        if left <= 0:
            return


def _leads_on(matcher: Matcher, restriction: Restriction, token: int, num_words: int, ends: frozenset[int], left: int) -> tuple[int, bool]:
    """The looks that are left, and whether a text goes on behind `token`."""
    places = [(matcher, restriction, token)]
    words: Int32 = np.zeros(num_words, np.int32)
    while places and left > 0:
        before, limits, token = places.pop()
        after, then = before.fork(), limits.fork()
        if not after.accept(token):
            continue
        then.accept(token)
        after.fill(words)
        left -= 1
        if after.problem():
            continue
        then.narrow(words, ends)
        allowed = _bits(words)
        if len(allowed) > MAX_CHOICES or not ends.isdisjoint(allowed):
            return left, True
        places += [(after, then, following) for following in allowed]
    return left, bool(places)


def _bits(words: Int32) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return found


def _ending(bad: Sequence[Sequence[int]], outputs: Sequence[int]) -> set[int]:
    """The last tokens of bad words all of whose other tokens are the last of `outputs`."""
    longest = max((len(ids) for ids in bad), default=0)
    tail = list(outputs[max(0, len(outputs) - longest) :])
    return {ids[-1] for ids in bad if len(ids) - 1 <= len(tail) and tail[len(tail) - len(ids) + 1 :] == list(ids[:-1])}


def nothing_left(request: Request) -> str:
    """Why a request without a grammar has no token to go on with; "" if it has, as far as its lists go."""
    sampling = request.sampling
    if sampling.allowed_token_ids is None:
        return ""
    left = set(sampling.allowed_token_ids) - _ending(sampling.bad_words_token_ids or [], request.tokens[request.num_prompt :])
    if not left:
        return f"After {request.num_outputs} tokens bad_words forbids every one of allowed_token_ids: no token is left."
    if request.num_outputs < sampling.min_tokens and not left - set(request.stop_token_ids):
        return f"After {request.num_outputs} tokens min_tokens and bad_words forbid every one of allowed_token_ids: no token is left."
    return ""
