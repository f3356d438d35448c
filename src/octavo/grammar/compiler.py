"""Grammars over one vocabulary: compiled in a thread, kept in a cache, copied for each sequence.

Owned by the engine core. A grammar takes about a millisecond to compile, a bad one seconds; a copy of a compiled one takes
microseconds. Compiling releases the interpreter, so steps go on meanwhile. Those that are known to take long have a thread of their own, so
that others do not wait for them.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from octavo.config import address_space
from octavo.config.address_space import is_refusal
from octavo.grammar.breadth import breadth
from octavo.grammar.depth import depth_problem
from octavo.grammar.effort import FULL, Effort
from octavo.grammar.library import llguidance, one_line
from octavo.grammar.rules import schemas_in
from octavo.grammar.stack import STACK_BYTES, WORK_BYTES, on_deep_stack
from octavo.protocol.engine import Vocabulary

MAX_CACHED = 256
MAX_CACHED_COST = 6000
"""Milliseconds that checking all cached grammars took: what takes long takes memory too, up to 100 MB a second."""
LEAST_COST = 2
COSTLY = 50
"""Milliseconds of compiling, from which a grammar must wait for others of its kind."""
COMPILE_THREADS = 2
"""Two lanes, for cheap and for costly grammars."""
LEAST_ROOM = 24 << 20
"""Bytes of addresses, where they are limited, without which no grammar is compiled or followed: the engine's next list of states, the stacks of
threads that begin. The engine ends the process where it is refused memory, see `address_space.lacks`."""
BYTES_A_MILLISECOND = 100_000
"""What compiling takes, see `MAX_CACHED_COST`."""
PARALLEL_FROM = 4
"""Masks of a step from which on they are computed by several threads."""
MASK_THREADS = 8
"""At most. They work while a step waits for its masks, when nothing else does."""

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = (r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRING}{{1,{n}}}" for n in (2, 4, 6, 8, 12, 16, 24, 32)), f"{_IN_STRING}+")
"""Sets of tokens that the engine allows as a whole where all of their texts may come, instead of looking at each. The lengths are for strings
with a `maxLength`: the engine's own choice (10, 30) has it look at every token as soon as ten characters are left. Masks are the same."""

P = ParamSpec("P")
R = TypeVar("R")

Words = npt.NDArray[np.int32]
"""[vocabulary / 32] one bit a token, lowest first."""


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that became too complex on the way. The message is for the user."""


class GrammarCompiler:
    """Makes matchers. Thread-safe in what its own threads call; everything else is called by one thread."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: Any = None
        self._lanes: list[ThreadPoolExecutor] = []
        self._masks: Any = None
        self._cache: OrderedDict[str, tuple[Future[Any], int]] = OrderedDict()
        self._cached_cost = 0

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Must come before the first grammar."""
        self._vocabulary = vocabulary
        self._tokenizer = None
        self._cache.clear()
        self._cached_cost = 0

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return 0 if self._vocabulary is None else -(-len(self._vocabulary.tokens) // 32)

    @property
    def scarce(self) -> bool:
        """Nothing may be asked of grammars now: addresses are limited, and too few are left. Takes time; to be asked once a step."""
        return address_space.lacks(LEAST_ROOM)

    @property
    def tokens(self) -> Sequence[bytes]:
        """The texts of all tokens."""
        return () if self._vocabulary is None else self._vocabulary.tokens

    @property
    def eos_token_ids(self) -> list[int]:
        return [] if self._vocabulary is None else self._vocabulary.eos

    def compile(self, source: str, cost: int = 0) -> Future[Any]:
        """The grammar compiled, soon; ask `matcher` once it is done. Grammars in use or used lately are not compiled again.

        Args:
            cost: milliseconds that it is known to take.

        Raises:
            MemoryError: addresses are limited, and too few are left.
        """
        assert self._vocabulary is not None
        known = self._cache.get(source)
        if known is not None and not _found_no_memory(known[0]):
            self._cache.move_to_end(source)
            return known[0]
        self._make_room(cost)
        cheap, costly = self._threads()
        if self._tokenizer is None or _found_no_memory(self._tokenizer):
            self._tokenizer = cheap.submit(engine_tokenizer, self._vocabulary)
        future = (costly if cost >= COSTLY else cheap).submit(_compile, self._tokenizer, source)
        self._cached_cost += max(cost, LEAST_COST) - (0 if known is None else known[1])
        self._cache[source] = future, max(cost, LEAST_COST)
        while len(self._cache) > MAX_CACHED or (self._cached_cost > MAX_CACHED_COST and len(self._cache) > 1):
            self._cached_cost -= self._cache.popitem(last=False)[1][1]
        return future

    def _make_room(self, cost: int) -> None:
        """Forget what was compiled, if addresses are scarce."""
        needed = LEAST_ROOM + STACK_BYTES + cost * BYTES_A_MILLISECOND
        if self._cache and address_space.lacks(needed + WORK_BYTES):
            self._cache.clear()
            self._cached_cost = 0
        if cost and address_space.lacks(needed):
            raise MemoryError("The system gives no memory to compile this grammar.")

    def in_background(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """`work` in the thread that compiles what is cheap.

        Raises:
            MemoryError: addresses are limited, and too few are left.
        """
        return self._threads()[0].submit(work, *args, **kwargs)

    def _threads(self) -> list[ThreadPoolExecutor]:
        """For grammars that are cheap, and for costly ones. They begin with their first work."""
        if self.scarce:
            raise MemoryError("The system gives no memory for the grammar engine.")
        if not self._lanes:
            self._lanes = [ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar") for _ in range(COMPILE_THREADS)]
        return self._lanes

    @staticmethod
    def matcher(compiled: Future[Any]) -> Matcher:
        """A matcher at the beginning of a compiled grammar.

        Raises:
            GrammarError: it could not be compiled.
        """
        return Matcher(compiled.result().deep_copy())

    def fill(self, matchers: Sequence[tuple[Matcher, int]], words: Words) -> None:
        """Write the masks of several matchers.

        Args:
            matchers: each with its row of `words` [rows, num_words].
        """
        if len(matchers) < PARALLEL_FROM:
            for matcher, row in matchers:
                matcher.fill(words[row])
            return
        if self._masks is None:
            self._masks = llguidance().LLExecutor(num_threads=min(MASK_THREADS, os.cpu_count() or 1))
        inner = [(matcher.raw, row) for matcher, row in matchers]
        self._masks.unsafe_compute_mask_ptr(inner, words.ctypes.data, words.shape[1] * 4, words.shape[0])

    def close(self) -> None:
        for lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
        self._lanes = []


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def fork(self) -> Matcher:
        return Matcher(self.raw.deep_copy())

    @property
    def complete(self) -> bool:
        """The text so far is a whole one."""
        return bool(self.raw.is_accepting())

    def allows(self, token: int) -> bool:
        """Whether a token of the vocabulary may come next: whether the mask has it, unless it ends a text, or what comes next is `forced`."""
        return bool(self.raw.validate_tokens([token]))

    def accept(self, token: int) -> bool:
        """Go on by a token; False if the grammar does not allow it here (the matcher is of no use then)."""
        return bool(self.raw.consume_token(token))

    def fill(self, words: Words) -> None:
        """Write the mask [num_words] of what may come next."""
        self.raw.unsafe_compute_mask_ptr(words.ctypes.data, words.size * 4)

    def forced(self) -> list[int]:
        """The tokens that must come next: those whose masks would allow one token each."""
        tokens: list[int] = self.raw.compute_ff_tokens()
        return tokens

    def problem(self) -> str:
        """What went wrong; "" if nothing has."""
        return one_line(self.raw.get_error()) if self.raw.is_error() else ""


class _Encoder:
    """What llguidance wants of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos[0]
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self._encode: Any = None
        if vocabulary.tokenizer_json:
            import tokenizers

            self._encode = tokenizers.Tokenizer.from_str(vocabulary.tokenizer_json)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of text that the grammar forces. Fails for bytes, which says that only strings are taken."""
        if isinstance(text, bytes):
            raise TypeError("text only")
        ids: list[int] = self._encode.encode(text, add_special_tokens=False).ids
        return ids


class _Greedy(_Encoder):
    """For tokenizers that cannot be sent: longest match, which any tokenizer can read if not always what it would have written."""

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        if self._encode is None:
            longest: dict[bytes, int] = {}
            special = set(self.special_token_ids)
            for token_id, token in enumerate(self.tokens):
                if token and token_id not in special:
                    longest.setdefault(token, token_id)
            self._encode = (longest, max(map(len, longest), default=1))
        table, width = self._encode
        ids, at = [], 0
        while at < len(data):
            size = next((n for n in range(min(width, len(data) - at), 0, -1) if data[at : at + n] in table), 0)
            if not size:
                break
            ids.append(table[data[at : at + size]])
            at += size
        return ids


def engine_tokenizer(vocabulary: Vocabulary) -> Any:
    """The vocabulary as the grammar engine knows it. Takes up to a second.

    Raises:
        MemoryError: addresses are limited, and too few are left.
    """
    if address_space.lacks(LEAST_ROOM + address_space.BYTES_A_TOKEN * len(vocabulary.tokens)):
        raise MemoryError("The system gives no memory for the grammar engine.")
    library = llguidance()
    encoder = _Encoder(vocabulary) if vocabulary.tokenizer_json else _Greedy(vocabulary)
    wrapped = library.TokenizerWrapper(encoder)
    return library.LLTokenizer(wrapped, n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.eos), slices=list(SLICES))


def fresh_matcher(tokenizer: Any, source: str, effort: Effort = FULL) -> Any:
    """The engine's matcher for a grammar. To be called on a deep stack."""
    widest = 0 if effort.quick else max(map(breadth, schemas_in(source)), default=0)
    return llguidance().LLMatcher(tokenizer, source, log_level=0, limits=effort.limits(widest))


def _found_no_memory(work: Future[Any]) -> bool:
    """Whether it has failed for a reason that may be gone by now."""
    error = work.exception() if work.done() and not work.cancelled() else None
    return error is not None and is_refusal(error)


def _compile(tokenizer: Future[Any], source: str) -> Any:
    if deep := depth_problem(source):
        raise GrammarError(f"The grammar of this request cannot be used: {deep}")
    matcher = on_deep_stack(fresh_matcher, tokenizer.result(), source)
    if matcher.is_error():
        raise GrammarError(f"The grammar of this request cannot be used: {one_line(matcher.get_error())}")
    return matcher
