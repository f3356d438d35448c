"""Structured output at the door: from what a request asks for to the constraint that the core enforces.

Grammars are checked here and remembered, so that the second request with one pays nothing. Those known to be cheap are checked in a
thread, all others in a process that is ended when it is late (`frontend.jobs`).
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import InvalidRequest, OctavoError
from octavo.frontend.jobs.pool import STOPPED, JobPool
from octavo.frontend.jobs.process import Room
from octavo.grammar.check import Checked, Checker, CheckJob, CheckReply, check_parameters, job_text
from octavo.grammar.effort import QUICK, NeedsMore, cheap
from octavo.grammar.library import llguidance
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import OutputConstraint, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from octavo.frontend.text.tokenizer import Tokenizer

ROOM = Room(
    name="grammars of requests",
    module="octavo.frontend.grammar_worker",
    seconds=5.0,  # the engine's own limits stop most after one or two
    memory=1 << 30,  # of addresses: a quarter is the stack of `octavo.grammar.stack`
)
MAX_REMEMBERED = 512
MAX_REMEMBERED_BYTES = 1 << 26
QUICK_THREADS = 2

_Found = Checked | InvalidRequest


class GrammarDoor:
    """Checks structured output wishes and remembers the answers. Safe to call from any thread.

    Args:
        vocabulary: the model's, when it is needed: a grammar may be well formed and yet have no first token. None if there is none to
            be had: then only the form is checked.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self._vocabulary = vocabulary
        self._checker: Checker | None = None
        self._checker_lock = threading.Lock()
        self._known = _Memory()
        self._threads: ThreadPoolExecutor | None = None
        self.pool = JobPool(ROOM, self._setup)

    def close(self) -> None:
        """End the processes."""
        self.pool.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # Wishes

    def check(self, wish: StructuredOutputsParams, *, first: bool = False) -> Checked:
        """What there is to know of `wish`; takes as long as checking it takes.

        Args:
            first: also which tokens it may begin with.

        Raises:
            InvalidRequest: it cannot be used; for a schema the message has the path. Or the check took too long.
            NotYet: the grammar engine is not installed.
        """
        key = _key(wish, first)
        if (found := self._known.get(key)) is None:
            found = self._quick(wish, first)
            if found is None:
                found = _verdict(_work(lambda: self.pool.submit("", _job(wish, first)).result(), WISH))
            self._known.put(key, found)
        return _checked(found)

    async def prepare(self, wish: StructuredOutputsParams, client: str = "", *, first: bool = False) -> Checked:
        """`check` without waiting for it on the event loop.

        Args:
            client: who asks; where many wait, clients take turns.

        Raises:
            InvalidRequest, NotYet: see `check`.
            Overloaded: too many wait.
        """
        key = _key(wish, first)
        if (found := self._known.get(key)) is None:
            found = await self._on_thread(self._quick, wish, first)
            if found is None:
                found = _verdict(await _work_later(self.pool.ask(client, _job(wish, first)), WISH))
            self._known.put(key, found)
        return _checked(found)

    async def prepare_parameters(self, functions: Sequence[Mapping[str, Any]], client: str = "") -> None:
        """Check the parameters of tools.

        Raises:
            InvalidRequest: with the tool and the path in its schema; or the check took too long.
            NotYet: the grammar engine is not installed.
            Overloaded: too many wait.
        """
        parts = [{"parameters": function.get("parameters"), "strict": bool(function.get("strict"))} for function in functions]
        key = _key(parts, False)
        if (found := self._known.get(key)) is None:
            if await self._on_thread(_quick_parameters, parts):
                found = Checked("")
            else:
                found = _verdict(await _work_later(self.pool.ask(client, job_text(CheckJob(functions=parts))), PARAMETERS))
            self._known.put(key, found)
        _checked(found)

    async def _on_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(QUICK_THREADS, thread_name_prefix="octavo-schema")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _quick(self, wish: StructuredOutputsParams, first: bool) -> _Found | None:
        """The answer, if it can be had at once."""
        llguidance()
        if not cheap(wish):
            return None
        with self._checker_lock:
            if self._checker is None:
                self._checker = Checker(None if self._vocabulary is None else self._vocabulary())
        try:
            return self._checker.check(wish, QUICK, first=first)
        except NeedsMore:
            return None
        except InvalidRequest as error:
            return error

    def _setup(self) -> bytes:
        return msgspec.msgpack.encode(None if self._vocabulary is None else self._vocabulary())


WISH = "structured_outputs", "structured_outputs: the grammar cannot be used"
PARAMETERS = "tools", "tools: the parameters cannot be used"
"""The field, and how a sentence about it begins."""


class _Memory:
    """What was found of wishes, the latest of them."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, _Found] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> _Found | None:
        with self._lock:
            if (found := self._found.get(key)) is not None:
                self._found.move_to_end(key)
            return found

    def put(self, key: bytes, found: _Found) -> None:
        with self._lock:
            if key in self._found:
                return
            self._found[key] = found
            self._bytes += _size(found)
            while len(self._found) > MAX_REMEMBERED or self._bytes > MAX_REMEMBERED_BYTES:
                self._bytes -= _size(self._found.popitem(last=False)[1])


def _size(found: _Found) -> int:
    return len(found.source) + len(found.first or b"") if isinstance(found, Checked) else len(str(found))


def _quick_parameters(functions: list[dict[str, Any]]) -> bool:
    """Whether parameters are known to be fine."""
    llguidance()
    try:
        check_parameters(functions, QUICK)
    except (NeedsMore, InvalidRequest):
        return False
    return True


def _job(wish: StructuredOutputsParams, first: bool) -> bytes:
    return job_text(CheckJob(wish=wish, first=first))


def _work(work: Callable[[], bytes], subject: tuple[str, str]) -> bytes | InvalidRequest:
    try:
        return work()
    except InvalidRequest as error:
        return _stopped(error, subject)


async def _work_later(work: Awaitable[bytes], subject: tuple[str, str]) -> bytes | InvalidRequest:
    try:
        return await work
    except InvalidRequest as error:
        return _stopped(error, subject)


def _stopped(error: InvalidRequest, subject: tuple[str, str]) -> InvalidRequest:
    param, sentence = subject
    return (
        InvalidRequest(f"{sentence}: checking it was stopped, {error}. Use a simpler one.", param=param) if error.code == STOPPED else error
    )


def _verdict(reply: bytes | InvalidRequest) -> _Found:
    if isinstance(reply, InvalidRequest):
        return reply
    said = msgspec.msgpack.decode(reply, type=CheckReply)
    if said.failure is not None:
        raise OctavoError(said.failure)
    if said.error is not None:
        return InvalidRequest(said.error, param=said.param, code=said.code)
    return said.checked or Checked("")


def _checked(found: _Found) -> Checked:
    if isinstance(found, InvalidRequest):
        raise InvalidRequest(str(found), param=found.param, code=found.code)
    return found


def _key(wish: object, first: bool) -> bytes:
    try:
        return hashlib.blake2b(msgspec.json.encode([wish, first]), digest_size=24).digest()
    except (TypeError, ValueError, RecursionError) as error:  # a schema that no JSON can hold
        raise InvalidRequest(f"structured_outputs cannot be read: {error}.", param="structured_outputs") from None


def wants_first(sampling: SamplingParams) -> bool:
    """Whether a request forbids tokens by other means than its grammar, so that it must be known what that begins with."""
    return sampling.structured_outputs is not None and (sampling.allowed_token_ids is not None or bool(sampling.bad_words))


def constraint_of(sampling: SamplingParams, grammar: Checked | None) -> OutputConstraint | None:
    """The constraint of a request, or None.

    Args:
        sampling: its `constraint`, if there is one, says how the model marks its reasoning.
        grammar: of its `structured_outputs`.

    Raises:
        InvalidRequest: a budget without a reasoning to limit.
    """
    wish, budget = sampling.structured_outputs, sampling.thinking_token_budget
    if wish is None and budget is None:
        return None
    marks = sampling.constraint or OutputConstraint()
    if budget is not None and not (marks.reasoning_end_ids or marks.reasoning_end):
        raise InvalidRequest(
            "thinking_token_budget needs a chat with a model whose reasoning this server recognises (see --reasoning-parser).",
            param="thinking_token_budget",
        )
    if grammar is None:
        return msgspec.structs.replace(marks, grammar="", reasoning_budget=budget)
    return msgspec.structs.replace(marks, grammar=grammar.source, cost=grammar.cost, reasoning_budget=budget)


def engine_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """What an engine core must know of the tokens. Takes up to a second.

    Args:
        vocab_size: the model's; ids past the tokenizer's stand for nothing.
    """
    special = sorted(i for i in tokenizer.special_ids if i < vocab_size)
    eos = list(eos_token_ids) or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    size = min(vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(i) for i in range(size)] + [b""] * (vocab_size - size)
    return Vocabulary(tokens, special, eos, tokenizer.backend.as_json())
