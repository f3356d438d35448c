"""What sequences may say: grammars, and limits on how long a model reasons.

A `Constraint` follows one sequence token by token and writes the mask of what may come next. That needs every token before it, so a
constrained sequence never has two steps in flight; its neighbours in the batch are not held up beyond what `loop` says.
"""

from __future__ import annotations

import concurrent.futures
import enum
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.grammar.compiler import GrammarCompiler, GrammarError, Matcher, Words
from octavo.grammar.reach import runs_dead
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import OutputConstraint
from octavo.protocol.step import Int32, TokenMasks

if TYPE_CHECKING:
    from octavo.core.request import Request

WAIT_SECONDS = 0.002
"""How long a turn with nothing else to do waits for a grammar."""


class Phase(enum.IntEnum):
    """Where a sequence is."""

    UNDECIDED = 0
    """Its first token tells whether it reasons."""
    REASONING = 1
    ANSWER = 2


class Constraint:
    """Follows one sequence.

    Args:
        matcher: at the beginning of the grammar; None when only the reasoning is limited.
        eos: tokens that end the sequence once the grammar is complete.
        tokens: the texts of all tokens, for reasoning that is marked by text.
    """

    def __init__(self, spec: OutputConstraint, matcher: Matcher | None, eos: Sequence[int], tokens: Sequence[bytes] = ()) -> None:
        self._spec = spec
        self._matcher = matcher
        self._eos = frozenset(eos)
        self.finished = False
        """The grammar is complete and an end token came: the sequence ends here, whatever else is wished."""
        self._reasoned = 0
        self._forced: deque[int] = deque()
        self._tail: deque[int] = deque(maxlen=len(spec.reasoning_end_ids) or 1)
        self._tokens = tokens
        self._text = b""
        """What may be the beginning of the marker that comes next."""
        if spec.reasoning_end:
            self._phase = Phase.UNDECIDED if spec.reasoning_start else Phase.REASONING
        elif not spec.reasoning_end_ids:
            self._phase = Phase.ANSWER
        else:
            self._phase = Phase.UNDECIDED if spec.reasoning_start_ids else Phase.REASONING
        self._check_budget()

    def accept(self, token: int) -> None:
        """The sequence goes on by `token`.

        Raises:
            GrammarError: the grammar does not allow it, or became too complex.
        """
        if self._spec.reasoning_end and self._phase is not Phase.ANSWER:
            self._follow_text(token)
            return
        if self._phase is Phase.UNDECIDED:
            reasons = token == self._spec.reasoning_start_ids[0]
            self._phase = Phase.REASONING if reasons else Phase.ANSWER
            if reasons:
                self._check_budget()
                return
        if self._phase is Phase.REASONING:
            self._reason(token)
        elif self._matcher is not None and not self.finished:
            self._answer(self._matcher, token)

    def _reason(self, token: int) -> None:
        self._reasoned += 1
        if self._forced:
            self._forced.popleft()
        self._tail.append(token)
        if list(self._tail) == self._spec.reasoning_end_ids:
            self._phase = Phase.ANSWER
            self._forced.clear()
        else:
            self._check_budget()

    def _follow_text(self, token: int) -> None:
        """Markers of several tokens: their text may end, or begin, in the middle of a token."""
        start, end = self._spec.reasoning_start.encode(), self._spec.reasoning_end.encode()
        self._text += self._tokens[token] if token < len(self._tokens) else b""
        if self._phase is Phase.UNDECIDED:
            begun = self._text.lstrip()
            if not begun.startswith(start):
                if not start.startswith(begun):
                    self._phase = Phase.ANSWER
                return
            self._phase, self._text = Phase.REASONING, begun[len(start) :]
        else:
            self._reasoned += 1
            if self._forced:
                self._forced.popleft()
        if end in self._text:
            self._phase = Phase.ANSWER
            self._forced.clear()
        else:
            self._text = self._text[-len(end) :]
            self._check_budget()

    def _check_budget(self) -> None:
        budget = self._spec.reasoning_budget
        if self._phase is Phase.REASONING and budget is not None and self._reasoned == budget and not self._forced:
            self._forced.extend(self._spec.reasoning_stop_ids)

    def _answer(self, matcher: Matcher, token: int) -> None:
        if token in self._eos and matcher.complete:
            self.finished = True
        elif not matcher.accept(token):
            raise GrammarError(f"{self._spec.field}: the grammar could not follow the output: {matcher.problem() or 'an unexpected token'}")

    def mask(self, words: Words) -> Matcher | None:
        """Write what may come next into `words`, all of it; or return the matcher that will (it may be asked in parallel)."""
        if self._forced:
            words[:] = 0
            _allow(words, self._forced[0])
            return None
        if self._phase is Phase.REASONING or self._matcher is None:
            words[:] = -1
            return None
        if self._phase is Phase.UNDECIDED:
            self._matcher.fill(words)
            _allow(words, self._spec.reasoning_start_ids[0])
            return None
        return self._matcher

    def problem(self) -> str:
        """Why the last mask is of no use; "" if it is."""
        problem = "" if self._matcher is None else self._matcher.problem()
        if not problem:
            return ""
        if runs_dead(problem):
            return f"{self._spec.field}: the output came to a part of the grammar that no text can match. Take that part out of it."
        return f"{self._spec.field}: the grammar became too complex on the way: {problem}"


def _allow(words: Words, token: int) -> None:
    bits: Any = words.view(np.uint32)
    if token // 32 < len(bits):
        bits[token // 32] |= np.uint32(1 << (token % 32))


def blamed(request: Request) -> str | None:
    """The field of a request that its constraint comes from."""
    spec = request.sampling.constraint
    return None if spec is None else spec.field.partition(".")[0]


class Constraints:
    """Gives requests their constraints once the grammars are compiled, and masks to steps. One per engine core."""

    def __init__(self) -> None:
        self._compiler = GrammarCompiler()
        self._parked: list[tuple[list[Request], Future[Any] | None]] = []

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._compiler.set_vocabulary(vocabulary)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for their grammar."""
        return sum(len(siblings) for siblings, _ in self._parked)

    def park(self, siblings: list[Request]) -> None:
        """Siblings with one constraint; `ready` returns them when they can be queued.

        Raises:
            GrammarError: there is no vocabulary.
        """
        spec = siblings[0].sampling.constraint
        assert spec is not None
        if not self._compiler.num_words:
            raise GrammarError("The engine was sent no vocabulary, which constrained output needs.")
        self._parked.append((siblings, self._compiler.compile(spec.grammar) if spec.grammar else None))

    def ready(self, *, wait: bool) -> list[tuple[list[Request], str]]:
        """Siblings that have their constraints now, each with "" or why they cannot have one.

        Args:
            wait: up to `WAIT_SECONDS` for the first.
        """
        futures = [future for _, future in self._parked if future is not None]
        if wait and futures and len(futures) == len(self._parked):
            concurrent.futures.wait(futures, timeout=WAIT_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED)
        # Each is asked once: one that is done a moment later must not be missing from both.
        done: list[tuple[list[Request], Future[Any] | None]] = []
        waiting: list[tuple[list[Request], Future[Any] | None]] = []
        for entry in self._parked:
            (done if entry[1] is None or entry[1].done() else waiting).append(entry)
        self._parked = waiting
        return [(siblings, self._equip(siblings, future)) for siblings, future in done]

    def _equip(self, siblings: list[Request], compiled: Future[Any] | None) -> str:
        try:
            for request in siblings:
                spec = request.sampling.constraint
                assert spec is not None
                matcher = None if compiled is None else self._compiler.matcher(compiled)
                request.constraint = Constraint(spec, matcher, self._compiler.eos_token_ids or request.eos_token_ids, self._compiler.tokens)
                for token in request.tokens[request.num_prompt :]:  # those that an engine before this one had sent
                    request.constraint.accept(token)
        except GrammarError as error:
            return str(error)
        except Exception as error:
            return f"The grammar of this request could not be compiled: {error}."
        return ""

    def masks(self, slots: Int32, requests: Sequence[Request]) -> tuple[TokenMasks, dict[int, str]]:
        """The masks of the constrained rows of a step.

        Args:
            slots: their slots [rows]; `requests` sit there.

        Returns:
            The masks, and for rows whose constraint has failed: index -> why. Their masks allow everything.
        """
        words: Int32 = np.empty((len(requests), self._compiler.num_words), np.int32)
        later: list[tuple[Matcher, int]] = []
        problems: dict[int, str] = {}
        for row, request in enumerate(requests):
            assert request.constraint is not None
            matcher = request.constraint.mask(words[row])
            if matcher is not None:
                later.append((matcher, row))
        self._compiler.fill(later, words)
        for row, request in enumerate(requests):
            if request.constraint is not None and (problem := request.constraint.problem()):
                problems[row] = problem
                words[row] = -1
        return TokenMasks(slots, words), problems

    def close(self) -> None:
        self._compiler.close()
