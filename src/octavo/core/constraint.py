"""What sequences may say: grammars, and limits on how long a model reasons.

A `Constraint` follows one sequence token by token and writes the mask of what may come next. That needs every token before it, so a
constrained sequence never has two steps in flight; its neighbours in the batch are not held up beyond what `loop` says.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.config.address_space import why_ended
from octavo.core.mask_turns import DECAY, SLOW_SECONDS, MaskTurns
from octavo.core.reasoning import Marker, Phase, Reasoning, allow, forbid, marker_of
from octavo.core.restriction import BadWords, Restriction, Spellings, drop_dead_ends
from octavo.errors import NO_MEMORY, clause
from octavo.grammar.compiler import GrammarCompiler, GrammarError, Matcher, Words
from octavo.grammar.reach import runs_dead
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import OutputConstraint
from octavo.protocol.step import Int32, TokenMasks

if TYPE_CHECKING:
    from octavo.core.request import Request

MAX_MARKERS = 64
MOST_REFUSALS = 0.6
"""Of the trials of a sequence, later ones counted more: from here on it has its masks for a while."""
REFUSAL_WEIGHT = 0.1
FORGIVENESS = 0.99
"""Of that share, at every mask without a trial: it is tried again now and then."""
WAIT_SECONDS = 0.002
"""How long a turn with nothing else to do waits for a grammar."""


class Constraint:
    """Follows one sequence.

    Args:
        matcher: at the beginning of the grammar; None when only the reasoning is limited.
        eos: tokens that end the sequence once the grammar is complete.
        reasoning: at the beginning of the output.
        restriction: what the request forbids besides.
    """

    def __init__(
        self,
        spec: OutputConstraint,
        matcher: Matcher | None,
        eos: Sequence[int],
        reasoning: Reasoning,
        restriction: Restriction | None = None,
    ) -> None:
        self._spec = spec
        self.matcher = matcher
        self.restriction = restriction
        self.later: Future[Words] | None = None
        """The mask of what comes next, when it is computed beside the steps (see `mask_turns`)."""
        self.narrowed = False
        """`later` is a mask that the lists have been applied to."""
        self._debt = 0.0
        """Seconds that its masks have taken, those before the last counted less and less."""
        self._refusals = 0.0
        """Share of its trials that failed."""
        self._forced: list[int] | None = None
        """What `forced_tokens` has found out for the next tokens."""
        self._late: list[int] = []
        """Tokens that the matcher has not been told yet."""
        self._eos = frozenset(eos)
        self._reasoning = reasoning
        self._trial = matcher.fork() if matcher is not None and reasoning.phase is Phase.UNDECIDED else None
        """Follows what may yet be an answer that begins like a marker; None once it cannot."""
        self.finished = False
        """The grammar is complete and an end token came: the sequence ends here, whatever else is wished."""

    def accept(self, token: int) -> None:
        """The sequence goes on by `token`.

        Raises:
            GrammarError: the grammar does not allow it, or became too complex.
        """
        self._forced = None
        if self.restriction is not None:
            self.restriction.accept(token)
        before = self._reasoning.phase
        if before is not Phase.ANSWER:
            self._reasoning.accept(token)
            if before is Phase.UNDECIDED and self.matcher is not None:
                self._try(self.matcher, token)
        elif self.matcher is not None and not self.finished:
            self._answer(self.matcher, token)

    def _try(self, matcher: Matcher, token: int) -> None:
        """Until its beginning is known for one of a reasoning, the output is one of an answer too."""
        phase, trial = self._reasoning.phase, self._trial
        if phase is Phase.UNDECIDED:
            if trial is not None and token in self._eos and trial.complete:
                self.finished = True
            elif trial is not None and not trial.accept(token):
                self._trial = None
            return
        self._trial = None
        if self._reasoning.begun:
            return
        self.matcher = trial if trial is not None else matcher
        self._answer(self.matcher, token)

    def _answer(self, matcher: Matcher, token: int) -> None:
        if token in self._eos and matcher.complete:
            self.finished = True
        elif self.slow:
            self._late.append(token)  # this too may take long
        elif not matcher.accept(token):
            raise GrammarError(f"{self._spec.field}: the grammar could not follow the output: {matcher.problem() or 'an unexpected token'}")

    def mask(self, words: Words) -> Matcher | None:
        """Write what may come next into `words`, all of it; or return the matcher that will (it may be asked in parallel)."""
        if (forced := self._reasoning.forced) is not None:
            words[:] = 0
            allow(words, (forced,))
            return None
        if self.matcher is None:
            words[:] = -1
            return None
        match self._reasoning.phase:
            case Phase.REASONING:
                words[:] = -1
                self._reasoning.forbid_overruns(words)
                if self._spec.must_answer:
                    forbid(words, self._eos)
                return None
            case Phase.UNDECIDED:
                words[:] = 0
                if self._trial is not None:
                    self._trial.fill(words)
                self._reasoning.allow_start(words)
                return None
            case Phase.ANSWER:
                return self.matcher

    @property
    def slow(self) -> bool:
        """Its masks take so long that others should not wait for them."""
        return self._debt > SLOW_SECONDS

    @property
    def follows_grammar(self) -> bool:
        """The grammar alone says what comes next."""
        return self._reasoning.phase is Phase.ANSWER and self.matcher is not None and self._reasoning.forced is None

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

    def narrow(self, words: Words) -> None:
        """Take what the lists of the request forbid out of the mask that comes next, and what leads nowhere for them."""
        if self.restriction is None or self.narrowed:
            self.narrowed = False
            return
        begun = time.perf_counter()
        answers = self.matcher is not None and self._reasoning.phase is not Phase.REASONING
        self.restriction.narrow(words, self._eos if answers else frozenset())
        if self.matcher is not None and self.follows_grammar:
            drop_dead_ends(words, self.matcher, self.restriction, self._eos)
            self._debt += time.perf_counter() - begun

    def problem(self) -> str:
        """Why the last mask is of no use; "" if it is."""
        matcher = self._trial or self.matcher
        problem = "" if matcher is None else matcher.problem()
        if not problem:
            return ""
        if runs_dead(problem):
            return f"{self._spec.field}: the output came to a part of the grammar that no text can match. Take that part out of it."
        return f"{self._spec.field}: the grammar became too complex on the way: {problem}"

    def forced_tokens(self) -> list[int]:
        """Tokens that come next whatever the model says, since the grammar allows no others. (There may be more.)"""
        if self.matcher is None or self.slow or self.finished or not self.follows_grammar or self.restriction is not None:
            return []
        if self._forced is None:
            self._forced = self.matcher.forced()
        return self._forced

    def may_be_tried(self) -> bool:
        """Whether the next token may be drawn first and judged then. To be asked once a step."""
        if not self.follows_grammar or self.restriction is not None:
            return False  # lists forbid tokens that the grammar allows
        if self.slow or self._late or self.later is not None:
            return False  # its mask is there already, or the matcher is behind
        if self._refusals < MOST_REFUSALS:
            return True
        self._refusals *= FORGIVENESS
        return False

    def passes(self, token: int) -> bool:
        """Whether the mask has a token that was drawn in a trial. False too if that is not known, or the token is none (-1)."""
        begun = time.perf_counter()
        passes = token >= 0 and self._allows(token)
        self._refusals += REFUSAL_WEIGHT * ((not passes) - self._refusals)
        self._debt = DECAY * self._debt + time.perf_counter() - begun
        return passes

    def _allows(self, token: int) -> bool:
        assert self.matcher is not None
        if forced := self.forced_tokens():
            return token == forced[0]  # the mask has one spelling of what is decided, the grammar all of them
        return self.matcher.complete if token in self._eos else self.matcher.allows(token)

    def nothing_left(self) -> str:
        """What to say where nothing that may come next is allowed by the lists of the request."""
        fields = " and ".join(self.restriction.fields) if self.restriction is not None else "the request"
        source = self._spec.field if self.matcher is not None else "thinking_token_budget"
        return f"{source}: the output came to a place where {fields} forbid every token that may come next. Change one or the other."


def blamed(request: Request) -> str | None:
    """The field of a request that its constraint comes from."""
    spec = request.sampling.constraint
    if spec is None:
        return None
    if not spec.grammar and spec.reasoning_budget is not None:
        return "thinking_token_budget"
    return spec.field.partition(".")[0]


@dataclass(frozen=True)
class _Parked:
    """Siblings that wait, and for what."""

    siblings: list[Request]
    grammar: Future[Any] | None
    start: Future[Marker] | None
    end: Future[Marker] | None
    bad: Future[BadWords] | None

    @property
    def futures(self) -> list[Future[Any]]:
        return [future for future in (self.grammar, self.start, self.end, self.bad) if future is not None]


class Constraints:
    """Gives requests their constraints once the grammars are compiled, and masks to steps. One per engine core."""

    def __init__(self) -> None:
        self._compiler = GrammarCompiler()
        self.turns = MaskTurns(self._compiler)
        self._parked: list[_Parked] = []
        self._markers: dict[str, Future[Marker]] = {}
        self._spellings: Future[Spellings] | None = None

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._compiler.set_vocabulary(vocabulary)
        self._markers.clear()
        self._spellings = None

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary; a model may have more, for which nothing stands."""
        return len(self._compiler.tokens)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for their grammar."""
        return sum(len(parked.siblings) for parked in self._parked)

    @property
    def num_waiting(self) -> int:
        """The same, and those that wait for a mask."""
        return self.num_parked + self.turns.num_pending

    def park(self, siblings: list[Request]) -> None:
        """Siblings with one constraint; `ready` returns them when they can be queued.

        Raises:
            GrammarError: there is no vocabulary.
            MemoryError: addresses are limited, and too few are left.
        """
        spec = siblings[0].sampling.constraint
        assert spec is not None
        if not self._compiler.num_words:
            raise GrammarError("The engine was sent no vocabulary, which constrained output needs.")
        grammar = self._compiler.compile(spec.grammar, spec.cost) if spec.grammar else None
        bad = self._bad_words(siblings[0].sampling.bad_words_token_ids)
        self._parked.append(_Parked(siblings, grammar, self._marker(spec.reasoning_start), self._marker(spec.reasoning_end), bad))

    def _bad_words(self, bad: list[list[int]] | None) -> Future[BadWords] | None:
        if not bad:
            return None
        if self._spellings is None:
            self._spellings = self._compiler.in_background(Spellings, self._compiler.tokens)
        return self._compiler.in_background(_bad_words, bad, self._spellings)

    def _marker(self, text: str) -> Future[Marker] | None:
        """The tokens of a marker; looked for once."""
        if not text:
            return None
        if text not in self._markers:
            if len(self._markers) >= MAX_MARKERS:
                self._markers.clear()
            self._markers[text] = self._compiler.in_background(marker_of, text, self._compiler.tokens)
        return self._markers[text]

    def ready(self, *, wait: bool) -> list[tuple[list[Request], str]]:
        """Siblings that have their constraints now, each with "" or why they cannot have one.

        Args:
            wait: up to `WAIT_SECONDS` for the first.
        """
        awaited = [parked.futures for parked in self._parked]
        if wait and awaited and all(awaited):
            concurrent.futures.wait(
                [future for futures in awaited for future in futures],
                timeout=WAIT_SECONDS,
                return_when=concurrent.futures.FIRST_COMPLETED,
            )
        # Each is asked once: one that is done a moment later must not be missing from both.
        done: list[_Parked] = []
        waiting: list[_Parked] = []
        for parked in self._parked:
            (done if all(future.done() for future in parked.futures) else waiting).append(parked)
        self._parked = waiting
        return [(parked.siblings, self._equip(parked)) for parked in done]

    @property
    def scarce(self) -> bool:
        """See `GrammarCompiler.scarce`."""
        return self._compiler.scarce

    def _equip(self, parked: _Parked) -> str:
        if self.scarce:
            return NO_MEMORY
        try:
            start, end = (None if marker is None else marker.result() for marker in (parked.start, parked.end))
            bad = None if parked.bad is None else parked.bad.result()
            for request in parked.siblings:
                spec = request.sampling.constraint
                assert spec is not None
                matcher = None if parked.grammar is None else self._compiler.matcher(parked.grammar)
                reasoning = Reasoning(spec, self._compiler.tokens, start, end)
                eos = self._compiler.eos_token_ids or request.eos_token_ids
                restriction = Restriction.of(request.sampling, self._compiler.num_words, bad)
                request.constraint = Constraint(spec, matcher, eos, reasoning, restriction)
                for token in request.tokens[request.num_prompt :]:  # those that an engine before this one had sent
                    request.constraint.accept(token)
        except GrammarError as error:
            return str(error)
        except Exception as error:
            return why_ended(error, f"The grammar of this request could not be compiled: {clause(error)}.")
        return ""

    def masks(self, slots: Int32, requests: Sequence[Request]) -> tuple[TokenMasks, dict[int, str]]:
        """The masks of the constrained rows of a step.

        Args:
            slots: their slots [rows]; `requests` sit there.

        Returns:
            The masks, and for rows whose constraint has failed: index -> why. Their masks allow everything.
        """
        words: Int32 = np.empty((len(requests), self._compiler.num_words), np.int32)
        if self.scarce:
            words[:] = -1
            return TokenMasks(slots, words), dict.fromkeys(range(len(requests)), NO_MEMORY)
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
                constraint.narrow(words[row])
                problem = "" if words[row].any() else constraint.nothing_left()
            if problem:
                problems[row] = problem
                words[row] = -1
        return TokenMasks(slots, words), problems

    def close(self) -> None:
        self.turns.close()
        self._compiler.close()


def _bad_words(bad: list[list[int]], spellings: Future[Spellings]) -> BadWords:
    """In the thread that has made `spellings` before."""
    return BadWords(bad, spellings.result())
