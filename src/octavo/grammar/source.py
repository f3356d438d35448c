"""From `StructuredOutputsParams` to the text of a grammar, with every refusal made here, at the door.

Nothing here needs the model: a grammar is checked for form and size by the engine without a vocabulary. `check` says what that may cost,
and where it is done.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.errors import InvalidRequest
from octavo.grammar.depth import depth_problem, too_deep
from octavo.grammar.effort import FULL, MAX_GRAMMAR_SIZE, Effort, NeedsMore, cheap_rules
from octavo.grammar.gbnf import in_lark, is_gbnf
from octavo.grammar.json_schema import endless, failing_path, prepared
from octavo.grammar.lark import choices, inline_json, json_options
from octavo.grammar.library import llguidance, one_line
from octavo.grammar.pointers import Path, pointer
from octavo.grammar.rules import in_gbnf, never_ends, parts_of, with_string_options
from octavo.grammar.size import too_large
from octavo.grammar.stack import on_deep_stack
from octavo.grammar.structural_tag import structural_tag_grammar
from octavo.grammar.unkept import pattern_problem, string_options, unkept
from octavo.protocol.params import StructuredOutputsParams

MAX_GRAMMAR_CHARS = 1 << 20
TOO_LARGE = f"it is too large: more than {MAX_GRAMMAR_SIZE} symbols as a grammar, about 8 for each property. Use a smaller one."
MAX_CHOICES = 10_000
MAX_WHITESPACE_CHARS = 256


def grammar_source(wish: StructuredOutputsParams, param: str = "structured_outputs", effort: Effort = FULL) -> str:
    """The grammar that `wish` asks for.

    Args:
        param: the request's field, for error messages.

    Raises:
        InvalidRequest: malformed, too large, or not supported; a schema's message has the path of the problem.
        NeedsMore: under an effort that is not the full one.
        NotYet: the grammar engine is not installed.
    """
    if len(wish.whitespace_pattern or "") > MAX_WHITESPACE_CHARS:
        raise InvalidRequest(
            f"{param}.whitespace_pattern has {len(wish.whitespace_pattern or '')} characters; {MAX_WHITESPACE_CHARS} are allowed.",
            param=param,
        )
    if problem := pattern_problem(wish.whitespace_pattern or ""):
        raise InvalidRequest(f"{param}.whitespace_pattern cannot be used: {problem}.", param=param)
    options = json_options(compact=wish.disable_any_whitespace, pattern=wish.whitespace_pattern, lenient=wish.best_effort)
    if wish.json is not None:
        return json_source(parsed_schema(wish.json, param), options, param, closed=wish.disable_additional_properties, effort=effort)
    if wish.json_object is not None:
        if not wish.json_object:
            raise InvalidRequest(f"{param}.json_object must be true (or left out).", param=param)
        return json_source({"type": "object"}, options, param, effort=effort)
    if wish.regex is not None:
        pattern = _text(wish.regex, "regex", param)
        if problem := pattern_problem(pattern):
            raise InvalidRequest(f"{param}.regex cannot be used: {problem}.", param=param)
        source = llguidance().LLMatcher.grammar_from_regex(pattern)
        return _checked_source(source, f"{param}.regex", param, effort)
    if wish.choice is not None:
        return _choice_source(wish.choice, param, effort)
    if wish.grammar is not None:
        return _grammar(_text(wish.grammar, "grammar", param), param, effort)
    if effort.quick:
        raise NeedsMore
    text, schemas = structural_tag_grammar(_document(wish.structural_tag, param), options, param, lambda source: _problem(source, FULL))
    what = f"{param}.structural_tag"
    for place, schema in schemas:
        if (bad := too_large(schema) or unkept(schema)) is not None:
            raise InvalidRequest(f"{what}: {place}: the JSON schema cannot be used: at {pointer(bad[0])}: {bad[1]}", param=param)
    try:
        return _checked_source(llguidance().LLMatcher.grammar_from_lark(text), what, param, effort)
    except InvalidRequest:
        _blame(schemas, options, what, param)
        raise


def _blame(schemas: Sequence[tuple[str, Any]], options: dict[str, Any], what: str, param: str) -> None:
    """Say which of the schemas in a grammar is at fault, and where in it, if one is.

    Args:
        schemas: each with its place.
    """
    for place, schema in schemas:
        try:
            json_source(schema, options, f"{what}: {place}")
        except InvalidRequest as blamed:
            raise InvalidRequest(str(blamed), param=param) from None


def parsed_schema(schema: Any, param: str) -> Any:
    """A schema given as an object or as JSON text.

    Raises:
        InvalidRequest: it is no JSON, or no schema.
    """
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"{param}: the schema has more than {MAX_GRAMMAR_CHARS} characters.", param=param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as e:
            raise InvalidRequest(f"{param}: the JSON schema is not valid JSON: {e}.", param=param) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{param}: a JSON schema is an object, got {type(schema).__name__}.", param=param)
    if schema is False:
        raise InvalidRequest(f"{param}: the JSON schema `false` allows nothing.", param=param)
    return schema


def json_source(schema: Any, options: dict[str, Any], param: str, *, closed: bool = False, effort: Effort = FULL) -> str:
    """The grammar of the JSON texts that a schema allows.

    Raises:
        InvalidRequest: with the path in the schema.
        NeedsMore: under an effort that is not the full one.
    """
    matcher = llguidance().LLMatcher
    schema = {} if schema is True else schema

    def source(part: Any) -> str:
        copied = prepared(part, closed=closed, lenient=bool(options.get("lenient")))
        text: str = matcher.grammar_from_json_schema(json.dumps(copied), overrides={**options, **string_options(copied)})
        return text

    def problem_of(part: Any) -> str:
        try:
            return _problem(source(part), FULL) if isinstance(part, dict) else ""
        except (ValueError, RecursionError) as e:
            return str(e)

    if (large := too_large(schema)) is not None:
        raise InvalidRequest(f"{param}: the JSON schema cannot be used: at {pointer(large[0])}: {large[1]}", param=param)
    try:
        text = source(schema)
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(f"{param}: the JSON schema cannot be used: {e}.", param=param) from None
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param}: the schema has more than {MAX_GRAMMAR_CHARS} characters.", param=param)
    if (deep := too_deep(schema)) is not None:
        raise InvalidRequest(f"{param}: the JSON schema cannot be used: at {pointer(deep[0])}: {deep[1]}", param=param)
    copied = prepared(schema, closed=closed, lenient=bool(options.get("lenient")))
    if (lost := unkept(copied)) is not None:
        raise InvalidRequest(f"{param}: the JSON schema cannot be used: at {pointer(lost[0])}: {lost[1]}", param=param)
    check_ends(schema, param)
    if problem := _problem(text, effort):
        path: Path = ()
        if problem != TOO_LARGE:
            path, problem = failing_path(schema, problem, problem_of)
        raise InvalidRequest(f"{param}: the JSON schema cannot be used: at {pointer(path)}: {problem}", param=param)
    return text


def check_ends(schema: Any, param: str) -> None:
    """Refuse a schema of which a part needs itself without end.

    Raises:
        InvalidRequest: with the path in the schema.
    """
    if (path := endless(schema)) is not None:
        raise InvalidRequest(
            f"{param}: the JSON schema cannot be used: at {pointer(path)}: no text can match it, since it refers to itself without end.",
            param=param,
        )


def check_lenient(schema: Any, param: str) -> None:
    """Refuse a schema that cannot be used even where keywords may be left out (parameters of tools).

    Raises:
        InvalidRequest: with the path in the schema.
    """
    json_source(schema, json_options(lenient=True), param)


def _choice_source(choice: Any, param: str, effort: Effort) -> str:
    if not isinstance(choice, list | tuple) or not choice or not all(isinstance(c, str) and c for c in choice):
        raise InvalidRequest(f"{param}.choice must be a non-empty list of non-empty strings.", param=param)
    if len(choice) > MAX_CHOICES:
        raise InvalidRequest(f"{param}.choice has {len(choice)} entries; {MAX_CHOICES} are allowed.", param=param)
    if (chars := sum(map(len, choice))) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param}.choice has {chars} characters in all; {MAX_GRAMMAR_CHARS} are allowed.", param=param)
    return _checked_source(llguidance().LLMatcher.grammar_from_lark(choices(choice)), f"{param}.choice", param, effort)


def _grammar(text: str, param: str, effort: Effort) -> str:
    """Lark, or GBNF/EBNF with `::=`."""
    library, what, given = llguidance(), f"{param}.grammar", text
    if is_gbnf(text):
        if effort.quick:
            raise NeedsMore
        text = in_lark(text, what, param)
    parts = parts_of(text)
    if effort.quick and not cheap_rules(parts.rest, [schema for _, schema in parts.schemas]):
        raise NeedsMore
    if rule := never_ends(parts.rest):
        rule = "root" if text is not given else rule
        raise InvalidRequest(f"{what} cannot be used: no text can match it, since the rule {rule!r} needs itself without end.", param=param)
    for line, schema in parts.schemas:
        if (lost := unkept(schema)) is not None:
            raise InvalidRequest(f"{what} cannot be used: the JSON schema in line {line}, at {pointer(lost[0])}: {lost[1]}", param=param)
    source: str = library.LLMatcher.grammar_from_lark(with_string_options(text))
    if problem := _problem(source, effort):
        # Other errors name a line; one in a schema is a long way from the beginning of its line.
        _blame([(f"line {line}", schema) for line, schema in parts.schemas], {}, what, param)
        raise InvalidRequest(f"{what} cannot be used: {problem if text is given else in_gbnf(problem, given, text)}", param=param)
    return source


def _checked_source(source: str, what: str, param: str, effort: Effort) -> str:
    if problem := _problem(source, effort):
        raise InvalidRequest(f"{what} cannot be used: {problem}", param=param)
    return source


def _problem(source: str, effort: Effort) -> str:
    """What there is to say against a grammar; "" when it is fine."""
    problem = depth_problem(source) or _engine_problem(source, effort)
    if problem and effort.quick:
        raise NeedsMore
    return problem


def _engine_problem(source: str, effort: Effort) -> str:
    failed, messages = on_deep_stack(_validate, source, effort)
    if failed and ("grammar size (number of symbols) too big" in messages[0] or "schema too large" in messages[0]):
        return TOO_LARGE
    return one_line(messages[0]) if failed else ""


def _validate(source: str, effort: Effort) -> tuple[bool, list[str]]:
    answer: tuple[bool, list[str]] = llguidance().LLMatcher.validate_grammar_with_warnings(source, None, limits=effort.limits())
    return answer


def _text(value: Any, name: str, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}.{name} must be a non-empty string.", param=param)
    if len(value) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param}.{name} has more than {MAX_GRAMMAR_CHARS} characters.", param=param)
    return value


def _document(value: Any, param: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(_text(value, "structural_tag", param))
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{param}.structural_tag holds half of a surrogate pair, which is no character.", param=param) from None
        except RecursionError:
            raise InvalidRequest(f"{param}.structural_tag is nested too deeply.", param=param) from None
        except ValueError as e:
            raise InvalidRequest(f"{param}.structural_tag is not valid JSON: {e}.", param=param) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param}.structural_tag must be an object, or one as JSON text.", param=param)
    return value


__all__ = ["check_ends", "check_lenient", "grammar_source", "inline_json", "json_source", "parsed_schema"]
