"""Which field of a request is named where its constraint fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.core.constraint import blamed
from octavo.protocol.params import OutputConstraint, SamplingParams


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (None, None),
        (OutputConstraint(reasoning_budget=2, reasoning_end="</t>"), "thinking_token_budget"),
        (OutputConstraint(grammar="start: /a/", reasoning_budget=2), "structured_outputs"),
        (OutputConstraint(grammar="start: /a/", field="response_format.json_schema"), "response_format"),
    ],
)
def test_the_field_is_one_that_the_request_has(constraint: OutputConstraint | None, field: str | None) -> None:
    request = SimpleNamespace(sampling=SamplingParams(constraint=constraint))
    assert blamed(cast(Any, request)) == field
