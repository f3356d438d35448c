"""`AsyncLLM` over the real engine process, core and a scripted worker."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from octavo import (
    AsyncLLM,
    BeamSearchParams,
    EngineDead,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from octavo.errors import CheckpointError, ConfigError, ModelNotFound
from octavo.frontend.outputs import FinishedRequest
from tests.support.engine_client import ROOT
from tests.support.scripts import scripted_args, token_ids

SAYS = "Hello world, how are you?"
DELTA = RequestOutputKind.DELTA
LONG = SamplingParams(max_tokens=400, output_kind=DELTA)


def rules(folder: Path) -> list[dict[str, Any]]:
    return [
        {"prompt_contains_ids": token_ids("slow"), "tokens": token_ids("abcde"), "cycle": True, "delay_ms": 10},
        {"prompt_contains_ids": token_ids("bad"), "tokens": token_ids("xyz"), "fail": {"at_output": 2, "how": "error", "message": "NaN."}},
        {
            "prompt_contains_ids": token_ids("crash once"),
            "tokens": token_ids("before and after"),
            "delay_ms": 10,
            "fail": {"at_output": 7, "how": "exit", "once_file": str(folder / "crashed")},
        },
        {"prompt_contains_ids": token_ids("poison"), "tokens": token_ids("xyz"), "fail": {"at_output": 0, "how": "exit"}},
        {"prompt_contains_ids": token_ids("freeze"), "tokens": token_ids("xyz"), "fail": {"at_output": 1, "how": "hang"}},
    ]


@pytest_asyncio.fixture
async def llm(tmp_path: Path) -> AsyncIterator[AsyncLLM]:
    args = scripted_args(tmp_path, default=SAYS, rules=rules(tmp_path), engine_hang_timeout=1.0)
    async with await AsyncLLM.start(args) as llm:
        yield llm


async def collect(stream: AsyncIterator[RequestOutput]) -> tuple[str, RequestOutput]:
    text = ""
    async for output in stream:
        text += "".join(o.text for o in output.outputs)
    return text, output


async def idle(llm: AsyncLLM, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            stats = await llm.ping()
            if (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0):
                return
            await asyncio.sleep(0.02)


async def test_streams(llm: AsyncLLM) -> None:
    text, last = await collect(llm.generate("hi", SamplingParams(max_tokens=100, output_kind=DELTA), "r1"))
    assert text == SAYS
    assert (last.request_id, last.finished, last.prompt) == ("r1", True, "hi")
    assert last.metrics is not None
    assert 0 < last.metrics.queued <= last.metrics.scheduled <= last.metrics.first_token <= last.metrics.last_token
    final = await (await llm.submit("hi", SamplingParams(max_tokens=100, output_kind=RequestOutputKind.FINAL_ONLY))).final()
    assert final.outputs[0].text == SAYS


async def test_many_at_once(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=60, output_kind=DELTA)
    results = await asyncio.gather(*(collect(llm.generate(f"slow {i}" if i % 2 else "hi", params)) for i in range(20)))
    assert [text for text, _ in results] == [("abcde" * 12) if i % 2 else SAYS for i in range(20)]
    await idle(llm)


async def test_what_is_refused_is_refused_before_anything_is_queued(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await llm.submit("")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest):
        await anext(llm.generate("hi", SamplingParams(logit_bias={10**6: 1})))
    assert llm.live_requests() == 0


async def test_an_id_in_use_is_refused_and_free_again_afterwards(llm: AsyncLLM) -> None:
    stream = await llm.submit("slow", LONG, "same")
    with pytest.raises(InvalidRequest, match="same") as caught:
        await llm.submit("hi", LONG, "same")
    assert caught.value.param == "request_id"
    await anext(stream)
    stream.close()
    text, _ = await collect(llm.generate("hi", SamplingParams(max_tokens=100, output_kind=DELTA), "same"))
    assert text == SAYS


async def test_closing_the_iterator_aborts(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate("slow", LONG)) as stream:  # type: ignore[type-var]
        await anext(stream)
    assert llm.live_requests() == 0
    await idle(llm)


async def test_cancelling_the_reader_aborts(llm: AsyncLLM) -> None:
    task = asyncio.create_task(collect(llm.generate("slow", LONG)))
    while llm.live_requests() == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(llm)


async def test_letting_go_of_a_stream_aborts(llm: AsyncLLM) -> None:
    stream = await llm.submit("slow", LONG)
    await anext(stream)
    del stream
    gc.collect()
    await idle(llm)
    assert llm.live_requests() == 0


async def test_abort_by_id_ends_the_stream(llm: AsyncLLM) -> None:
    stream = await llm.submit("slow", LONG, "r")
    first = await anext(stream)
    await llm.abort("r")
    await llm.abort("r")
    await llm.abort("nobody")
    rest, last = await collect(stream)
    assert (last.outputs[0].finish_reason, last.finished) == ("abort", True)
    assert "abcde".startswith((first.outputs[0].text + rest)[:5])
    await idle(llm)


async def test_abort_while_queued(tmp_path: Path) -> None:
    args = scripted_args(tmp_path, rules=rules(tmp_path), max_num_seqs=1)
    async with await AsyncLLM.start(args) as llm:
        running = await llm.submit("slow", LONG)
        await anext(running)
        queued = await llm.submit("hi", LONG, "queued")
        await asyncio.sleep(0.05)
        queued.close()
        running.close()
        await idle(llm)


async def test_siblings_stop_for_themselves(llm: AsyncLLM) -> None:
    params = SamplingParams(n=3, max_tokens=50, stop="world", output_kind=RequestOutputKind.FINAL_ONLY)
    final = await (await llm.submit("hi", params)).final()
    assert [(o.index, o.text, o.stop_reason) for o in final.outputs] == [(i, "Hello ", "world") for i in range(3)]
    await idle(llm)


async def test_a_stop_string_ends_it_even_when_nobody_reads(llm: AsyncLLM) -> None:
    stream = await llm.submit("slow", SamplingParams(max_tokens=400, stop="eab", output_kind=DELTA))
    await idle(llm)
    text, last = await collect(stream)
    assert (text, last.outputs[0].stop_reason) == ("abcd", "eab")


async def test_a_slow_reader_gets_everything_in_one_piece(llm: AsyncLLM) -> None:
    stream = await llm.submit("hi", SamplingParams(max_tokens=100, output_kind=DELTA))
    await idle(llm)
    outputs = [output async for output in stream]
    assert [o.outputs[0].text for o in outputs] == [SAYS]


async def test_a_failed_request_raises_in_its_own_stream_only(llm: AsyncLLM) -> None:
    good = asyncio.create_task(collect(llm.generate("hi", SamplingParams(max_tokens=100, output_kind=DELTA))))
    with pytest.raises(RequestFailed, match=r"NaN\."):
        await collect(llm.generate("bad", LONG))
    assert (await good)[0] == SAYS
    await idle(llm)


async def test_long_prompts_are_tokenized_too(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await llm.submit("x" * 5000)
    assert caught.value.code == "context_length_exceeded"
    stream = await llm.submit("x" * 5000, SamplingParams(max_tokens=10), truncate_prompt_tokens=-1)
    assert len(stream.prompt_token_ids) == 502
    assert (await stream.final()).finished


async def test_listeners_hear_of_every_end(llm: AsyncLLM) -> None:
    heard: list[FinishedRequest] = []

    def broken(finished: FinishedRequest) -> None:
        raise ValueError("listener")

    llm.add_listener(broken)
    llm.add_listener(heard.append)
    await collect(llm.generate("hi", SamplingParams(max_tokens=3, output_kind=DELTA), "a"))
    await collect(llm.generate("hi", SamplingParams(max_tokens=50, stop="w", output_kind=DELTA), "b"))
    with pytest.raises(RequestFailed):
        await collect(llm.generate("bad", LONG, "c"))
    stream = await llm.submit("slow", LONG, "d")
    await anext(stream)
    stream.close()
    assert [(f.request_id, f.finish_reasons) for f in heard] == [("a", ("length",)), ("b", ("stop",)), ("c", ("error",)), ("d", ("abort",))]
    assert heard[0].num_output_tokens == 3
    assert len(heard[0].token_gaps) == 2


async def test_a_beam_search_is_a_request_like_any_other(llm: AsyncLLM) -> None:
    heard: list[FinishedRequest] = []
    llm.add_listener(heard.append)
    output = await llm.beam_search("hi", BeamSearchParams(beam_width=3, max_tokens=5), "beam", n=2)
    assert (output.request_id, [o.index for o in output.outputs], output.finished) == ("beam", [0, 1], True)
    assert output.outputs[0].text == "HHHHH"  # each of its tokens is the first of a scripted request
    searching = asyncio.create_task(llm.beam_search("slow", BeamSearchParams(beam_width=2, max_tokens=300), "second"))
    while llm.live_requests() == 0:
        await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequest, match="second"):
        await llm.submit("hi", LONG, "second")
    await asyncio.sleep(0.05)
    await llm.abort("second")
    with pytest.raises(RequestFailed, match="aborted"):
        await searching
    cancelled = asyncio.create_task(llm.beam_search("slow", BeamSearchParams(beam_width=2, max_tokens=300), "third"))
    await asyncio.sleep(0.1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert [(f.request_id, f.finish_reasons[0]) for f in heard] == [("beam", "length"), ("second", "error"), ("third", "abort")]
    assert llm.live_requests() == 0
    await idle(llm)


async def test_a_beam_search_goes_across_a_crash(llm: AsyncLLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=30, ignore_eos=True)
    whole = await llm.beam_search("slow", params)
    searching = asyncio.create_task(llm.beam_search("slow", params))
    await asyncio.sleep(0.15)
    assert llm.engine_pid is not None
    assert not searching.done()
    os.kill(llm.engine_pid, signal.SIGKILL)
    again = await searching
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in whole.outputs]
    assert llm.restarts == 1


async def test_defaults_of_the_model_apply_when_nothing_is_said(tmp_path: Path) -> None:
    args = scripted_args(tmp_path, default=SAYS, override_generation_config={"max_new_tokens": 4})
    async with await AsyncLLM.start(args) as llm:
        assert llm.default_sampling_params == {"max_tokens": 4}
        text = (await (await llm.submit("hi")).final()).outputs[0].text
        assert text == "Hell"


async def test_overload(tmp_path: Path) -> None:
    args = scripted_args(tmp_path, rules=rules(tmp_path), max_num_seqs=1, max_waiting=1)
    async with await AsyncLLM.start(args) as llm:
        streams = [await llm.submit("slow", SamplingParams(max_tokens=40)) for _ in range(2)]
        with pytest.raises(Overloaded):
            await llm.submit("hi", LONG, "refused")
        streams[0].close()
        await (await llm.submit("hi", SamplingParams(max_tokens=2), "refused")).final()
        streams[1].close()


# The engine fails


async def test_a_crash_is_a_pause(llm: AsyncLLM) -> None:
    pid = llm.engine_pid
    params = SamplingParams(max_tokens=40, output_kind=DELTA)
    other = asyncio.create_task(collect(llm.generate("slow", params)))
    text, last = await collect(llm.generate("crash once", params))
    assert text == "before and after"
    assert last.outputs[0].finish_reason == "stop"
    assert (await other)[0] == "abcde" * 8
    assert llm.restarts == 1
    assert llm.engine_pid != pid
    assert llm.is_alive
    llm.check_health()
    await idle(llm)


async def test_siblings_and_logprobs_go_across_a_crash(llm: AsyncLLM) -> None:
    params = SamplingParams(
        n=3, max_tokens=30, logprobs=1, prompt_logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY, stop_token_ids=token_ids("z")
    )
    stream = await llm.submit("slow", params)
    await asyncio.sleep(0.15)
    assert llm.engine_pid is not None
    os.kill(llm.engine_pid, signal.SIGKILL)
    final = await stream.final()
    assert llm.restarts == 1
    for completion in final.outputs:
        assert (completion.text, completion.finish_reason) == ("abcde" * 6, "length")
        assert completion.logprobs is not None
        assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids
    assert final.prompt_logprobs is not None
    assert len(final.prompt_logprobs) == len(stream.prompt_token_ids)
    await idle(llm)


@pytest.mark.parametrize("how", ["poison", "freeze"])
async def test_the_guilty_request_fails_alone(llm: AsyncLLM, how: str) -> None:
    params = SamplingParams(max_tokens=100, output_kind=DELTA)
    tasks = [asyncio.create_task(collect(llm.generate("slow", params))) for _ in range(3)]
    with pytest.raises(RequestFailed, match="Request evil "):
        await collect(llm.generate(how, params, "evil"))
    assert [text for text, _ in await asyncio.gather(*tasks)] == ["abcde" * 20] * 3
    assert llm.is_alive
    await idle(llm)


async def test_stop_strings_go_across_a_crash(llm: AsyncLLM) -> None:
    text, last = await collect(llm.generate("crash once", SamplingParams(max_tokens=40, stop="e and", output_kind=DELTA)))
    assert (text, last.outputs[0].stop_reason) == ("befor", "e and")


async def test_past_the_limit_everything_ends_with_engine_dead(tmp_path: Path) -> None:
    args = scripted_args(tmp_path, rules=rules(tmp_path), engine_restarts=0)
    async with await AsyncLLM.start(args) as llm:
        stream = await llm.submit("slow", LONG)
        await anext(stream)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await collect(stream)
        assert not llm.is_alive
        with pytest.raises(EngineDead):
            llm.check_health()
        with pytest.raises(EngineDead):
            await llm.submit("hi")


# Life


async def test_it_can_be_made_outside_of_a_loop_and_used_in_one(tmp_path: Path) -> None:
    args = scripted_args(tmp_path, default=SAYS)
    llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
    try:
        text, _ = await collect(llm.generate("hi", SamplingParams(max_tokens=5, output_kind=DELTA)))
        assert text == "Hello"
    finally:
        await llm.shutdown()


@pytest.mark.parametrize("shown", [False, True])
async def test_what_the_start_warns_of_is_logged_unless_it_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture, shown: bool) -> None:
    llm = await asyncio.to_thread(AsyncLLM.from_engine_args, scripted_args(tmp_path, default=SAYS))
    start = llm._client.start

    async def warned(progress: Any = None) -> Any:
        return msgspec.structs.replace(await start(progress), warnings=("little room",))

    llm._client.start = warned  # type: ignore[method-assign]
    try:
        if shown:
            await llm.wait_ready(shows_warnings=True)
        for _ in range(2):
            await collect(llm.generate("hi", SamplingParams(max_tokens=1, output_kind=DELTA)))
    finally:
        await llm.shutdown()
    assert caplog.messages.count("little room") == (not shown)


async def test_shutdown_can_wait_for_running_requests(tmp_path: Path) -> None:
    llm = await AsyncLLM.start(scripted_args(tmp_path, rules=rules(tmp_path)))
    task = asyncio.create_task(collect(llm.generate("slow", SamplingParams(max_tokens=20, output_kind=DELTA))))
    while llm.live_requests() == 0:
        await asyncio.sleep(0.01)
    ending = asyncio.create_task(llm.shutdown(drain=20))
    await asyncio.sleep(0.02)
    with pytest.raises(Overloaded):
        await llm.submit("hi")
    assert (await task)[0] == "abcde" * 4
    await ending
    await llm.shutdown()
    assert llm.state == "closed"


async def test_shutdown_without_waiting_fails_what_runs(tmp_path: Path) -> None:
    llm = await AsyncLLM.start(scripted_args(tmp_path, rules=rules(tmp_path)))
    stream = await llm.submit("slow", LONG)
    await anext(stream)
    await llm.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        await collect(stream)


async def test_start_errors_are_for_the_user(tmp_path: Path) -> None:
    with pytest.raises((ModelNotFound, CheckpointError)):
        await AsyncLLM.start(scripted_args(tmp_path).__class__(model=str(tmp_path / "nothing-here")))
    broken = tmp_path / "script.json"
    args = scripted_args(tmp_path)
    broken.write_text("{")
    with pytest.raises(ConfigError, match="not a valid script"):
        await AsyncLLM.start(args)


async def test_progress_is_reported(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    async with await AsyncLLM.start(scripted_args(tmp_path), progress=lambda *p: seen.append(p)) as llm:
        assert seen
        assert llm.ready_report.max_model_len == llm.config.model.max_model_len == 512


def test_no_torch_in_this_process(tmp_path: Path) -> None:
    program = f"""
import asyncio, json, sys
from pathlib import Path
from octavo import AsyncLLM
from tests.support.scripts import scripted_args

async def main():
    async with await AsyncLLM.start(scripted_args(Path({str(tmp_path)!r}))) as llm:
        final = await (await llm.submit("hi")).final()
    print(json.dumps([final.outputs[0].text, sorted({{"torch", "transformers", "fastapi", "pydantic"}} & sys.modules.keys())]))

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(ROOT) / "src"), ROOT])}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert json.loads(result.stdout) == ["Hello", []]
