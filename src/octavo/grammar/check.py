"""The whole check of a wish: its form, and that it has any text with the tokens of a model. What a worker process does for the door.

A check with the full effort has no limit of its own on time: it is made where it can be ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import InvalidRequest
from octavo.grammar.compiler import engine_tokenizer
from octavo.grammar.effort import FULL, Effort, NeedsMore, cheap_schema
from octavo.grammar.json_schema import failing_path
from octavo.grammar.lark import in_any_tokens, json_options
from octavo.grammar.pointers import Path, pointer
from octavo.grammar.reach import emptiness, first_tokens, other_than_blanks
from octavo.grammar.source import grammar_source, json_source, parsed_schema
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import StructuredOutputsParams


class Checked(msgspec.Struct, frozen=True):
    """A grammar that can be used."""

    source: str
    first: bytes | None = None
    """A bit for each token that its texts may begin with, if that was asked for."""
    cost: int = 0
    """Milliseconds of work that the check took, where that is more than a few: compiling it takes about as long."""


class Checker:
    """Checks grammars against one vocabulary.

    Args:
        vocabulary: None if there is none to be had: then only the form is checked.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: Any = None if vocabulary is None else engine_tokenizer(vocabulary)

    def check(self, wish: StructuredOutputsParams, effort: Effort = FULL, *, first: bool = False) -> Checked:
        """What there is to know of `wish`.

        Args:
            first: also which tokens it may begin with; and its texts may be written in any tokens that spell them, not only in those that a
                tokenizer would choose.

        Raises:
            InvalidRequest: it cannot be used; for a schema the message has the path.
            NeedsMore: under an effort that is not the full one.
            NotYet: the grammar engine is not installed.
        """
        source = grammar_source(wish, effort=effort)
        tokens = None
        if self._vocabulary is not None:
            self._check_reach(wish, source, effort)
            source = in_any_tokens(source) if first else source
            tokens = first_tokens(source, self._tokenizer, self._vocabulary) if first else None
        return Checked(source, tokens)

    def _check_reach(self, wish: StructuredOutputsParams, source: str, effort: Effort) -> None:
        """Follow the grammar from its beginning, as the engine core will."""
        blanks = wish.whitespace_pattern
        if blanks is not None and not self._emptiness(other_than_blanks(blanks), effort):
            raise InvalidRequest(
                "structured_outputs.whitespace_pattern must match nothing but what JSON allows between its tokens: spaces, tabs and line "
                r"breaks, as in [ \t\n\r]*.",
                param="structured_outputs",
            )
        if wish.json is not None and not wish.disable_any_whitespace:
            # Blanks only hide a dead end: they are always allowed, so that it takes long to run out of them.
            source = grammar_source(msgspec.structs.replace(wish, disable_any_whitespace=True, whitespace_pattern=None), effort=effort)
        problem = self._emptiness(source, effort)
        if not problem:
            return
        if effort.quick:
            raise NeedsMore
        kinds = ("json_object", "json", "regex", "choice", "grammar", "structural_tag")
        kind = next(name for name in kinds if getattr(wish, name) is not None)
        what = "structured_outputs: the JSON schema" if kind.startswith("json") else f"structured_outputs.{kind}"
        if wish.json is not None:
            place, problem = self._place(wish, problem)
            problem = f"at {pointer(place)}: {problem}"
        raise InvalidRequest(f"{what} cannot be used: {problem}", param="structured_outputs")

    def _emptiness(self, source: str, effort: Effort) -> str:
        assert self._vocabulary is not None
        return emptiness(source, self._tokenizer, self._vocabulary, effort)

    def _place(self, wish: StructuredOutputsParams, problem: str) -> tuple[Path, str]:
        """The part of a schema that is to blame for what `emptiness` says of the whole."""

        def problem_of(part: Any) -> str:
            if not isinstance(part, dict):
                return ""
            try:
                return self._emptiness(json_source(part, json_options(compact=True, lenient=wish.best_effort), "structured_outputs"), FULL)
            except InvalidRequest:  # it cannot stand alone
                return ""

        return failing_path(parsed_schema(wish.json, "structured_outputs"), problem, problem_of)


def check_parameters(functions: Sequence[Mapping[str, Any]], effort: Effort = FULL) -> None:
    """Check the parameters of tools: the same whether a reply must call one, may, or is held to the schema.

    Raises:
        InvalidRequest: with the tool and the path in its schema.
        NeedsMore: under an effort that is not the full one.
        NotYet: the grammar engine is not installed.
    """
    if effort.quick and not cheap_schema({"anyOf": [function.get("parameters") for function in functions]}):
        raise NeedsMore
    for i, function in enumerate(functions):
        options = json_options(lenient=not function.get("strict"))
        try:
            json_source(function.get("parameters") or {}, options, f"tools[{i}].function.parameters", effort=effort)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param="tools") from None


# In a process of its own


class CheckJob(msgspec.Struct):
    """One of the two."""

    wish: StructuredOutputsParams | None = None
    first: bool = False
    functions: list[dict[str, Any]] | None = None


class CheckReply(msgspec.Struct):
    checked: Checked | None = None
    error: str | None = None
    param: str | None = None
    code: str | None = None
    failure: str | None = None
    """What went wrong that no wish is to blame for."""


def job_text(job: CheckJob) -> bytes:
    """A job as it is sent. In JSON as Python writes it: a schema may hold numbers of any size."""
    return json.dumps(msgspec.to_builtins(job)).encode()


def job_of(text: bytes) -> CheckJob:
    return msgspec.convert(json.loads(text), CheckJob)


def answer_check(checker: Checker, job: CheckJob) -> CheckReply:
    """The reply to a job, with what is wrong as data."""
    begun = time.process_time()
    try:
        if job.wish is None:
            check_parameters(job.functions or [])
            return CheckReply()
        checked = checker.check(job.wish, first=job.first)
    except InvalidRequest as error:
        return CheckReply(error=str(error), param=error.param, code=error.code)
    except MemoryError:
        raise
    except Exception as error:
        return CheckReply(failure=f"The grammar could not be checked: {type(error).__name__}: {str(error)[:300]}")
    return CheckReply(msgspec.structs.replace(checked, cost=int(1000 * (time.process_time() - begun))))
