"""The whole engine on a GPU: the same tokens with and without graphs and overlap, parity with transformers, and no waiting."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.args import EngineArgs
from octavo.engine.build import build_server_engine
from octavo.errors import ConfigError
from octavo.frontend.launch import prepare_launch
from octavo.protocol.engine import EngineReady, NewRequest
from octavo.protocol.step import StepPlan
from octavo.worker import slow_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

VOCAB = 3000
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SETTINGS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 48, "gpu_memory_utilization": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(SHAPE))
    return str(path)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
    gc.collect()
    torch.cuda.empty_cache()


def prompts() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(0, VOCAB, int(n)).tolist()} for n in rng.integers(1, 300, 40)]


def params() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}, {"top_p": 0.9, "top_k": 50}, {"min_p": 0.05}]
    return [SamplingParams(seed=i, max_tokens=20 + i, ignore_eos=True, **kinds[i % 4]) for i in range(40)]


def generated(llm: LLM, sampling: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), sampling, use_tqdm=False)]  # type: ignore[arg-type]


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of sequences that are equal. bf16 sums in other orders flip a near tie now and then, so not all need be."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def test_graphs_and_overlap_do_not_change_tokens(folder: str) -> None:
    with LLM(folder, dtype="float16", **SETTINGS) as llm:
        ready = llm.ready_report
        assert ready.attention == "triton"
        counted = ready.weights_bytes + ready.activation_bytes + ready.cache_bytes
        assert torch.cuda.memory_reserved() < counted + (64 << 20), "graphs take what was measured for them"
        first = generated(llm, params())
        assert agreement(generated(llm, params()), first) > 0.9, "a second run, with the prefix cache"
    assert len({t for tokens in first for t in tokens}) > 300
    with LLM(folder, dtype="float16", async_scheduling=False, **SETTINGS) as llm:
        assert generated(llm, params()) == first, "one step at a time gives the same"
    with LLM(folder, dtype="float16", enforce_eager=True, **SETTINGS) as llm:
        assert agreement(generated(llm, params()), first) > 0.9


class Launches:
    """Writes down which steps of an engine in this process its graphs took."""

    def __init__(self, llm: LLM) -> None:
        core: Any = llm._client.core  # type: ignore[union-attr]
        self.core, self.worker = core, core.executor._worker
        self.chunks, self.decodes, self.eager = 0, 0, 0
        runner = self.worker._runner
        launch = runner.launch

        def spy(plan: StepPlan) -> Any:
            captured = self.worker._graphs.fitting(plan)
            self.eager += captured is None
            self.chunks += captured is not None and captured.layout.shape.chunks > 0
            self.decodes += captured is not None and captured.layout.shape.chunks == 0
            return launch(plan)

        runner.launch = spy


def test_rows_that_larger_steps_are_quicker_for_are_left_to_those(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[int, float]] = []
    measure = slow_rows.product_seconds

    def with_a_cliff(*args: Any, **more: Any) -> dict[int, float]:
        times = measure(*args, **more)
        found.append(times)
        return {**times, 144: 2 * times[160]}

    monkeypatch.setattr(slow_rows, "product_seconds", with_a_cliff)
    many = [{"prompt_token_ids": [3 + i, 5, 7]} for i in range(140)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    settings = {**SETTINGS, "max_num_seqs": 160, "dtype": "float16"}
    tokens = []
    for eager in (False, True):
        with LLM(folder, enforce_eager=eager, **settings) as llm:
            if not eager:
                worker: Any = llm._client.core.executor._worker  # type: ignore[union-attr]
                assert 144 in worker._slow
                rows = {captured.layout.shape.rows for captured in worker._graphs._ready if not captured.layout.shape.chunks}
                assert {128, 160} <= rows and 144 not in rows
            tokens.append([o.outputs[0].token_ids for o in llm.generate(many, greedy, use_tqdm=False)])  # type: ignore[arg-type]
    assert agreement(*tokens) > 0.9
    (times,) = found
    assert list(times) == [160, 144] or list(times) == [144, 160]
    assert all(0 < seconds < 1 for seconds in times.values())


def test_captured_chunks_do_not_change_tokens(folder: str) -> None:
    settings = {**SETTINGS, "max_num_batched_tokens": 512, "dtype": "float16"}
    with LLM(folder, **settings) as llm:
        launches = Launches(llm)
        first = generated(llm, params())
        assert agreement(generated(llm, params()), first) > 0.9, "with the prefix cache, whose copied blocks come with captured steps"
        assert launches.chunks > 5
        assert launches.decodes > 20
        assert launches.eager == 0
    with LLM(folder, enforce_eager=True, **settings) as llm:
        assert agreement(generated(llm, params()), first) > 0.9


def test_layers_that_slide_have_a_cache_of_their_own_and_tokens_stay(tmp_path: Path) -> None:
    """Past the window and what kernels read before it; against every token kept, which plain torch never reads."""
    shape = SHAPE | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 64,
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    tokens = []
    for more in ({}, {"enforce_eager": True}, {"attention_backend": "TORCH_SDPA"}):
        with LLM(str(tmp_path), dtype="float16", max_model_len=400, **SETTINGS, **more) as llm:
            assert len(llm._client.core.kv.kinds) == 2  # type: ignore[union-attr]
            tokens.append(generated(llm, params()))
            assert agreement(generated(llm, params()), tokens[-1]) > 0.9, "with the prefix cache"
    assert agreement(tokens[1], tokens[0]) > 0.9
    assert agreement(tokens[2], tokens[0]) > 0.8


def test_a_server_captures_the_rest_in_gaps_and_tokens_stay(folder: str) -> None:
    config = prepare_launch(EngineArgs(model=folder, dtype="float16", **SETTINGS)).config
    core, ready = build_server_engine(config)
    worker: Any = core.executor._worker  # type: ignore[attr-defined]

    def run(prepare: bool) -> list[list[int]]:
        tokens: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts()[:12]):
            request = NewRequest(f"{i}", prompt["prompt_token_ids"], SamplingParams(seed=i, max_tokens=30, ignore_eos=True), 0.0, [])
            core.add(request)
        while core.has_work():
            for delta in core.step().deltas:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if prepare:
                worker._next_capture = 0.0
                core.prepare()
        core.reset_prefix_cache()
        return [tokens[f"{i}"] for i in range(12)]

    try:
        left = len(worker._later)
        assert left > 5
        expected = run(prepare=False)
        assert len(worker._later) == left
        assert agreement(run(prepare=True), expected) >= 0.75, "captures between steps, with one under way"
        assert len(worker._later) < left
        while core.prepare():
            pass
        assert not worker._later
        assert agreement(run(prepare=False), expected) >= 0.75
        assert [p.name for p in ready.phases].count("graphs") == 1
    finally:
        core.shutdown()


def test_a_step_that_finds_no_memory_is_made_smaller(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(1)
    long = [{"prompt_token_ids": rng.integers(0, VOCAB, 3900).tolist()} for _ in range(4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(folder, dtype="float16", **SETTINGS) as llm:

        def tokens() -> list[list[int]]:
            llm.reset_prefix_cache()
            return [o.outputs[0].token_ids for o in llm.generate(long, sampling, use_tqdm=False)]  # type: ignore[arg-type]

        expected = tokens()
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (24 << 20)) / total)
        try:
            assert agreement(tokens(), expected) >= 0.75
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert "Out of device memory" in caplog.text
        assert agreement(tokens(), expected) >= 0.75, "and afterwards all is as before"


def test_the_cache_is_as_large_as_asked_for(folder: str) -> None:
    settings = {k: v for k, v in SETTINGS.items() if k != "gpu_memory_utilization"}
    with LLM(folder, dtype="float16", kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.01, **settings) as llm:
        per_block = llm.ready_report.cache_bytes // llm.ready_report.num_blocks
        assert (1 << 28) - per_block < llm.ready_report.cache_bytes <= 1 << 28
    small = {**settings, "kv_cache_memory_bytes": 100 * per_block}
    with pytest.raises(ConfigError, match=r"max_model_len=4096 needs .*Lower --max-model-len to 1584 or less"):
        LLM(folder, dtype="float16", **small)
    with LLM(folder, dtype="float16", max_model_len="auto", **small) as llm:
        assert llm.ready_report.max_model_len == 99 * 16
        with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes \d+ \(1024\.0 GiB\) and the weights .* are more than"):
            LLM(folder, dtype="float16", kv_cache_memory_bytes=1 << 40, **settings)


ENDS = """
import json, sys
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
prompts = [{"prompt_token_ids": list(range(1, n))} for n in (4, 50, 700)]
for _ in range(2):
    llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True, seed=0), use_tqdm=False)
    llm.reset_prefix_cache()
if sys.argv[3] == "closed":
    llm.close()
"""


@pytest.mark.parametrize("how", ["closed", "left open"])
def test_a_process_with_an_engine_ends_cleanly(folder: str, how: str) -> None:
    settings = json.dumps({**SETTINGS, "dtype": "float16"})
    done = subprocess.run([sys.executable, "-c", ENDS, folder, settings, how], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "invalid pointer" not in done.stderr


HOLD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, place = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
cuda.cuInit(0)
cuda.cuDeviceGet(ctypes.byref(device), 0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
cuda.cuCtxSetCurrent(context)
print(cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(int(sys.argv[1]))), flush=True)
sys.stdin.read()
"""


@pytest.mark.alone
def test_what_another_process_holds_is_left_to_it(folder: str) -> None:
    free, total = torch.cuda.mem_get_info()
    held = free - total // 10
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdin is not None
    try:
        assert other.stdout.readline() == "0\n"
        with LLM(folder, dtype="float16", **{**SETTINGS, "gpu_memory_utilization": 0.05}) as llm:
            assert llm.ready_report.other_bytes > held
            assert llm.ready_report.cache_bytes > 0.03 * total, "our fraction is there"
        with LLM(folder, dtype="float16", **{**SETTINGS, "gpu_memory_utilization": 0.9}) as llm:
            assert 0.05 * total < llm.ready_report.cache_bytes < 0.1 * total, "all that is free, and no more"
            assert generated(llm, params()[:40])
    finally:
        other.stdin.close()
        other.wait()


CHURN = """
import random, torch
print("ready", flush=True)
while True:
    held = [torch.empty(random.randrange(1, 1 << 31), dtype=torch.uint8, device="cuda") for _ in range(2)]
    del held
    torch.cuda.empty_cache()
"""


def test_what_is_measured_does_not_depend_on_what_others_allocate_meanwhile(folder: str) -> None:
    def report() -> EngineReady:
        with LLM(folder, dtype="float16", **SETTINGS) as llm:
            return llm.ready_report

    report()  # what the first engine of a process takes for good, such as workspaces of cuBLAS
    alone = report()
    other = subprocess.Popen([sys.executable, "-c", CHURN], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        for _ in range(3):
            beside = report()
            assert other.poll() is None, "it is still at it"
            # Workspaces of another stream now and then, and up to 1 GiB for what the driver keeps for all processes.
            step, cache = beside.activation_bytes - alone.activation_bytes, beside.cache_bytes - alone.cache_bytes
            assert abs(step) < 256 << 20, (alone.activation_bytes, beside.activation_bytes)
            assert abs(cache) < 1280 << 20, (alone.cache_bytes, beside.cache_bytes)
    finally:
        other.kill()
        other.wait()


def test_steps_never_wait_for_the_device(folder: str) -> None:
    with LLM(folder, dtype="bfloat16", **SETTINGS) as llm:
        sampling = params()
        sampling[3] = SamplingParams(logprobs=3, presence_penalty=0.5, seed=1, max_tokens=20, ignore_eos=True)
        generated(llm, sampling)
        llm.reset_prefix_cache()
        launches = Launches(llm)
        torch.cuda.set_sync_debug_mode("error")
        tokens = generated(llm, sampling)
        llm.reset_prefix_cache()
        llm.generate([prompts()[3], prompts()[4]], SamplingParams(max_tokens=5, ignore_eos=True, seed=0), use_tqdm=False)  # type: ignore[list-item]
        torch.cuda.set_sync_debug_mode("default")
        assert min(launches.chunks, launches.decodes, launches.eager) > 0, "all kinds of steps were among them"
    assert all(len(t) >= 20 for t in tokens)


def test_closing_gives_the_memory_to_other_processes(folder: str) -> None:
    with LLM(folder, dtype="float16", **SETTINGS) as llm:
        generated(llm, params())
        cache = llm.ready_report.cache_bytes
        assert torch.cuda.memory_reserved() > cache
    assert torch.cuda.memory_reserved() < cache // 4


def test_float32_greedy_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{k: v for k, v in SHAPE.items() if k not in ("architectures", "model_type")}, initializer_range=0.1)
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    reference = model.cuda()
    batch = prompts()[:6]
    expected = []
    for prompt in batch:
        ids = torch.tensor([prompt["prompt_token_ids"]], device="cuda")
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(out[0, ids.shape[1] :].tolist())
    settings = {**SETTINGS, "load_format": "auto"}
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32", **settings) as llm:
        got = [o.outputs[0].token_ids for o in llm.generate(batch, sampling, use_tqdm=False)]  # type: ignore[arg-type]
    assert got == expected
    # The same weights in bf16, through the Triton kernels: log-probabilities of the prompt stay near those of float32.
    ids = batch[0]["prompt_token_ids"]
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids], device="cuda")).logits[0].float().log_softmax(-1)
    wanted = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
    with LLM(str(tmp_path), dtype="bfloat16", **settings) as llm:
        scored = llm.generate([batch[0]], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)[
            0
        ].prompt_logprobs  # type: ignore[list-item]
    assert scored is not None
    errors = [abs(row[token].logprob - want) for row, token, want in zip(scored[1:], ids[1:], wanted, strict=True) if row is not None]
    assert len(errors) == len(ids) - 1
    assert float(np.mean(errors)) < 0.05
    assert max(errors) < 0.4
