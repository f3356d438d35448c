"""Structured output at the door: from what a request asks for to the constraint that the core enforces.

Grammars are checked here, with a time limit where an event loop must not wait, and remembered, so that the second request with a
schema pays nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import InvalidRequest, OctavoError
from octavo.grammar.compiler import engine_tokenizer
from octavo.grammar.json_schema import Path, failing_path, pointer
from octavo.grammar.lark import json_options
from octavo.grammar.reach import emptiness, other_than_blanks
from octavo.grammar.source import grammar_source, json_source, parsed_schema
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import OutputConstraint, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from octavo.frontend.text.tokenizer import Tokenizer

TIME_LIMIT = 10.0
"""Seconds that the check of one grammar may take. The engine's own limits stop it after about one; a busy machine is slower."""
MAX_REMEMBERED = 512
CHECK_THREADS = 2


class GrammarDoor:
    """Checks structured output wishes and remembers the answers. Safe to call from any thread.

    Args:
        vocabulary: the model's, when it is needed: a grammar may be well formed and yet have no first token. None if there is none to
            be had: then only the form is checked.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: tuple[Any, Vocabulary] | None = None
        self._tokenizer_lock = threading.Lock()
        self._known: OrderedDict[bytes, str | OctavoError] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def source(self, wish: StructuredOutputsParams) -> str:
        """The grammar of `wish`; takes as long as checking it takes.

        Raises:
            InvalidRequest: it cannot be used; for a schema the message has the path.
            NotYet: the grammar engine is not installed.
        """
        key = _key(wish)
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
        if found is None:
            try:
                found = grammar_source(wish)
                self._check_reach(wish, found)
            except InvalidRequest as error:
                found = error
            with self._lock:
                self._known[key] = found
                while len(self._known) > MAX_REMEMBERED:
                    self._known.popitem(last=False)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(str(found), param=found.param, code=found.code)
        assert isinstance(found, str)
        return found

    def _check_reach(self, wish: StructuredOutputsParams, source: str) -> None:
        """Follow the grammar from its beginning, as the engine core will."""
        if self._vocabulary is None:
            return
        with self._tokenizer_lock:
            if self._tokenizer is None:
                vocabulary = self._vocabulary()
                self._tokenizer = engine_tokenizer(vocabulary), vocabulary
        if wish.whitespace_pattern is not None and not emptiness(other_than_blanks(wish.whitespace_pattern), *self._tokenizer):
            raise InvalidRequest(
                "structured_outputs.whitespace_pattern must match nothing but what JSON allows between its tokens: spaces, tabs and line "
                r"breaks, as in [ \t\n\r]*.",
                param="structured_outputs",
            )
        if wish.json is not None and not wish.disable_any_whitespace:
            # Blanks only hide a dead end: they are always allowed, so that it takes long to run out of them.
            source = grammar_source(msgspec.structs.replace(wish, disable_any_whitespace=True, whitespace_pattern=None))
        problem = emptiness(source, *self._tokenizer)
        if problem:
            kind = next(
                name for name in ("json_object", "json", "regex", "choice", "grammar", "structural_tag") if getattr(wish, name) is not None
            )
            what = "structured_outputs: the JSON schema" if kind.startswith("json") else f"structured_outputs.{kind}"
            if wish.json is not None:
                place, problem = self._place(wish, problem)
                problem = f"at {pointer(place)}: {problem}"
            raise InvalidRequest(f"{what} cannot be used: {problem}", param="structured_outputs")

    def _place(self, wish: StructuredOutputsParams, problem: str) -> tuple[Path, str]:
        """The part of a schema that is to blame for what `emptiness` says of the whole."""
        schema = parsed_schema(wish.json, "structured_outputs")
        assert self._tokenizer is not None
        tokenizer, vocabulary = self._tokenizer

        def problem_of(part: Any) -> str:
            if not isinstance(part, dict):
                return ""
            try:
                return emptiness(json_source(part, json_options(compact=True), "structured_outputs"), tokenizer, vocabulary)
            except InvalidRequest:  # it cannot stand alone
                return ""

        return failing_path(schema, problem, problem_of)

    async def prepare(self, wish: StructuredOutputsParams) -> None:
        """Check `wish` in a thread, so that `source` answers at once.

        Raises:
            InvalidRequest, NotYet: see `source`; or the check took too long.
        """
        await self._in_time(self.source, wish, what="structured_outputs: checking the grammar", param="structured_outputs")

    async def prepare_parameters(self, functions: Sequence[Mapping[str, Any]]) -> None:
        """Check the parameters of tools in a thread: the same whether a reply must call one, may, or is held to the schema.

        Raises:
            InvalidRequest: with the tool and the path in its schema; or the check took too long.
            NotYet: the grammar engine is not installed.
        """
        key = _key([[function.get("parameters"), bool(function.get("strict"))] for function in functions])
        with self._lock:
            if self._known.get(key) == "":
                return
        await self._in_time(self._check_parameters, functions, what="tools: checking the parameters", param="tools")
        with self._lock:
            self._known[key] = ""

    @staticmethod
    def _check_parameters(functions: Sequence[Mapping[str, Any]]) -> None:
        for i, function in enumerate(functions):
            options = json_options(lenient=not function.get("strict"))
            try:
                json_source(function.get("parameters") or {}, options, f"tools[{i}].function.parameters")
            except InvalidRequest as error:
                raise InvalidRequest(str(error), param="tools") from None

    async def _in_time(self, check: Callable[[Any], object], subject: object, *, what: str, param: str) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="octavo-schema")
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.run_in_executor(self._pool, check, subject), TIME_LIMIT)
        except TimeoutError:
            raise InvalidRequest(f"{what} took longer than {TIME_LIMIT:.0f} seconds. Use a simpler one.", param=param) from None


def _key(wish: object) -> bytes:
    try:
        return msgspec.json.encode(wish)
    except (TypeError, ValueError, RecursionError) as error:  # a schema that no JSON can hold
        raise InvalidRequest(f"structured_outputs cannot be read: {error}.", param="structured_outputs") from None


def constraint_of(sampling: SamplingParams, door: GrammarDoor) -> OutputConstraint | None:
    """The constraint of a request, or None.

    Args:
        sampling: its `constraint`, if there is one, says how the model marks its reasoning.

    Raises:
        InvalidRequest, NotYet: see `GrammarDoor.source`; or a budget without a reasoning to limit.
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
    return msgspec.structs.replace(marks, grammar="" if wish is None else door.source(wish), reasoning_budget=budget)


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
