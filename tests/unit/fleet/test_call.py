"""What of a request says which others have the same beginning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.fleet.call import MAX_KEY, make_call, routing_key

USER = {"role": "user", "content": "What is a prefix?"}
ANSWER = {"role": "assistant", "content": "A beginning."}


@pytest.mark.parametrize("name", ["messages", "input"])
def test_a_conversation_that_goes_on_begins_as_it_did(name: str) -> None:
    short = routing_key({name: [USER]})
    assert routing_key({name: [USER, ANSWER, USER]}).startswith(short)
    assert not routing_key({name: [ANSWER, USER]}).startswith(short)


@given(st.lists(st.integers(0, 200_000), min_size=1), st.lists(st.integers(0, 200_000), min_size=1))
def test_token_ids_that_go_on_begin_as_they_did(tokens: list[int], more: list[int]) -> None:
    assert routing_key({"prompt": tokens + more}).startswith(routing_key({"prompt": tokens}))
    other = [tokens[0] + 1, *tokens[1:]]
    assert not routing_key({"prompt": other}).startswith(routing_key({"prompt": tokens}))


def test_tools_and_instructions_come_before_the_conversation() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    one, two = routing_key({"messages": [USER], "tools": tools}), routing_key({"tools": tools, "messages": [ANSWER]})
    assert one.startswith(json.dumps(tools, separators=(",", ":")).encode())
    assert one != two
    assert routing_key({"system": "Be brief.", "messages": [USER]}) != routing_key({"messages": [USER]})


def test_several_prompts_are_one_call_with_the_key_of_the_first() -> None:
    call = make_call("POST", "/v1/completions", b"", [], json.dumps({"prompt": ["one", "two"], "n": 3, "cache_salt": "s"}).encode(), None)
    assert (call.key, call.sequences, call.extra_key) == (b"one", 6, "s")
    assert make_call("POST", "/", b"", [], b'{"prompt": [[1, 2], [3]]}', None).key == routing_key({"prompt": [1, 2]})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'{"prompt": 5}', b'{"messages": "\\ud800"}', b"[" * 100_000, b'{"n": -1}', b"\xff"]
)
def test_what_is_no_request_has_no_key(body: bytes) -> None:
    call = make_call("POST", "/v1/completions", b"", [], body, None)
    assert call.body == body
    assert call.sequences == 1
    assert len(call.key) < 10


def test_only_so_much_of_a_prompt_is_looked_at() -> None:
    assert len(routing_key({"prompt": "x" * (2 * MAX_KEY)})) == MAX_KEY


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["messages", "prompt", "tools", "n", "system"]), inner),
    )
)
def test_nothing_in_a_body_ends_the_router(body: Any) -> None:
    assert make_call("POST", "/", b"", [], json.dumps(body).encode(), None).sequences >= 1
