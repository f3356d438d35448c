"""Tokens that a request forbids by lists (allowed_token_ids, bad_words, min_tokens): whether they leave any.

The sampler applies the lists itself. What they leave together with a grammar, or with words that end where the text has come to, is not known
before it has come there; beside a grammar, words are looked for in whichever tokens they are written.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.reasoning import forbid
from octavo.grammar.compiler import Matcher
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import Int32

if TYPE_CHECKING:
    from octavo.core.request import Request


class Spellings:
    """The tokens of a vocabulary by their texts. Takes some 10 ms and 25 MB for 150,000 tokens: made once, where it is needed."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._ids: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(tokens):
            if text:
                self._ids.setdefault(text, []).append(token_id)

    def ids(self, text: bytes) -> Sequence[int]:
        """The tokens that are this text."""
        return self._ids.get(text, ())


class Restriction:
    """The lists of one request beside a grammar, for masks of `num_words` words. Follows one sequence.

    A grammar makes a model write a word in other tokens than its own: with `yes` forbidden, what may still come is `ye`, and then `s`. So a bad
    word counts here in whichever tokens it is written, as long as it begins with a token and ends with one (`es` says nothing against the
    token `yes`): the token that would complete it is forbidden.
    """

    def __init__(self, sampling: SamplingParams, num_words: int, spellings: Spellings | None = None) -> None:
        bad = sampling.bad_words_token_ids or []
        self._tokens: Sequence[bytes] = () if spellings is None else spellings.tokens
        self._spellings = spellings
        self._allowed: Int32 | None = None
        self.fields = ["bad_words"] if bad else []
        """Names of the lists."""
        if sampling.allowed_token_ids is not None:
            self.fields.insert(0, "allowed_token_ids")
            bits = np.zeros(32 * num_words, np.uint8)
            ids = np.asarray(sampling.allowed_token_ids, np.int64)
            bits[ids[ids < len(bits)]] = 1
            self._allowed = np.packbits(bits, bitorder="little").view(np.int32)
        self._sequences: list[Sequence[int]] = []
        """Words of which some token has no text: these tokens and no others."""
        self._whole: set[int] = set()
        """Tokens that are a word."""
        self._words: dict[int, list[bytes]] = {}
        """The others, by their first byte."""
        for ids_of in bad:
            parts = [self._text(token) for token in ids_of]
            if not all(parts) or spellings is None:
                self._sequences.append(ids_of)
                continue
            word = b"".join(parts)
            self._whole.update(spellings.ids(word))
            self._words.setdefault(word[0], []).append(word)
        self._longest = max(map(len, self._sequences), default=0)
        self._tail: list[int] = []
        """The last tokens."""
        self._begun: list[tuple[bytes, int]] = []
        """Words that the text ends with the beginning of, and how many of their bytes."""

    @classmethod
    def of(cls, sampling: SamplingParams, num_words: int, spellings: Spellings | None = None) -> Restriction | None:
        """None for a request without such lists."""
        wanted = sampling.allowed_token_ids is not None or sampling.bad_words_token_ids
        return cls(sampling, num_words, spellings) if wanted else None

    def fork(self) -> Restriction:
        other = copy.copy(self)
        other._tail, other._begun = list(self._tail), list(self._begun)
        return other

    def accept(self, token: int) -> None:
        """The sequence goes on by `token`."""
        if self._longest > 1:
            self._tail = [*self._tail[2 - self._longest :], token] if self._longest > 2 else [token]
        if not self._words:
            return
        text = self._text(token)
        if not text:
            self._begun = []
            return
        begun = [(word, at + len(text)) for word, at in self._begun if word.startswith(text, at)]
        begun += [(word, len(text)) for word in self._words.get(text[0], ()) if word.startswith(text)]
        self._begun = [(word, at) for word, at in begun if at < len(word)]

    def narrow(self, words: Int32) -> None:
        """Take what is forbidden next out of a mask [num_words]."""
        if self._allowed is not None:
            words &= self._allowed
        forbid(words, self._whole)
        forbid(words, _ending(self._sequences, self._tail))
        if self._spellings is not None:
            for word, at in self._begun:
                forbid(words, self._spellings.ids(word[at:]))

    def _text(self, token: int) -> bytes:
        return self._tokens[token] if token < len(self._tokens) else b""


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
        if left <= 0:
            return
        if not leads_on:
            forbid(words, (token,))


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
        then.narrow(words)
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
