"""What templates expect."""

from __future__ import annotations

import pytest

from octavo.frontend.text.template_inspection import check_template, content_format, reads_arguments_as_text
from tests.unit.text.test_chat_template import CHATML, PARTS


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "string"),
        (PARTS, "openai"),
        ("{% for m in messages %}{% for p in m.content | list %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% set c = m.content %}{% set d = c %}{% for p in d %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% macro show(x) %}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}{{ show(messages[0].content) }}", "openai"),
        (
            "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}",
            "as given",
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            "as given",
        ),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}", "string"),
    ],
)
def test_content_format_is_what_the_template_reads(template: str, expected: str) -> None:
    assert content_format(template) == expected


@pytest.mark.parametrize(
    ("template", "as_text"),
    [
        (CHATML, False),
        ("{{ call.arguments }}", True),
        ("{{ '```json' + call['function']['arguments'] + '```' }}", True),
        ("{{ 'x' ~ call.arguments }}", True),
        ("{{ call.arguments | tojson }}", False),
        ("{% for k, v in call.arguments | items %}{{ k }}{% endfor %}", False),
        ("{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}", False),
        ("{% set a = call.arguments %}{{ a }}", False),
        ("{{ call.function | tojson }}", False),
    ],
)
def test_arguments_are_text_only_where_they_are_written_out(template: str, as_text: bool) -> None:
    assert reads_arguments_as_text(template) is as_text


def test_syntax_problems() -> None:
    assert check_template("\n{% endfor %}") == "Encountered unknown tag 'endfor'. (line 2)"
    assert check_template(CHATML) is None
