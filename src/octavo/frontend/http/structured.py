"""From a request's fields to `StructuredOutputsParams`: response_format, structured_outputs, and the older guided_* names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.schemas import GenerationRequest
from octavo.protocol.params import StructuredOutputsParams

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
FORMATS = ("text", "json_object", "json_schema", "structural_tag", "regex", "grammar")


@dataclass(frozen=True)
class Wish:
    """What the output must be like, and which field said so."""

    params: StructuredOutputsParams
    field: str

    @property
    def param(self) -> str:
        """The request's field, without the place in it."""
        return self.field.partition(".")[0]

    async def check(self, llm: AsyncLLM, client: str) -> StructuredOutputsParams:
        """The parameters, once they are known to be usable.

        Args:
            client: who asks.

        Raises:
            InvalidRequest: they are not; the message begins with the field, and has the path in a schema.
            NotYet: this server has no grammar engine.
        """
        try:
            await llm.check_structured_outputs(self.params, client)
        except InvalidRequest as error:
            raise InvalidRequest(str(error).replace("structured_outputs", self.field, 1), param=self.param) from None
        return self.params


def wish_of(body: GenerationRequest) -> Wish | None:
    """What `body` asks for; None for free text.

    Raises:
        InvalidRequest: more than one wish, or one that is malformed.
    """
    wishes = [*_response_format(body), *_structured_outputs(body), *_guided(body)]
    if len(wishes) > 1:
        fields = ", ".join(wish.field for wish in wishes)
        raise InvalidRequest(f"Only one of these can be given: {fields}.", param=wishes[1].param)
    if wishes and body.use_beam_search:
        raise InvalidRequest(f"use_beam_search cannot be combined with {wishes[0].field}.", param="use_beam_search")
    return wishes[0] if wishes else None


def _response_format(body: GenerationRequest) -> list[Wish]:
    given = body.response_format
    if given is None:
        return []
    match kind := given.get("type"):
        case "text":
            return []
        case "json_object":
            return [Wish(StructuredOutputsParams(json_object=True), "response_format")]
        case "json_schema":
            holder = given.get("json_schema")
            schema = holder.get("schema") if isinstance(holder, dict) else None
            if not isinstance(schema, dict | bool):
                raise InvalidRequest(
                    "response_format of type json_schema needs json_schema.schema, a JSON schema.", param="response_format"
                )
            strict = holder.get("strict") if isinstance(holder, dict) else None
            if not isinstance(strict, bool | None):
                raise InvalidRequest("response_format.json_schema.strict must be true or false.", param="response_format")
            wish = StructuredOutputsParams(json=_object(schema), best_effort=not strict)
            return [Wish(wish, "response_format.json_schema.schema")]
        case "structural_tag":
            return [Wish(StructuredOutputsParams(structural_tag={k: v for k, v in given.items() if k != "type"}), "response_format")]
        case "regex" | "grammar":
            text = given.get("pattern" if kind == "regex" else "grammar")
            if not isinstance(text, str):
                raise InvalidRequest(f"response_format of type {kind} needs its text.", param="response_format")
            fields: dict[str, Any] = {kind: text}
            return [Wish(StructuredOutputsParams(**fields), "response_format")]
    raise InvalidRequest(f"response_format.type must be one of {', '.join(FORMATS)}, got {short_repr(kind)}.", param="response_format")


def _structured_outputs(body: GenerationRequest) -> list[Wish]:
    if body.structured_outputs is None:
        return []
    given = {k: v for k, v in body.structured_outputs.items() if v is not None}
    known = StructuredOutputsParams.__struct_fields__
    if unknown := sorted(given.keys() - set(known)):
        raise InvalidRequest(
            f"structured_outputs has no field {short_repr(unknown[0])}; it has {', '.join(known)}.", param="structured_outputs"
        )
    for name in ("disable_any_whitespace", "disable_additional_properties", "best_effort", "json_object"):
        if not isinstance(given.get(name, False), bool):
            raise InvalidRequest(f"structured_outputs.{name} must be true or false.", param="structured_outputs")
    if not isinstance(given.get("whitespace_pattern", ""), str):
        raise InvalidRequest("structured_outputs.whitespace_pattern must be a string.", param="structured_outputs")
    if isinstance(given.get("json"), bool):
        given["json"] = _object(given["json"])
    return [Wish(StructuredOutputsParams(**given), "structured_outputs")]


def _guided(body: GenerationRequest) -> list[Wish]:
    wishes = []
    for field, name in GUIDED.items():
        value: Any = getattr(body, field)
        if value is not None:
            pattern = body.guided_whitespace_pattern
            wishes.append(
                Wish(StructuredOutputsParams(**{name: _object(value) if name == "json" else value}, whitespace_pattern=pattern), field)
            )
    return wishes


def _object(schema: Any) -> Any:
    """The schema `true` as the object that means the same."""
    return {} if schema is True else schema
