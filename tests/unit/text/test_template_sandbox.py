"""A template, whatever its arguments, ends soon and stays small."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.frontend.text import template_sandbox
from octavo.frontend.text.template_sandbox import TemplateTooExpensive, compile_template, render


def run(source: str, **variables: Any) -> str:
    return render(compile_template(source), variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * n }}",
        "{{ n * 'x' }}",
        "{{ [1] * n }}",
        "{{ 2 ** n }}",
        "{{ n ** n }}",
        "{{ 'x'.ljust(n) }}",
        "{{ '{:>{w}}'.format('x', w=n) }}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(90000) %}{{ big }}{% endfor %}",
        "{{ (big * 1000) | replace('x', big) }}",
        "{{ (big * 1000).replace('x', big) }}",
        "{{ (big * 1000).replace('', big) }}",
        "{{ ([big] * 90000) | join }}",
        "{{ ([1] * 90000) | join(big) }}",
        "{{ range(90000) | join(big) }}",
        "{{ big.join([big] * 90000) }}",
        "{{ ('\t' * 90000).expandtabs(10000) }}",
        "{{ (big * 1000) | wordwrap(1) }}",
        "{{ (big * 1000) | urlize }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (n, 1) }}",
        "{{ '{:999999999}'.format('x') }}",
    ],
)
def test_large_results_are_stopped(source: str) -> None:
    with pytest.raises(TemplateTooExpensive):
        run(source, n=10**12, big="x" * 1000)


def test_range_is_bounded() -> None:
    with pytest.raises(OverflowError):
        run("{% for i in range(n) %}{% endfor %}", n=10**6)
    assert run("{% macro f(n) %}{{ n }}{% endmacro %}{{ f(n) }}", n=10**12) == str(10**12)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_long_runs_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(TemplateTooExpensive, match="seconds"):
        run(source)


def test_widths_of_filters_are_capped() -> None:
    assert len(run("{{ 'x' | center(10**4 * 99) }}")) == template_sandbox.MAX_WIDTH
    assert len(run("{{ 'a\nb' | indent(999999999) }}")) == template_sandbox.MAX_WIDTH + 3


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("{{ 2 ** 10 }}", "1024"),
        ("{{ 'ab' * 2 }}", "abab"),
        ("{{ [1] + [2] }}", "[1, 2]"),
        ("{{ [1, 2] | join('-') }}{{ 'aa'.replace('a', 'b', 1) | replace('b', 'c') }}", "1-2ca"),
        ("{{ '%s:%d' | format('a', 3) }}{{ 7 % 4 }}", "a:33"),
        ("{{ [{'a': 1}, {'a': 2}] | join(',', attribute='a') }}{{ [1, 2] | sum }}{{ 'a b' | wordwrap(1) }}", "1,23a\nb"),
        ("{{ 3 * 4 }}", "12"),
    ],
)
def test_ordinary_arithmetic_is_not(source: str, result: str) -> None:
    assert run(source) == result


def test_the_machine_is_out_of_reach() -> None:
    for source in ("{{ ''.__class__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}", "{% include '/etc/passwd' %}"):
        with pytest.raises(Exception):  # noqa: B017 - whatever the sandbox raises, it must not render
            assert run(source, messages=[]) != ""


def test_iterating_over_what_is_not_there() -> None:
    assert run("{% for x in nothing %}a{% else %}b{% endfor %}") == "b"
    assert run("{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}{% for k in d %}{{ k }}{% endfor %}", d={"a": 1}) == "a1a"
    assert (
        run("{% for x in [[1, [2]], [3]] recursive %}{{ loop.depth }}{% if x is not number %}{{ loop(x) }}{% endif %}{% endfor %}")
        == "122312"
    )
