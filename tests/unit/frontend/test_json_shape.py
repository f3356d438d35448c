"""What a JSON text holds is counted in its bytes as it would be counted in what a decoder makes of them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.json_shape import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_FIELDS,
    MAX_TEXTS,
    MAX_VALUES,
    TooMuch,
    check_shape,
    json_shape,
)

TEXT = st.text(alphabet=st.sampled_from('a"\\[]{}:,/bu é\n'), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int, int, int]:
    """Containers, fields, texts, empty containers, depth: the slow way."""
    if isinstance(value, str):
        return 0, 0, 1, 0, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0, 0, 0
    fields = len(value) if isinstance(value, dict) else 0
    inner = [counted(v) for v in (value.values() if isinstance(value, dict) else value)]
    containers, inner_fields, texts, empty = (sum(one[i] for one in inner) for i in range(4))
    return containers + 1, inner_fields + fields, texts + fields, empty + (not value), 1 + max((one[4] for one in inner), default=0)


def leaves_and_containers(value: Any) -> int:
    """Values in lists and objects."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values() if isinstance(value, dict) else value)
    return len(inner) + sum(map(leaves_and_containers, inner))


@given(JSON, st.booleans(), st.sampled_from([None, 1]))
@settings(max_examples=300, deadline=None)
def test_counts_are_those_of_the_decoded_value(value: Any, ascii_only: bool, indent: int | None) -> None:
    shape = json_shape(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode())
    containers, fields, texts, empty, depth = counted(value)
    assert (shape.containers, shape.fields, shape.texts, shape.depth) == (containers, fields, texts, depth)
    assert shape.values == leaves_and_containers(value) + empty


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b'{"a":[' + b"[]," * MAX_CONTAINERS + b"1]}", "objects and lists"),
        (b"[" + b"{}," * MAX_CONTAINERS + b"1]", "objects and lists"),
        (b"{" + b",".join(b'"k%d":1' % i for i in range(MAX_FIELDS + 1)) + b"}", "fields"),
        (b"[" + b'"",' * (MAX_TEXTS + 1) + b"1]", "texts"),
        (b"[" + b"1," * MAX_VALUES + b"1]", "values"),
        (b'{"a":' + b"7" * (MAX_DIGITS + 1) + b"}", "digits"),
        (b'{"a":-0.' + b"7" * (MAX_DIGITS + 1) + b"e5}", "digits"),
        (b"[" + b"9" * 4000 + b"]", "digits"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "levels"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "levels"),
        (b"[" * 200_000, "objects and lists"),  # no JSON, and never decoded
    ],
)
def test_more_than_any_request_needs_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(TooMuch, match=what):
        check_shape(data)


@pytest.mark.parametrize(
    "data",
    [
        b'["' + b"[{:," * 2_000_000 + b'"]',
        b'["' + b'\\"[' * 1_000_000 + b'"]',
        b'["\\\\", ' + b'"[", "\\\\\\"{" ,' * 30_000 + b"1]",
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]",
    ],
    ids=lambda data: data[:12].decode(),
)
def test_brackets_in_texts_do_not_count(data: bytes) -> None:
    check_shape(data)
    json.loads(data)


def test_what_follows_an_error_is_never_built() -> None:
    """A quote that ends nothing turns the rest inside out; but a decoder stops there."""
    data = b'{"a":1}" ' + b"[]," * MAX_CONTAINERS + b'"'
    check_shape(data)
    with pytest.raises(json.JSONDecodeError):
        json.loads(data)


def test_it_takes_a_fraction_of_what_decoding_takes() -> None:
    data = b"[" + b"[]," * 3_000_000 + b"1]"
    begun = time.perf_counter()
    with pytest.raises(TooMuch):
        check_shape(data)
    scanned = time.perf_counter() - begun
    begun = time.perf_counter()
    json.loads(data)
    assert scanned < time.perf_counter() - begun


@pytest.mark.parametrize("value", [10**308, -(10**319), "1" * 5000, "\\" + "1" * 5000, {"1" * 5000: [1, 2]}, float.fromhex("0x1.8p-1022")])
def test_numbers_that_can_be_read_in_a_moment_are_taken(value: Any) -> None:
    for text in (json.dumps(value), json.dumps([value, 1])):
        check_shape(text.encode())


@given(st.lists(st.integers(300, 340) | st.integers(1, 700), min_size=1, max_size=4), st.integers(0, 40))
def test_digits_are_counted_exactly(lengths: list[int], blanks: int) -> None:
    data = (" " * blanks + "[" + ",".join("5" * length for length in lengths) + "]").encode()
    if max(lengths) > MAX_DIGITS:
        with pytest.raises(TooMuch, match="digits"):
            check_shape(data)
    else:
        check_shape(data)


def test_a_body_of_long_numbers_takes_a_moment() -> None:
    """The longest that are let through, as many as a body may have."""
    data = b"[" + b",".join([b"7" * MAX_DIGITS] * (32_000_000 // (MAX_DIGITS + 1))) + b"]"
    began = time.process_time()
    check_shape(data)
    json.loads(data)
    assert time.process_time() - began < 2
