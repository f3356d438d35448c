"""Templates of requests run in processes that can be killed: whatever one does, it ends soon, alone, and with an error for its sender."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import EngineDead, InvalidRequest
from octavo.frontend.jobs.process import BUSY_FACTOR
from octavo.frontend.text.chat_template import ChatTemplates
from octavo.frontend.text.conversation_text import Conversation, rendered
from octavo.frontend.text.template_process import ROOM, TemplateProcesses
from octavo.frontend.text.template_sandbox import MAX_SECONDS

TEMPLATES = ChatTemplates({"default": "M:{{ messages[0].content }}"}, {"bos_token": "<s>"})
MESSAGES = [{"role": "user", "content": 'hi 😀 é \\ "'}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


SECONDS = 2.0
"""Of work, after which a rendering is ended here."""


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    processes = TemplateProcesses()
    processes.pool._room = dataclasses.replace(ROOM, seconds=SECONDS)
    yield processes
    processes.close()


def run(processes: TemplateProcesses, template: str, **fields: Any) -> str:
    return asyncio.run(processes.render(TEMPLATES, Conversation(MESSAGES, chat_template=template, **fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "hide_tools": True},
        {"tools": [TOOL], "tool_parser": "hermes"},
        {"tools": [TOOL], "tool_parser": "none"},
        {"template_kwargs": {"mood": 10**30}},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
)
@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ messages[-1].content }}{{ mood }}{{ add_generation_prompt }}",
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ tools | tojson }}",
    ],
)
def test_the_text_is_what_this_process_would_write(processes: TemplateProcesses, template: str, fields: dict[str, Any]) -> None:
    conversation = Conversation(MESSAGES, chat_template=template, **fields)
    assert asyncio.run(processes.render(TEMPLATES, conversation)) == rendered(TEMPLATES, conversation)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ x", "not valid"),
        ("{{ raise_exception('no') }}", "refuses these messages: no"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "nested too deep"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "The chat template"),
        ("{{ ''.__class__ }}{{ ().__class__.__base__.__subclasses__() }}", "The chat template"),
    ],
)
def test_errors_are_those_of_the_template(processes: TemplateProcesses, template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        run(processes, template)
    assert error.value.param == "chat_template"
    assert len(str(error.value)) < 700


BOMBS = {
    "nested 60 times": "{% set x=namespace(v=[1]) %}{% for i in range(60) %}{% set x.v = [x.v,x.v] %}{% endfor %}{{ x.v|tojson|length }}",
    "nested, as text": "{% set x=namespace(v=[1]) %}{% for i in range(60) %}{% set x.v = [x.v,x.v] %}{% endfor %}{{ x.v|string|length }}",
    "nested, printed": "{% set x=namespace(v=[1]) %}{% for i in range(40) %}{% set x.v = [x.v,x.v] %}{% endfor %}{{ x.v|pprint|length }}",
    "nested, compared": "{% set x=namespace(v=[1], w=[1]) %}{% for i in range(60) %}{% set x.v = [x.v,x.v] %}{% set x.w = [x.w,x.w] %}"
    "{% endfor %}{{ x.v == x.w }}",
    "sum of lists": "{{ ([[1]*4000]*4000)|sum(start=[])|length }}",
    "squares": "{% set x=namespace(v=10) %}{% for i in range(40) %}{% set x.v = x.v*x.v %}{% endfor %}{{ x.v|string|length }}",
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "memory": "{% set x=namespace(v=[]) %}{% for i in range(90000) %}{% set x.v = x.v + [[i]*16000000] %}{% endfor %}{{ x.v|length }}",
}


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS)
def test_no_template_lives_long(processes: TemplateProcesses, template: str) -> None:
    async def both() -> tuple[BaseException | str, float, float]:
        """The bomb's end, how long it took, and the longest time that this process stood still."""
        loop, gap, begun = asyncio.get_running_loop(), 0.0, time.monotonic()
        bomb = loop.create_task(processes.render(TEMPLATES, Conversation(MESSAGES, chat_template=template)))
        while not bomb.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gap = max(gap, time.monotonic() - before)
        return bomb.exception() or bomb.result(), time.monotonic() - begun, gap

    ending, seconds, gap = asyncio.run(both())
    assert isinstance(ending, InvalidRequest)
    assert "stopped" in str(ending) or "failed" in str(ending)
    assert seconds < BUSY_FACTOR * SECONDS + 10  # a worker may have to be started first, on a busy machine
    assert gap < 2.0
    assert run(processes, "{{ messages | length }}") == "1"


def test_two_at_a_time_and_the_others_wait(processes: TemplateProcesses) -> None:
    async def many() -> list[str]:
        wishes = [Conversation(MESSAGES, chat_template="{{ n }}", template_kwargs={"n": n}) for n in range(20)]
        return await asyncio.gather(*(processes.render(TEMPLATES, wish) for wish in wishes))

    assert asyncio.run(many()) == [str(n) for n in range(20)]


def test_a_worker_that_was_killed_is_replaced_and_closing_ends_what_runs() -> None:
    processes = TemplateProcesses()
    try:
        assert run(processes, "{{ 1 }}") == "1"
        (pid,) = processes.pool.pids
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert run(processes, "{{ 2 }}") == "2"

        async def closed_meanwhile() -> None:
            bomb = asyncio.ensure_future(processes.render(TEMPLATES, Conversation(MESSAGES, chat_template=BOMBS["nested 60 times"])))
            await asyncio.sleep(0.5)
            begun = time.monotonic()
            processes.close()
            with pytest.raises(EngineDead):
                await bomb
            assert time.monotonic() - begun < MAX_SECONDS / 2

        asyncio.run(closed_meanwhile())
    finally:
        processes.close()
