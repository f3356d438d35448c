"""`LLM` over the real core and a scripted worker: orders, refusals, interruption, life and death."""

from __future__ import annotations

import _thread
import dataclasses
import gc
import inspect
import io
import logging
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, ConfigError, EngineArgs, InvalidRequest, NotYet, RequestOutputKind, SamplingParams
from octavo.frontend.progress import GenerationProgress
from tests.support.scripts import scripted_args, token_ids

SAYS = "Hello world, how are you?"


def make(folder: Path, **options: Any) -> LLM:
    options.setdefault("default", SAYS)
    args = dataclasses.asdict(scripted_args(folder, **options))
    return LLM(args.pop("model"), **args)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Says SAYS; prompts with "slow" take 20 ms a token and go on, those with "bad" fail at their third token."""
    rules = [
        {"prompt_contains_ids": token_ids("slow"), "tokens": token_ids("ab"), "cycle": True, "delay_ms": 20},
        {"prompt_contains_ids": token_ids("bad"), "tokens": token_ids("xyz"), "fail": {"at_output": 2, "how": "error", "message": "NaN."}},
        {"prompt_contains_ids": token_ids("echo 1"), "tokens": token_ids("one")},
        {"prompt_contains_ids": token_ids("echo 2"), "tokens": token_ids("two")},
    ]
    with make(tmp_path_factory.mktemp("llm"), rules=rules) as llm:
        yield llm


def idle(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["slow", "echo 2", token_ids("echo 1"), {"prompt": "hi"}, {"prompt_token_ids": token_ids("echo 2")}]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=30))
    assert [o.outputs[0].text for o in outputs] == ["ab" * 15, "two", "one", SAYS, "two"]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "stop", "stop", "stop", "stop"]
    assert [o.prompt for o in outputs] == ["slow", "echo 2", None, "hi", None]
    assert all(o.finished for o in outputs)
    assert idle(llm)


def test_one_prompt_need_not_be_in_a_list(llm: LLM) -> None:
    assert len(llm.generate("hi")) == 1
    assert len(llm.generate(token_ids("hi"))) == 1
    assert llm.generate([]) == []


def test_parameters_one_for_all_or_one_each(llm: LLM) -> None:
    outputs = llm.generate(["hi", "hi"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    with pytest.raises(InvalidRequest, match="2 prompts but 1") as caught:
        llm.generate(["hi", "hi"], [SamplingParams()])
    assert caught.value.param == "sampling_params"
    with pytest.raises(InvalidRequest, match="priority"):
        llm.generate(["hi", "hi"], priority=[1])
    with pytest.raises(InvalidRequest, match="priority must be a list"):
        llm.generate(["hi"], priority=5)  # type: ignore[arg-type]
    assert len(llm.generate(["hi", "hi"], priority=[1, 0])) == 2


def test_the_default_is_sixteen_tokens(llm: LLM) -> None:
    assert llm.generate("slow")[0].outputs[0].finish_reason == "length"
    assert llm.get_default_sampling_params() == SamplingParams()


def test_siblings(llm: LLM) -> None:
    [output] = llm.generate("hi", SamplingParams(n=3, max_tokens=4))
    assert [(c.index, c.text) for c in output.outputs] == [(0, "Hell"), (1, "Hell"), (2, "Hell")]


def test_output_kind_is_always_the_whole(llm: LLM) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=100)
    assert llm.generate("hi", params)[0].outputs[0].text == SAYS
    assert params.output_kind is RequestOutputKind.DELTA


def test_stop_strings_and_logprobs(llm: LLM) -> None:
    [output] = llm.generate("hi", SamplingParams(stop=", how", max_tokens=100, logprobs=2, prompt_logprobs=1))
    [completion] = output.outputs
    assert (completion.text, completion.stop_reason) == ("Hello world", ", how")
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 2
    assert idle(llm)


def test_every_prompt_is_checked_before_any_is_queued(llm: LLM) -> None:
    steps = llm.stats().step
    with pytest.raises(InvalidRequest, match=r"Prompt 2 \(of 3\)") as caught:
        llm.generate(["hi", "hi", ""])
    assert caught.value.param == "prompt"
    assert llm.stats().step == steps
    assert idle(llm)


def test_a_failed_request_fails_alone(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="octavo"):
        bad, good = llm.generate(["bad", "echo 1"])
    assert (bad.outputs[0].finish_reason, bad.outputs[0].text, bad.outputs[0].error) == ("error", "xy", "NaN.")
    assert good.outputs[0].text == "one"
    assert "NaN." in caplog.text


def test_ctrl_c_ends_the_call_and_leaves_the_llm_usable(llm: LLM) -> None:
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["slow"] * 3, SamplingParams(max_tokens=400))
    timer.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert idle(llm)
    assert llm.generate("echo 1")[0].outputs[0].text == "one"


def test_an_error_in_mid_call_leaves_nothing_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = llm._client.step, []  # type: ignore[union-attr]

    def step() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("torn")
        real()

    monkeypatch.setattr(llm._client, "step", step)
    with pytest.raises(RuntimeError, match="torn"):
        llm.generate(["slow", "hi"], SamplingParams(max_tokens=50))
    monkeypatch.undo()
    assert idle(llm)
    assert llm.generate("echo 2")[0].outputs[0].text == "two"


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    results: dict[int, str] = {}

    def work(i: int) -> None:
        results[i] = llm.generate(f"echo {i}", use_tqdm=False)[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(i,)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {1: "one", 2: "two"}


# Chat


def test_chat_renders_the_template_once(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=5))
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids is not None
    assert output.prompt_token_ids[0] == 1
    assert output.outputs[0].text == "Hello"


def test_chat_with_several_conversations(llm: LLM) -> None:
    outputs = llm.chat([[{"role": "user", "content": f"echo {i}"}] for i in (2, 1)])
    assert [o.outputs[0].text for o in outputs] == ["two", "one"]


def test_chat_can_go_on_with_the_last_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    [output] = llm.chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.endswith("assistant\nWell")


@pytest.mark.parametrize("setting", [{"chat_template": 5}, {"chat_template_kwargs": [1]}, {"tools": "x"}, {"tools": {"a": 1}}])
def test_chat_settings_of_other_types_are_refused_by_name(llm: LLM, setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat([{"role": "user", "content": "hi"}], **setting)
    assert caught.value.param == next(iter(setting))


@pytest.mark.parametrize(
    "messages", [[], "hi", None, 3, [3], [[3]], [[]], [{"role": "user", "content": "hi"}, 3], [{"role": "user", "content": "hi"}, "x"]]
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages)
    assert caught.value.param == "messages"


def test_chat_content_format_is_checked(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="content_format"):
        llm.chat([{"role": "user", "content": "hi"}], chat_template_content_format="xml")
    assert llm.chat([{"role": "user", "content": "hi"}], chat_template_content_format="string")[0].finished


# Pooling, settings, life


@pytest.mark.parametrize(("name", "texts"), [("encode", ["hi"]), ("embed", ["hi"]), ("classify", ["hi"]), ("score", ["hi", "you"])])
def test_a_model_that_writes_does_not_pool(llm: LLM, name: str, texts: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="--runner pooling"):
        getattr(llm, name)(*texts)


def test_prefix_cache_can_be_reset(llm: LLM) -> None:
    prompt = token_ids("x" * 40)
    llm.generate(prompt)
    assert llm.generate(prompt)[0].num_cached_tokens
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt)[0].num_cached_tokens == 0


@pytest.mark.parametrize("model", [5, None, ["a"], b"a"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="model must be"):
        LLM(model)


def test_an_unknown_setting_is_named_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"max_model_length.*Did you mean max_model_len\?"):
        LLM("nowhere", max_model_length=3)


def test_not_yet_settings_are_refused_and_ignored_ones_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotYet, match="cpu-offload-gb"):
        make(tmp_path, cpu_offload_gb=2.0)
    with caplog.at_level(logging.WARNING, logger="octavo"), make(tmp_path, swap_space=1.0):
        pass
    assert "swap-space" in caplog.text


def test_the_signature_lists_every_setting() -> None:
    parameters = inspect.signature(LLM).parameters
    assert next(iter(parameters)) == "model"
    assert {f.name for f in dataclasses.fields(EngineArgs)} <= parameters.keys()
    assert parameters["disable_log_stats"].default is True
    assert parameters["tokenizer"].kind is inspect.Parameter.KEYWORD_ONLY


def test_skip_tokenizer_init(tmp_path: Path) -> None:
    with make(tmp_path, skip_tokenizer_init=True) as llm:
        [output] = llm.generate(token_ids("hi"), SamplingParams(max_tokens=5))
        assert (output.outputs[0].text, list(output.outputs[0].token_ids)) == ("", token_ids("Hello"))
        with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
            llm.get_tokenizer()


def test_close_frees_everything_and_may_be_repeated(tmp_path: Path) -> None:
    llm = make(tmp_path)
    core = weakref.ref(llm._client.core)  # type: ignore[union-attr]
    llm.generate("hi")
    llm.close()
    llm.close()
    assert core() is None
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate("hi")


def test_letting_go_closes(tmp_path: Path) -> None:
    llm = make(tmp_path)
    core = weakref.ref(llm._client.core)  # type: ignore[union-attr]
    del llm
    gc.collect()
    assert core() is None


def test_progress_is_shown_only_where_somebody_looks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(wanted: bool | None, terminal: bool) -> bool:
        err = io.StringIO()
        err.isatty = lambda: terminal  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stderr", err)
        with GenerationProgress(2, "Generating", wanted) as bar:
            bar.advance(5)
        return bool(err.getvalue())

    assert [shown(None, True), shown(None, False), shown(True, False), shown(False, True)] == [True, False, True, False]
