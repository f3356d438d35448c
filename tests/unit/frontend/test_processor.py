"""The door: every rule that needs the model, one test each, with the parameter that the error names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.checkpoint.resolve import resolve_checkpoint
from octavo.checkpoint.types import Checkpoint
from octavo.config.args import EngineArgs
from octavo.errors import ConfigError, InvalidRequest, NotYet
from octavo.frontend.processor import InputProcessor, default_sampling_params
from octavo.frontend.prompts import parse_prompt, split_prompts
from octavo.frontend.text.tokenizer import Tokenizer, load_tokenizer
from octavo.protocol.params import SamplingParams, StructuredOutputsParams
from tests.support.engine_config import VOCAB_SIZE, tiny_config
from tests.support.scripts import token_ids
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return resolve_checkpoint(str(write_tiny_checkpoint(tmp_path_factory.mktemp("model"))), load_format="dummy")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(checkpoint, EngineArgs(model=checkpoint.path))


@pytest.fixture
def door(tokenizer: Tokenizer) -> InputProcessor:
    """Vocabulary 1000, context 512."""
    return InputProcessor(tiny_config(), tokenizer)


def refused(door: InputProcessor, prompt: Any = "hi", params: SamplingParams | None = None, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        door.prepare(prompt, params or SamplingParams(), "r", **options)
    return caught.value


# Prompts


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ("hi", token_ids("hi"), "hi"),
        ([4, 5, 6], [4, 5, 6], None),
        ((4, 5), [4, 5], None),
        (np.array([4, 5]), [4, 5], None),
        ({"prompt": "hi"}, token_ids("hi"), "hi"),
        ({"prompt_token_ids": [7]}, [7], None),
        ({"prompt": "shown", "prompt_token_ids": [7]}, [7], "shown"),
        ({"prompt": "hi", "multi_modal_data": {}}, token_ids("hi"), "hi"),
    ],
)
def test_prompt_forms(door: InputProcessor, prompt: Any, ids: list[int], text: str | None) -> None:
    prepared = door.prepare(prompt, SamplingParams(), "r")
    assert prepared.request.prompt_token_ids == ids
    assert prepared.prompt == text


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused(door: InputProcessor, prompt: Any) -> None:
    assert refused(door, prompt).param == "prompt"


@pytest.mark.parametrize(
    "prompt", [None, 3, 3.5, {"text": "hi"}, {"prompt": 3}, {"prompt_token_ids": 3}, ["a"], [1.5], [True], [[1]], {1, 2}, b"hi"]
)
def test_what_is_no_prompt_is_refused(door: InputProcessor, prompt: Any) -> None:
    assert refused(door, prompt).param == "prompt"


@pytest.mark.parametrize("ids", [[VOCAB_SIZE], [-1], [1, 2**40]])
def test_prompt_ids_must_be_in_the_vocabulary(door: InputProcessor, ids: list[int]) -> None:
    error = refused(door, ids)
    assert error.param == "prompt"
    assert "0 to 999" in str(error)


def test_half_a_surrogate_pair_is_refused(door: InputProcessor) -> None:
    assert "surrogate" in str(refused(door, "a\ud83d"))


@pytest.mark.parametrize("key", ["prompt_embeds", "multi_modal_data", "encoder_prompt"])
def test_other_modalities_are_not_yet(door: InputProcessor, key: str) -> None:
    with pytest.raises(NotYet, match=key):
        door.prepare({"prompt": "hi", key: {"image": 1}}, SamplingParams(), "r")


def test_split_prompts() -> None:
    assert split_prompts("a") == ["a"]
    assert split_prompts(["a", "b"]) == ["a", "b"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1, 2], [3]]) == [[1, 2], [3]]
    assert split_prompts({"prompt": "a"}) == [{"prompt": "a"}]
    assert split_prompts([]) == []
    assert split_prompts(np.array([1, 2])) == [[1, 2]]
    assert split_prompts(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert [parse_prompt(p).token_ids for p in split_prompts([np.array([1, 2]), np.array([3])])] == [[1, 2], [3]]
    with pytest.raises(InvalidRequest):
        split_prompts(3)  # type: ignore[arg-type]


def test_a_cache_salt_in_the_prompt_counts() -> None:
    assert parse_prompt({"prompt": "a", "cache_salt": "s"}).cache_salt == "s"


def test_without_a_tokenizer_only_ids() -> None:
    door = InputProcessor(tiny_config(), None)
    assert door.prepare([1, 2], SamplingParams(), "r").request.sampling.detokenize is False
    assert refused(door, "hi").param == "prompt"
    assert refused(door, [1], SamplingParams(stop="x")).param == "stop"
    assert refused(door, [1], SamplingParams(bad_words=["x"])).param == "bad_words"


# Length


def test_too_long_says_all_three_numbers(door: InputProcessor) -> None:
    error = refused(door, [1] * 600, SamplingParams(max_tokens=20))
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert all(number in str(error) for number in ("512", "600", "20"))


def test_a_full_context_leaves_no_room_for_output(door: InputProcessor) -> None:
    assert refused(door, [1] * 512).code == "context_length_exceeded"
    assert door.prepare([1] * 511, SamplingParams(max_tokens=100), "r").request.sampling.max_tokens == 1


def test_a_huge_text_is_refused_without_tokenizing_it(door: InputProcessor, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    monkeypatch.setattr(type(tokenizer), "encode", lambda *a, **k: pytest.fail("tokenized"))
    error = refused(door, "x" * 1_000_000)
    assert error.code == "context_length_exceeded"
    assert "at least" in str(error)


@pytest.mark.parametrize(("asked", "given"), [(None, 502), (16, 16), (502, 502), (100_000, 502)])
def test_the_output_is_capped_at_the_context(door: InputProcessor, asked: int | None, given: int) -> None:
    assert door.prepare([1] * 10, SamplingParams(max_tokens=asked), "r").request.sampling.max_tokens == given


def test_min_tokens_never_exceeds_the_room(door: InputProcessor) -> None:
    sampling = door.prepare([1] * 510, SamplingParams(max_tokens=50, min_tokens=40), "r").request.sampling
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 2)


def test_the_engines_own_limit_counts(tokenizer: Tokenizer) -> None:
    door = InputProcessor(tiny_config(), tokenizer, max_model_len=100)
    assert refused(door, [1] * 100).code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [(3, "left", [8, 9, 10]), (3, "right", [1, 2, 3]), (20, "left", list(range(1, 11))), (-1, "left", list(range(1, 11)))],
)
def test_truncation(door: InputProcessor, limit: int, side: Any, kept: list[int]) -> None:
    prepared = door.prepare(list(range(1, 11)), SamplingParams(), "r", truncate_prompt_tokens=limit, truncation_side=side)
    assert prepared.request.prompt_token_ids == kept


def test_truncation_to_what_fits_leaves_room_for_the_output(door: InputProcessor) -> None:
    prepared = door.prepare([1] * 600, SamplingParams(max_tokens=12), "r", truncate_prompt_tokens=-1)
    assert (len(prepared.request.prompt_token_ids), prepared.request.sampling.max_tokens) == (500, 12)


@pytest.mark.parametrize("limit", [0, -2, True, "5"])
def test_a_bad_truncation_is_refused(door: InputProcessor, limit: Any) -> None:
    assert refused(door, truncate_prompt_tokens=limit).param == "truncate_prompt_tokens"


def test_a_bad_truncation_side_is_refused(door: InputProcessor) -> None:
    assert refused(door, truncate_prompt_tokens=4, truncation_side="middle").param == "truncation_side"


# Parameters


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [10**9], "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [5, VOCAB_SIZE]}, "allowed_token_ids"),
        ({"logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids"),
    ],
)
def test_parameters_are_checked_against_the_model(door: InputProcessor, params: dict[str, Any], param: str) -> None:
    assert refused(door, params=SamplingParams(**params)).param == param


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_all_logprobs_are_refused_in_the_words_that_asked_for_them(door: InputProcessor, name: str) -> None:
    error = refused(door, params=SamplingParams(**{name: -1}))
    assert str(error).startswith(f"{name}=-1 (the whole vocabulary) is more than this server gives (20)")
    assert "--max-logprobs -1" in str(error)
    assert str(VOCAB_SIZE) not in str(error)


@pytest.mark.parametrize("name", ["flat_logprobs", "prompt_logprob_token_ids", "repetition_detection"])
def test_parameters_known_by_name_only_are_not_yet(door: InputProcessor, name: str) -> None:
    with pytest.raises(NotYet, match=name):
        door.prepare("hi", SamplingParams(**{name: True if name == "flat_logprobs" else [3]}), "r")
    door.prepare("hi", SamplingParams(**{name: False if name == "flat_logprobs" else None}), "r")


def test_the_engine_can_read_whatever_extra_arguments_hold(door: InputProcessor) -> None:
    params = SamplingParams(extra_args={"a": object(), "b": 10**40})
    msgspec.msgpack.encode(door.prepare("hi", params, "r").request)
    assert params.extra_args is not None


def test_token_ids_of_bad_words_are_the_doors_own(door: InputProcessor) -> None:
    assert door.prepare("hi", SamplingParams(bad_words_token_ids=[[5]]), "r").request.sampling.bad_words_token_ids is None


def test_parameters_that_leave_no_token_are_refused(door: InputProcessor, tokenizer: Tokenizer) -> None:
    (stop,) = tokenizer.encode("!", add_special_tokens=False)
    eos = tiny_config().model.eos_token_ids[0]
    other = 7
    for params, param in (
        ({"allowed_token_ids": [stop], "bad_words": ["!"]}, "bad_words"),
        ({"allowed_token_ids": [stop], "stop_token_ids": [stop], "min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": [eos], "min_tokens": 2}, "min_tokens"),
    ):
        assert refused(door, params=SamplingParams(**params)).param == param
        door.prepare("hi", SamplingParams(**{**params, "allowed_token_ids": [*params["allowed_token_ids"], other]}), "r")
    door.prepare("hi", SamplingParams(allowed_token_ids=[eos], min_tokens=2, ignore_eos=True), "r")
    door.prepare("hi", SamplingParams(allowed_token_ids=[eos]), "r")


def test_named_tokens_are_limited_like_the_most_likely_ones(door: InputProcessor, tokenizer: Tokenizer) -> None:
    error = refused(door, params=SamplingParams(logprob_token_ids=list(range(21))))
    assert error.param == "logprob_token_ids"
    assert "21" in str(error)
    assert "20" in str(error)
    repeated = SamplingParams(logprob_token_ids=[5, 6] * 100)
    assert door.prepare("hi", repeated, "r").request.sampling.logprob_token_ids == [5, 6]
    unlimited = InputProcessor(tiny_config(max_logprobs=-1), tokenizer)
    assert (
        len(unlimited.prepare("hi", SamplingParams(logprob_token_ids=list(range(900))), "r").request.sampling.logprob_token_ids or [])
        == 900
    )


def test_no_limit_on_logprobs(tokenizer: Tokenizer) -> None:
    door = InputProcessor(tiny_config(max_logprobs=-1), tokenizer)
    assert door.prepare("hi", SamplingParams(logprobs=-1, prompt_logprobs=999), "r").request.sampling.logprobs == -1


def test_output_kind(door: InputProcessor) -> None:
    params = SamplingParams()
    params.output_kind = 7  # type: ignore[assignment]
    assert refused(door, params=params).param == "output_kind"


def test_structured_outputs_become_a_constraint(door: InputProcessor) -> None:
    sampling = door.prepare("hi", SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])), "r").request.sampling
    assert sampling.structured_outputs is None
    assert sampling.constraint is not None
    assert '"a"' in sampling.constraint.grammar
    assert door.prepare("hi", SamplingParams(), "r").request.sampling.constraint is None
    schema = {"type": "object", "properties": {"a": {"items": {"type": "strng"}}}}
    error = refused(door, params=SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    assert (error.param, "$.properties.a.items" in str(error)) == ("structured_outputs", True)
    assert refused(door, params=SamplingParams(thinking_token_budget=3)).param == "thinking_token_budget"


def test_adapters_are_not_yet(door: InputProcessor) -> None:
    with pytest.raises(NotYet, match="LoRA"):
        door.prepare("hi", SamplingParams(), "r", lora_request=object())


def test_what_is_no_sampling_params_is_refused(door: InputProcessor) -> None:
    assert refused(door, params={"n": 1}).param == "sampling_params"  # type: ignore[arg-type]


def test_bad_words_are_tokenized_once_for_all_prompts(door: InputProcessor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"w{i}" for i in range(1024)]
    first = door.prepare([1], SamplingParams(bad_words=words), "r").request.sampling.bad_words_token_ids
    assert first is not None
    assert len(first) == len({tuple(ids) for ids in first}), "each sequence once"
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_args, **_options: pytest.fail("tokenized again"))
    assert door.prepare([1], SamplingParams(bad_words=words), "r").request.sampling.bad_words_token_ids == first


def test_bad_words_become_tokens_with_and_without_a_space(door: InputProcessor, tokenizer: Tokenizer) -> None:
    sampling = door.prepare("hi", SamplingParams(bad_words=["world", " the"]), "r").request.sampling
    assert sampling.bad_words_token_ids == [tokenizer.encode(text, add_special_tokens=False) for text in ("world", " world", "the", " the")]


def test_the_users_parameters_are_left_alone(door: InputProcessor) -> None:
    params = SamplingParams(max_tokens=None, bad_words=["x"])
    before = params.clone()
    door.prepare("hi", params, "r")
    assert params == before


@pytest.mark.parametrize("salt", ["", "x" * 1025, 3])
def test_a_bad_cache_salt_is_refused(door: InputProcessor, salt: Any) -> None:
    assert refused(door, cache_salt=salt).param == "cache_salt"


def test_a_cache_salt_is_extra_key_material(door: InputProcessor) -> None:
    assert door.prepare("hi", SamplingParams(), "r", cache_salt="team-a").request.extra_key == "team-a"
    assert door.prepare({"prompt": "hi", "cache_salt": "b"}, SamplingParams(), "r").request.extra_key == "b"
    assert door.prepare("hi", SamplingParams(), "r").request.extra_key == ""


@pytest.mark.parametrize("request_id", ["", "x" * 1025, 5])
def test_a_bad_request_id_is_refused(door: InputProcessor, request_id: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        door.prepare("hi", SamplingParams(), request_id)
    assert caught.value.param == "request_id"


@pytest.mark.parametrize("priority", [1.5, True, 2**63])
def test_a_bad_priority_is_refused(door: InputProcessor, priority: Any) -> None:
    assert refused(door, priority=priority).param == "priority"


def test_seeds(tokenizer: Tokenizer) -> None:
    def seeds(seed: int) -> list[int | None]:
        door = InputProcessor(tiny_config(seed=seed), tokenizer)
        return [door.prepare("hi", SamplingParams(), "r").request.sampling.seed for _ in range(3)]

    assert seeds(1) == seeds(1)
    assert seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 3
    assert InputProcessor(tiny_config(), tokenizer).prepare("hi", SamplingParams(seed=5), "r").request.sampling.seed == 5


def test_engine_ids_are_never_used_twice(door: InputProcessor) -> None:
    ids = {door.prepare("hi", SamplingParams(), "same").request.request_id for _ in range(5)}
    assert len(ids) == 5


# Defaults


def with_generation(checkpoint: Checkpoint, **values: Any) -> Checkpoint:
    return dataclasses.replace(checkpoint, generation_config=values)


def test_the_models_defaults(checkpoint: Checkpoint) -> None:
    model = with_generation(
        checkpoint, temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=99, do_sample=True, eos_token_id=2, min_p=None
    )
    assert default_sampling_params(model, EngineArgs()) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 99}
    assert default_sampling_params(model, EngineArgs(generation_config="vllm")) == {}
    assert default_sampling_params(model, EngineArgs(generation_config="none")) == {}
    overridden = default_sampling_params(model, EngineArgs(override_generation_config={"temperature": 0.1}))
    assert overridden == {"temperature": 0.1, "top_p": 0.95, "top_k": 20, "max_tokens": 99}


def test_defaults_from_a_folder(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    assert default_sampling_params(checkpoint, EngineArgs(generation_config=str(tmp_path))) == {"top_k": 7}
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="cannot read"):
        default_sampling_params(checkpoint, EngineArgs(generation_config=str(tmp_path)))
    with pytest.raises(ConfigError, match="cannot read"):
        default_sampling_params(checkpoint, EngineArgs(generation_config=str(tmp_path / "nowhere")))


def test_bad_defaults_are_a_config_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        default_sampling_params(with_generation(checkpoint, top_p=7.0), EngineArgs())
    with pytest.raises(ConfigError, match="--override-generation-config"):
        default_sampling_params(checkpoint, EngineArgs(override_generation_config={"top_p": 7.0}))
