"""Grammars over one vocabulary: compiled in a thread, kept in a cache, copied for each sequence.

Owned by the engine core. A grammar takes about a millisecond to compile, a bad one a second; a copy of a compiled one takes
microseconds. Compiling releases the interpreter, so steps go on meanwhile.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from octavo.grammar.depth import depth_problem
from octavo.grammar.library import llguidance
from octavo.grammar.source import limits, one_line
from octavo.grammar.stack import on_deep_stack
from octavo.protocol.engine import Vocabulary

MAX_CACHED = 256
COMPILE_THREADS = 2
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
        self._pool: ThreadPoolExecutor | None = None
        self._masks: Any = None
        self._cache: OrderedDict[str, Future[Any]] = OrderedDict()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Must come before the first grammar."""
        self._vocabulary = vocabulary
        self._tokenizer = None
        self._cache.clear()

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return 0 if self._vocabulary is None else -(-len(self._vocabulary.tokens) // 32)

    @property
    def tokens(self) -> Sequence[bytes]:
        """The texts of all tokens."""
        return () if self._vocabulary is None else self._vocabulary.tokens

    @property
    def eos_token_ids(self) -> list[int]:
        return [] if self._vocabulary is None else self._vocabulary.eos

    def compile(self, source: str) -> Future[Any]:
        """The grammar compiled, soon; ask `matcher` once it is done. Grammars in use or used lately are not compiled again."""
        assert self._vocabulary is not None
        known = self._cache.get(source)
        if known is not None:
            self._cache.move_to_end(source)
            return known
        if self._tokenizer is None:
            # One thread builds the tokenizer, ahead in the queue of whatever waits for it.
            self._tokenizer = self.in_background(engine_tokenizer, self._vocabulary)
        future = self.in_background(_compile, self._tokenizer, source)
        self._cache[source] = future
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return future

    def in_background(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """`work` in one of the threads that compile."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="octavo-grammar")
        return self._pool.submit(work, *args, **kwargs)

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
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


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

    def accept(self, token: int) -> bool:
        """Go on by a token; False if the grammar does not allow it here (the matcher is of no use then)."""
        return bool(self.raw.consume_token(token))

    def fill(self, words: Words) -> None:
        """Write the mask [num_words] of what may come next."""
        self.raw.unsafe_compute_mask_ptr(words.ctypes.data, words.size * 4)

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
    """The vocabulary as the grammar engine knows it. Takes up to a second."""
    library = llguidance()
    encoder = _Encoder(vocabulary) if vocabulary.tokenizer_json else _Greedy(vocabulary)
    wrapped = library.TokenizerWrapper(encoder)
    return library.LLTokenizer(wrapped, n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.eos), slices=list(SLICES))


def fresh_matcher(tokenizer: Any, source: str) -> Any:
    """The engine's matcher for a grammar. To be called on a deep stack."""
    return llguidance().LLMatcher(tokenizer, source, log_level=0, limits=limits())


def _compile(tokenizer: Future[Any], source: str) -> Any:
    if deep := depth_problem(source):
        raise GrammarError(f"The grammar of this request cannot be used: {deep}")
    matcher = on_deep_stack(fresh_matcher, tokenizer.result(), source)
    if matcher.is_error():
        raise GrammarError(f"The grammar of this request cannot be used: {one_line(matcher.get_error())}")
    return matcher
