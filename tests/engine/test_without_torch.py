"""Plain GGUF models on a CPU: torch is not imported, whatever requests want, and nothing else differs."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, AsyncEngineArgs, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from octavo.attention.base import LayerSpec
from octavo.attention.kinds import CacheKinds
from octavo.frontend.launch import engine_args, prepare_launch
from octavo.ops.cpu import abi
from octavo.protocol.boot import child_environment
from octavo.worker import compiled_worker, torch_threads
from octavo.worker.compiled_worker import CompiledWorker
from octavo.worker.worker import Worker
from tests.models.test_gguf_families import metadata_of
from tests.models.test_gguf_packed import SIZES, packed_and_plain
from tests.support.bundled import bundled_model_path
from tests.support.gguf_models import tensors_of, write_model
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "num_gpu_blocks_override": 40,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "threads": 2,
}
PROMPTS = [{"prompt_token_ids": [(7 * i + j * j) % 90 + 3 for j in range(5 + 9 * i)]} for i in range(6)]
PLAIN = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.2, top_p=0.8, top_k=20, min_p=0.01, seed=6, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=8, n=3, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=1),
    SamplingParams(temperature=1.0, seed=1, max_tokens=20),
]
SPECIAL = [
    SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=8, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=6, logit_bias={5: 90.0}, min_tokens=3),
    SamplingParams(temperature=0.9, seed=2, max_tokens=6, allowed_token_ids=[4, 5, 6]),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
]


def worker_of(llm: LLM) -> object:
    return llm._client.core.executor._worker  # type: ignore[union-attr]


def windowed(folder: Path, family: str) -> Path:
    """A file in blocks of 8 bits, some or all of whose layers have a window."""
    layers = {"sliding_window": 8} | ({"layer_types": ["sliding_attention", "full_attention"]} if family != "mistral" else {})
    arch = "llama" if family == "mistral" else family
    model = tiny_model(family, **(SIZES | layers))
    more = {"attention.sliding_window": 8, "rope.dimension_count": 64}
    write_model(folder / "windowed.gguf", arch, metadata_of(model, arch, more), tensors_of(model, arch), packed="Q8_0")
    return folder / "windowed.gguf"


def tokens_of(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[tuple(one.token_ids) for one in output.outputs] for output in outputs]


def all_tokens(path: Path, kind: type, **settings: Any) -> list[Any]:
    with LLM(str(path), **SETTINGS, **settings) as llm:
        worker = worker_of(llm)
        assert type(worker) is kind
        found = [tokens_of(llm.generate(PROMPTS, PLAIN, use_tqdm=False)) for _ in range(2)]  # the second time from the cache
        special = llm.generate(PROMPTS, SPECIAL, use_tqdm=False)
        assert special[0].outputs[0].logprobs is not None and special[2].prompt_logprobs is not None
        found += [tokens_of(special), tokens_of(llm.generate(PROMPTS, PLAIN, use_tqdm=False))]
    return found


PLAIN_BLOCKS = {"": "Q4_1", "attn_k.weight": "Q8_0", "ffn_down.weight": "Q4_0"}
K_QUANTS = {"": "Q4_K", "attn_v.weight": "Q6_K", "ffn_down.weight": "Q5_K", "token_embd.weight": "Q6_K", "attn_k.weight": "Q3_K"}
OTHERS = {"": "IQ4_XS", "attn_v.weight": "Q5_1", "ffn_down.weight": "Q2_K", "attn_k.weight": "Q5_0", "attn_q.weight": "IQ4_NL"}


@pytest.mark.parametrize("family", ["llama", "granite"])
@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("kinds", [PLAIN_BLOCKS, K_QUANTS, OTHERS])
def test_the_same_tokens_as_with_torch(
    family: str, activations: str, kinds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = packed_and_plain(
        tmp_path, lambda name: kinds.get(name.removeprefix("blk.").split(".", 1)[-1], kinds.get(name, kinds[""])), family
    )
    found = all_tokens(path, CompiledWorker, cpu_activations=activations)
    monkeypatch.setattr(compiled_worker, "compiled_worker", lambda config, progress: None)
    assert found == all_tokens(path, Worker, cpu_activations=activations)
    assert len({one for output in found[0] for one in output}) > 4


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_windows_do_without_torch_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that slide have a cache of their own, whose blocks come round again."""
    path = windowed(tmp_path, family)
    found = all_tokens(path, CompiledWorker, block_size=4)
    monkeypatch.setattr(compiled_worker, "compiled_worker", lambda config, progress: None)
    assert found == all_tokens(path, Worker, block_size=4)


@pytest.mark.parametrize(
    ("type_of", "settings"),
    [
        (lambda _: "IQ3_S", {}),
        (lambda _: "Q8_0", {"cpu_kernels": "torch"}),
        (lambda _: "Q8_0", {"dtype": "bfloat16", "cpu_kernels": "torch"}),
    ],
)
def test_what_is_not_plain_takes_the_other_way(type_of: Callable[[str], str], settings: dict[str, Any], tmp_path: Path) -> None:
    path, _ = packed_and_plain(tmp_path, type_of)
    with LLM(str(path), **SETTINGS, **settings) as llm:
        assert type(worker_of(llm)) is Worker
        assert llm.generate(PROMPTS[:1], PLAIN[:1], use_tqdm=False)[0].outputs[0].token_ids


PROGRAM = """
import json, resource, sys
from octavo import LLM, SamplingParams
path, settings, wishes, room = json.loads(sys.argv[1])
with LLM(path, **settings) as llm:
    if room:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    params = [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, **wish) for wish in wishes]
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * len(params), params, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    print(json.dumps([
        [name for name in ("torch", "transformers") if name in sys.modules],
        [len(one.token_ids) for one in found],
        [len(one.logprobs or ()) for one in found],
    ]))
"""
WISHES: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"logit_bias": {5: 3.0}},
    {"min_tokens": 3},
    {"allowed_token_ids": [4, 5, 6]},
    {"logprob_token_ids": [3]},
]


def run_alone(path: Path, environment: dict[str, str], room: int = 0) -> list[Any]:
    asked = json.dumps([str(path), SETTINGS, WISHES, room])
    run = subprocess.run([sys.executable, "-c", PROGRAM, asked], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found: list[Any] = json.loads(run.stdout.splitlines()[-1])
    return found


ALL_SERVED = [[], [5] * len(WISHES), [5 if "logprobs" in wish or "logprob_token_ids" in wish else 0 for wish in WISHES]]


def test_a_process_without_torch_whatever_requests_want(tmp_path: Path) -> None:
    path, _ = packed_and_plain(tmp_path, lambda _: "Q4_1")
    assert run_alone(path, child_environment()) == ALL_SERVED


def test_an_engine_process_loads_no_library_that_it_can_do_without(tmp_path: Path) -> None:
    """Whatever requests want: OpenSSL alone, for a checksum, was 3 MiB of resident memory."""
    path, _ = packed_and_plain(tmp_path, lambda _: "Q4_1")

    async def maps() -> str:
        async with await AsyncLLM.start(AsyncEngineArgs(str(path), **SETTINGS)) as llm:
            for wish in WISHES:
                params = SamplingParams(temperature=0.0, max_tokens=3, **wish)
                outputs = [output async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params)]
                assert outputs[-1].finished
            return Path(f"/proc/{llm.engine_pid}/maps").read_text()

    mapped = asyncio.run(maps())
    assert "_native" in mapped and "numpy" in mapped
    assert not [name for name in ("torch", "libcrypto", "libssl", "psutil", "tokenizers", "llguidance") if name in mapped]


def test_memory_that_torch_would_not_fit_into_is_enough_for_all_requests(tmp_path: Path) -> None:
    """Under such a limit the engine was killed, once and again when its requests were replayed."""
    path, _ = packed_and_plain(tmp_path, lambda _: "Q4_1")
    assert run_alone(path, child_environment(), room=64 * 2**20) == ALL_SERVED


WORST_STEP = """
import json, pickle, resource, sys
from pathlib import Path
from octavo.config import address_space
address_space.be_frugal()
from octavo.worker import warmup
from octavo.worker.compiled_worker import compiled_worker
config = pickle.loads(Path(sys.argv[1]).read_bytes())
worker = compiled_worker(config, lambda *_: None)
before = address_space.used()
worker.submit(warmup.worst_step(config))
print(json.dumps([address_space.used() - before, worker.ready_report.activation_bytes, worker.collect().errors]))
"""


def test_the_worst_step_takes_no_more_than_was_set_aside_for_it(tmp_path: Path) -> None:
    """Of addresses, where these are limited; and not much less, or it would be the cache's."""
    path, _ = packed_and_plain(tmp_path, lambda _: "Q4_1")
    asked = {**SETTINGS, "max_model_len": 4096, "max_num_batched_tokens": 65536, "max_num_seqs": 256, "num_gpu_blocks_override": 2}
    launch = prepare_launch(engine_args(str(path), asked))
    (tmp_path / "config").write_bytes(pickle.dumps(launch.config))
    limited = f"ulimit -v 4000000; exec {sys.executable} -c '{WORST_STEP}' {tmp_path / 'config'}"
    run = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, env=child_environment(), timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    grown, bound, errors = json.loads(run.stdout.splitlines()[-1])
    assert not errors
    assert bound / 4 < grown <= bound


def test_a_torch_that_cannot_be_imported_is_not_missed(tmp_path: Path) -> None:
    path, _ = packed_and_plain(tmp_path, lambda _: "Q4_1")
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('libnothing.so is missing')\n")
    environment = child_environment()
    environment["PYTHONPATH"] = f"{tmp_path / 'broken'}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    assert run_alone(path, environment) == ALL_SERVED


def test_torch_has_its_threads_again_once_the_engine_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_threads, "_workers", weakref.WeakSet())  # without workers that other tests have left behind
    path, _ = packed_and_plain(tmp_path, lambda _: "IQ3_S")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with LLM(str(path), **SETTINGS):
            assert torch.get_num_threads() == 1
            with LLM(str(path), **SETTINGS, cpu_kernels="torch"):
                assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_copies_of_blocks_are_of_all_layers() -> None:
    from octavo.attention.native_memory import NativeCacheMemory

    layers = (LayerSpec(4, 2, 24, scale=1.0), LayerSpec(4, 1, 40, scale=1.0))
    memory = NativeCacheMemory(layers, CacheKinds(6), 4, np.float16)
    for number, array in enumerate((*memory.keys, *memory.values)):
        array[:] = np.arange(6).reshape(-1, 1, 1, 1) + 10 * number
    memory.copy_blocks(np.asarray([1, 2], np.int32), np.asarray([4, 1], np.int32))
    for number, array in enumerate((*memory.keys, *memory.values)):
        assert array[:, 0, 0, 0].tolist() == [10 * number + block for block in (0, 2, 2, 3, 1, 5)]
    assert NativeCacheMemory.bytes_per_block(layers, 4, 2) * 6 == memory.blocks[0].nbytes


SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "colour": {"type": "string", "maxLength": 8},
    },
    "required": ["full_name", "age", "colour"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "The capital of France is the city of" /[ A-Za-z]{1,12}/ "."'


def test_tokens_that_a_grammar_decides_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed several at a time, and nobody samples them: the model has to see them all the same."""
    wishes = [StructuredOutputsParams(grammar=GRAMMAR), StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(json=SCHEMA)]
    params = [SamplingParams(temperature=0.0 if i < 2 else 0.8, seed=4, max_tokens=50, structured_outputs=w) for i, w in enumerate(wishes)]
    prompts = ["Which city is it?", "Alice Miller is 42 and likes green.", "Bob is 7 and likes blue."]
    found = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(compiled_worker, "compiled_worker", lambda config, progress: None)
        with LLM(bundled_model_path(), device="cpu", num_gpu_blocks_override=60, max_model_len=256, threads=2) as llm:
            assert isinstance(worker_of(llm), CompiledWorker) == compiled
            found += [tokens_of(llm.generate(prompts, params, use_tqdm=False)) for _ in range(2)]  # the second time from the cache
    assert found[0] == found[1] == found[2] == found[3]
