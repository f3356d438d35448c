"""What sequences may say: grammars, and limits on how long a model reasons.

A `Constraint` follows one sequence token by token and writes the mask of what may come next. That needs every token before it, so a
constrained sequence never has two steps in flight; its neighbours in the batch are not held up beyond what `loop` says.
"""

from __future__ import annotations

import concurrent.futures
import enum
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.mask_turns import DECAY, SLOW_SECONDS, MaskTurns
from octavo.core.restriction import Restriction
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
        restriction: what the request forbids besides.
    """

    def __init__(
        self,
        spec: OutputConstraint,
        matcher: Matcher | None,
        eos: Sequence[int],
        tokens: Sequence[bytes] = (),
        restriction: Restriction | None = None,
    ) -> None:
        self._spec = spec
        self.matcher = matcher
        self.restriction = restriction
        self.later: Future[Words] | None = None
        """The mask of what comes next, when it is computed beside the steps (see `mask_turns`)."""
        self._debt = 0.0
        """Seconds that its masks have taken, those before the last counted less and less."""
        self._late: list[int] = []
        """Tokens that the matcher has not been told yet."""
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
        elif self.matcher is not None and not self.finished:
            self._answer(self.matcher, token)

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
        elif self.slow:
            self._late.append(token)  # this too may take long
        elif not matcher.accept(token):
            raise GrammarError(f"{self._spec.field}: the grammar could not follow the output: {matcher.problem() or 'an unexpected token'}")

    def mask(self, words: Words) -> Matcher | None:
        """Write what may come next into `words`, all of it; or return the matcher that will (it may be asked in parallel)."""
        if self._forced:
            words[:] = 0
            _allow(words, self._forced[0])
            return None
        if self._phase is Phase.REASONING or self.matcher is None:
            words[:] = -1
            return None
        if self._phase is Phase.UNDECIDED:
            self.matcher.fill(words)
            _allow(words, self._spec.reasoning_start_ids[0])
            return None
        return self.matcher

    @property
    def slow(self) -> bool:
        """Its masks take so long that others should not wait for them."""
        return self._debt > SLOW_SECONDS

    @property
    def follows_grammar(self) -> bool:
        """The grammar alone says what comes next."""
        return self._phase is Phase.ANSWER and self.matcher is not None and not self._forced

    def catch_up(self) -> None:
        """Tell the matcher what it has not been told. What it cannot follow is its `problem` then."""
        if self.matcher is not None and self._late:
            tokens, self._late = self._late, []
            for token in tokens:
                self.matcher.accept(token)

    def fill(self, words: Words) -> float:
        """Write the grammar's mask, and remember how long that took. Returns the seconds."""
        assert self.matcher is not None
        begun = time.perf_counter()
        self.catch_up()
        self.matcher.fill(words)
        seconds = time.perf_counter() - begun
        self._debt = DECAY * self._debt + seconds
        return seconds

    def problem(self) -> str:
        """Why the last mask is of no use; "" if it is."""
        problem = "" if self.matcher is None else self.matcher.problem()
        if not problem:
            return ""
        if runs_dead(problem):
            return f"{self._spec.field}: the output came to a part of the grammar that no text can match. Take that part out of it."
        return f"{self._spec.field}: the grammar became too complex on the way: {problem}"

    def forced_tokens(self) -> list[int]:
        """Tokens that come next whatever the model says, since the grammar allows no others. (There may be more.)"""
        if self.matcher is None or self.slow or self.finished or not self.follows_grammar or self.restriction is not None:
            return []
        return self.matcher.forced()

    def nothing_left(self) -> str:
        """What to say where nothing that may come next is allowed by the lists of the request."""
        fields = " and ".join(self.restriction.fields) if self.restriction is not None else "the request"
        source = self._spec.field if self.matcher is not None else "thinking_token_budget"
        return f"{source}: the output came to a place where {fields} forbid every token that may come next. Change one or the other."


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
        self.turns = MaskTurns(self._compiler)
        self._parked: list[tuple[list[Request], Future[Any] | None]] = []

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._compiler.set_vocabulary(vocabulary)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for their grammar."""
        return sum(len(siblings) for siblings, _ in self._parked)

    @property
    def num_waiting(self) -> int:
        """The same, and those that wait for a mask."""
        return self.num_parked + self.turns.num_pending

    def park(self, siblings: list[Request]) -> None:
        """Siblings with one constraint; `ready` returns them when they can be queued.

        Raises:
            GrammarError: there is no vocabulary.
        """
        spec = siblings[0].sampling.constraint
        assert spec is not None
        if not self._compiler.num_words:
            raise GrammarError("The engine was sent no vocabulary, which constrained output needs.")
        self._parked.append((siblings, self._compiler.compile(spec.grammar, spec.cost) if spec.grammar else None))

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
                eos = self._compiler.eos_token_ids or request.eos_token_ids
                restriction = Restriction.of(request.sampling, self._compiler.num_words)
                request.constraint = Constraint(spec, matcher, eos, self._compiler.tokens, restriction)
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
        later: list[tuple[Constraint, int]] = []
        problems: dict[int, str] = {}
        for row, request in enumerate(requests):
            assert request.constraint is not None
            if request.constraint.mask(words[row]) is not None:
                later.append((request.constraint, row))
        self.turns.fill(later, words)
        for row, request in enumerate(requests):
            constraint = request.constraint
            assert constraint is not None
            problem = constraint.problem()
            if not problem and constraint.restriction is not None:
                constraint.restriction.narrow(words[row], request.tokens[request.num_prompt :])
                problem = "" if words[row].any() else constraint.nothing_left()
            if problem:
                problems[row] = problem
                words[row] = -1
        return TokenMasks(slots, words), problems

    def close(self) -> None:
        self.turns.close()
        self._compiler.close()
