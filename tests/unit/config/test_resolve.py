"""config.resolve: defaults by device, limits, and errors in the user's words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.device import detect_device
from octavo.config.resolve import resolve
from octavo.config.sizes import format_bytes, parse_size
from octavo.config.types import DeviceInfo, EngineConfig, PoolingConfig
from octavo.errors import CheckpointError, ConfigError, NotYet, OctavoError, UnsupportedModel

CPU = DeviceInfo("cpu", "test cpu", 16 << 30, 8 << 30, 2)
GPU = DeviceInfo("cuda", "test gpu", 140 << 30, 140 << 30, 16, (9, 0))
OLD_GPU = DeviceInfo("cuda", "old gpu", 16 << 30, 16 << 30, 16, (7, 5))
LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 4096, "dtype": "bfloat16"}


def make(device: DeviceInfo = CPU, hf: dict[str, Any] | None = None, **settings: Any) -> EngineConfig:
    return resolve(EngineArgs(**settings), path="/m", name="m", hf_config={**LLAMA, **(hf or {})}, eos_token_ids=(2, 900), device=device)


def test_defaults_follow_the_device() -> None:
    cpu, gpu = make(CPU), make(GPU)
    assert (cpu.model.dtype, gpu.model.dtype) == ("float32", "bfloat16")
    assert (cpu.scheduler.inflight, gpu.scheduler.inflight) == (0, 1)
    assert (cpu.scheduler.target_step_ms, gpu.scheduler.target_step_ms) == (250.0, 200.0)
    assert make(target_step_ms=0).scheduler.target_step_ms is None
    assert (cpu.scheduler.first_chunk, gpu.scheduler.first_chunk) == (128, 2048)
    assert (cpu.scheduler.max_num_seqs, gpu.scheduler.max_num_seqs) == (64, 1024)
    assert make(GPU, {"dtype": "float32"}).model.dtype == "float16"
    assert make(OLD_GPU).model.dtype == "float16"
    assert cpu.model.eos_token_ids == (2,), "ids outside the vocabulary cannot end a sequence"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_memory_bytes": 13 * 2**30}, None),
        ({"kv_cache_memory_bytes": 17 * 2**30}, r"--kv-cache-memory-bytes: 17.0 GiB is more than the 16.0 GiB.* at most 17179869184,"),
        (
            {"kv_cache_memory_bytes": 13 * 2**30, "data_parallel_size": 2},
            r"13.0 GiB, 2 times \(once for each process\), is more.* 8589934592,",
        ),
        (
            {"cpu_kvcache_space": 5.0, "tensor_parallel_size": 4},
            r"--cpu-kvcache-space: 5.0 GiB, 4 times .* at most 4.00 \(GiB\), or leave it",
        ),
        ({"cpu_kvcache_space": 4.0, "tensor_parallel_size": 4}, None),
    ],
)
def test_caches_that_a_host_has_no_memory_for(settings: dict[str, Any], words: str | None) -> None:
    host = dataclasses.replace(CPU, total_bytes=2**34, free_bytes=2**34)
    if words is None:
        assert make(host, **settings).cache.sized
        return
    with pytest.raises(ConfigError, match=words):
        make(host, **settings)


def test_offline_nobody_waits_for_single_tokens() -> None:
    for device, target in ((GPU, None), (CPU, 250.0)):
        found = resolve(EngineArgs(), path="/m", name="m", hf_config=LLAMA, eos_token_ids=(2,), device=device, offline=True)
        assert found.scheduler.target_step_ms == target
    asked = EngineArgs(target_step_ms=90)
    found = resolve(asked, path="/m", name="m", hf_config=LLAMA, eos_token_ids=(2,), device=GPU, offline=True)
    assert found.scheduler.target_step_ms == 90.0


def test_requests_at_once_follow_the_budget_of_a_step() -> None:
    followed, cut = make(GPU, max_num_batched_tokens=128), make(GPU, max_num_batched_tokens=128, max_num_seqs=256)
    assert followed.scheduler.max_num_seqs == cut.scheduler.max_num_seqs == 128
    assert [w for w in cut.warnings if w not in followed.warnings] == [
        "--max-num-seqs 256 is more than the token budget of a step: running with 128."
    ]


def test_resolving_is_pure() -> None:
    assert make(max_model_len="2k") == make(max_model_len="2k")


def test_context_length() -> None:
    assert make().model.max_model_len == 4096
    assert make(max_model_len="1K").model.max_model_len == 1024
    shrunk = make(max_model_len=8192)
    assert shrunk.model.max_model_len == 4096
    assert any("4096" in w for w in shrunk.warnings)
    assert make(max_model_len="auto").model.auto_max_model_len
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}
    assert make(hf=yarn).model.max_model_len == 16384
    assert make(hf={"rope_scaling": {"type": "linear", "factor": 2.0}}).model.max_model_len == 8192
    assert make(hf={"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}).model.max_model_len == 4096


def test_one_token_is_enough_to_embed() -> None:
    """A model that pools has no reply to make room for."""
    pooling = PoolingConfig(("mean",), normalize=True)
    args = EngineArgs(max_model_len=1)
    found = resolve(args, path="/m", name="m", hf_config=LLAMA, eos_token_ids=(2,), device=CPU, pooling=pooling)
    assert found.model.max_model_len == 1


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"max_model_len": 0}, ConfigError, "--max-model-len must be at least 1, got 0"),
        ({"max_model_len": 1}, ConfigError, "--max-model-len must be at least 2, got 1: a request needs room for one token of its prompt"),
        ({"max_model_len": "many"}, ConfigError, "not a size"),
        ({"dtype": "bfloa16"}, ConfigError, "Did you mean bfloat16"),
        ({"gpu_memory_utilization": 1.5}, ConfigError, "--gpu-memory-utilization must be greater than 0 and at most 1"),
        ({"block_size": 0}, ConfigError, "--block-size must be from 1 to 256"),
        ({"max_num_seqs": 2.5}, ConfigError, "--max-num-seqs must be a whole number"),
        ({"cpu_offload_gb": 2.0}, NotYet, "--cpu-offload-gb 2.0"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, ConfigError, "4096"),
        ({"scheduling_policy": "random"}, ConfigError, "fcfs, priority, fair"),
        ({"target_step_ms": -1}, ConfigError, "--target-step-ms must be 0, or greater than 0, got -1"),
        ({"target_step_ms": False}, ConfigError, "--target-step-ms must be 0, or"),
    ],
)
def test_bad_settings(settings: dict[str, Any], error: type[OctavoError], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**settings)


@pytest.mark.parametrize(
    ("hf", "error"),
    [
        ({"architectures": None}, UnsupportedModel),
        ({"vocab_size": "many"}, CheckpointError),
        ({"max_position_embeddings": -1}, CheckpointError),
        ({"max_position_embeddings": 1}, CheckpointError),
        ({"rope_scaling": 3}, CheckpointError),
        ({"quantization_config": {"quant_method": "quip"}}, UnsupportedModel),
        ({"quantization_config": "awq"}, CheckpointError),
    ],
)
def test_bad_model_config(hf: dict[str, Any], error: type[OctavoError]) -> None:
    with pytest.raises(error, match=r"^m: "):
        make(hf=hf)


def test_ignored_settings_warn() -> None:
    assert any("--swap-space" in w for w in make(swap_space=8.0).warnings)


def test_old_gpu_refuses_bfloat16() -> None:
    with pytest.raises(ConfigError, match="float16"):
        make(OLD_GPU, dtype="bfloat16")


def test_every_setting_is_described() -> None:
    for f in dataclasses.fields(EngineArgs):
        assert f.metadata["help"].endswith("."), f.name
        assert f.metadata["group"], f.name


def test_sizes() -> None:
    assert [parse_size(s) for s in ("8k", "8K", "1.5k", "2m", "1G", "7")] == [8000, 8192, 1500, 2_000_000, 2**30, 7]
    for bad in ("1.5K", "k", "", "1.5", "2x"):
        with pytest.raises(ConfigError):
            parse_size(bad)
    assert format_bytes(96.5 * 2**20) == "96.5 MiB"


def test_cpu_is_always_found() -> None:
    device = detect_device("cpu")
    assert device.kind == "cpu"
    assert device.threads >= 1
    assert 0 < device.free_bytes <= device.total_bytes
    for bad in (0, -3, 100_000):
        with pytest.raises(ConfigError, match="threads must be from 1 to"):
            detect_device("cpu", threads=bad)
    with pytest.raises(ConfigError, match="auto, cpu or cuda"):
        detect_device("tpu")


QUANTIZED = {"quantization_config": {"quant_method": "awq", "bits": 4}}


def test_quantisation_is_what_the_checkpoint_says() -> None:
    assert make().model.quantization is None
    assert make(hf=QUANTIZED).model.quantization == "awq"
    assert make(hf=QUANTIZED, quantization="awq_marlin").model.quantization == "awq"
    assert make(hf={"quantization_config": {"quant_algo": "FP8"}}).model.quantization == "modelopt"
    assert make(quantization="int8").model.quantization == "int8"


def test_quantised_models_compute_in_bfloat16_where_they_can() -> None:
    half = {"dtype": "float16"}
    assert make(GPU, hf=half).model.dtype == "float16"
    assert make(GPU, hf=half | QUANTIZED).model.dtype == "bfloat16"
    assert make(OLD_GPU, hf=half | QUANTIZED).model.dtype == "float16"
    assert make(GPU, hf=half | QUANTIZED, dtype="float16").model.dtype == "float16"


@pytest.mark.parametrize(
    ("device", "hf", "settings", "words"),
    [
        (CPU, QUANTIZED, {"quantization": "gptq"}, "--quantization gptq: the weights of .* are quantised with awq"),
        (CPU, {}, {"quantization": "awq"}, "are not quantised, and only fp8 and int8 are made while loading.*octavo quantize"),
        (CPU, {}, {"quantization": "fp9"}, "'fp9' is not one of .*awq.* Did you mean fp8"),
        (OLD_GPU, {}, {"quantization": "fp8"}, r"old gpu \(compute capability 7.5\) has no float8.*int8"),
    ],
)
def test_quantisation_that_cannot_be(device: DeviceInfo, hf: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(device, hf=hf, **settings)


def test_a_card_without_float8_says_what_it_does_instead() -> None:
    stored = {"quantization_config": {"quant_method": "fp8"}}
    assert any("has no float8: the weights take 16 bits" in w for w in make(OLD_GPU, hf=stored).warnings)
    assert not any("float8" in w for w in make(GPU, hf=stored).warnings)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_dtype_that_is_none_is_said(device: DeviceInfo) -> None:
    for stated in ("zork", 7, ["float32"]):
        with pytest.raises(CheckpointError, match=r"The config's dtype .* is no number format .* --dtype"):
            make(device, hf={"dtype": stated})
        assert make(device, hf={"dtype": stated}, dtype="float32").model.dtype == "float32"
    for stated in ("float32", "torch.bfloat16", "float8_e4m3fn", "auto", None):
        make(device, hf={"torch_dtype": stated})


def test_ends_beyond_the_vocabulary_are_said() -> None:
    assert any("eos_token_id 900 is beyond the vocabulary (100 tokens)" in w for w in make().warnings)
    assert any("Correct it in generation_config.json or config.json" in w for w in make().warnings)
    config = {**LLAMA, "model_type": "llama"}
    gguf = resolve(EngineArgs(), path="/m.gguf", name="m", hf_config=config, eos_token_ids=(900,), device=CPU)
    said = next(w for w in gguf.warnings if "eos_token_id 900" in w)
    assert "metadata say so (tokenizer.ggml.eos_token_id, llama.vocab_size)" in said and "config.json" not in said
