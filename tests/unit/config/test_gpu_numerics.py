"""Settings about how a GPU computes: float8 cache, batch invariance, attention backend. Each refusal is a sentence with a way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.tiny_models import save_tiny

from octavo.attention.base import LayerSpec
from octavo.attention.select import attention_class
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.config.types import DeviceInfo, EngineConfig
from octavo.errors import ConfigError
from octavo.frontend.launch import prepare_launch
from octavo.worker.worker import cache_warnings, quantized_for_nothing

HOPPER = DeviceInfo("cuda", "H200", 2**37, 2**37, 8, capability=(9, 0))
AMPERE = dataclasses.replace(HOPPER, name="A100", capability=(8, 0))
TURING = dataclasses.replace(HOPPER, name="T4", capability=(7, 5))
CPU = DeviceInfo("cpu", "cpu", 2**33, 2**33, 1, native_kernels=True)
HEADS = (LayerSpec(8, 2, 128, 1.0),)


def config(device: DeviceInfo = HOPPER, **settings: Any) -> EngineConfig:
    hf_config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 512, "torch_dtype": "bfloat16"}
    return resolve(EngineArgs(**settings), path="/nowhere", name="tiny", hf_config=hf_config, eos_token_ids=(2,), device=device)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_float8_cache(name: str) -> None:
    assert config(kv_cache_dtype=name).cache.dtype == "float8_e4m3fn"
    assert config().cache.dtype == "bfloat16"


def test_scales_found_while_running() -> None:
    assert config(kv_cache_dtype="fp8", calculate_kv_scales=True).cache.calibrate
    assert not config(kv_cache_dtype="fp8").cache.calibrate
    useless = config(calculate_kv_scales=True)
    assert not useless.cache.calibrate
    assert any("--calculate-kv-scales has no effect" in warning for warning in useless.warnings)


@pytest.mark.parametrize(
    ("device", "settings", "words"),
    [
        (HOPPER, {"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2: its two mantissa bits are too coarse.*fp8_e4m3"),
        (HOPPER, {"kv_cache_dtype": "q8_0"}, "--kv-cache-dtype q8_0: blocks are not kept here. Use fp8"),
        (CPU, {"kv_cache_dtype": "bf16"}, "--kv-cache-dtype bf16: it is called bfloat16 here"),
        (CPU, {"kv_cache_dtype": "fp8"}, "fp8 needs an NVIDIA GPU.*float16"),
        (AMPERE, {"kv_cache_dtype": "fp8"}, r"A100 \(compute capability 8\.0\).*8\.9.*auto"),
        (HOPPER, {"kv_cache_dtype": "fp8", "dtype": "float32"}, "bfloat16 or float16, not float32"),
        (HOPPER, {"batch_invariant": True, "dtype": "float32"}, "--batch-invariant on a GPU.*bfloat16 or float16"),
        (CPU, {"batch_invariant": True, "cpu_kernels": "torch"}, "--batch-invariant on a CPU needs the native kernels"),
        (CPU, {"batch_invariant": True, "dtype": "bfloat16"}, "--batch-invariant on a CPU needs the native kernels"),
        (CPU, {"batch_invariant": True, "tensor_parallel_size": 2}, "--batch-invariant on a CPU.*one process.*leave out -tp and -pp"),
        (CPU, {"batch_invariant": True, "pipeline_parallel_size": 2}, "--batch-invariant on a CPU.*one process.*leave out -tp and -pp"),
        (HOPPER, {"batch_invariant": True, "attention_backend": "FLASHINFER"}, "FLASHINFER cannot replace"),
        (HOPPER, {"attention_backend": "FLASHINFR"}, "Did you mean FLASHINFER"),
        (
            HOPPER,
            {"batch_invariant": True, "kv_cache_dtype": "fp8", "calculate_kv_scales": True},
            "--batch-invariant: with --calculate-kv-scales.*Leave out one",
        ),
    ],
)
def test_refusals(device: DeviceInfo, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(device, **settings)


def test_warnings_of_a_float8_cache() -> None:
    fp8 = config(kv_cache_dtype="fp8")
    (none,), (some,) = cache_warnings(fp8, 30, 0), cache_warnings(fp8, 30, 28)
    assert "the checkpoint has no k_scale" in none and "--calculate-kv-scales" in none
    assert "2 layers have no k_scale" in some
    assert cache_warnings(fp8, 30, 30) == []
    assert cache_warnings(config(kv_cache_dtype="fp8", calculate_kv_scales=True), 30, 0) == []
    (hint,) = cache_warnings(config(), 30, 30)
    assert "--kv-cache-dtype fp8 holds twice the tokens" in hint
    for device, scaled in ((HOPPER, 0), (AMPERE, 30), (CPU, 30)):
        assert cache_warnings(config(device), 30, scaled) == []


def test_gguf_may_be_named_too() -> None:
    hf_config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100}

    def resolved(path: str, **settings: Any) -> EngineConfig:
        return resolve(
            EngineArgs(quantization="gguf", **settings), path=path, name="m", hf_config=hf_config, eos_token_ids=(2,), device=CPU
        )

    assert resolved("/m.gguf").model.quantization is None
    assert resolved("/m", load_format="gguf").model.quantization is None
    with pytest.raises(ConfigError, match="--quantization gguf: m is no GGUF file"):
        resolved("/m")


def test_a_card_without_float8_says_what_becomes_of_the_weights() -> None:
    def warned(device: DeviceInfo, method: str, **kinds: int) -> list[str]:
        chosen = config(device)
        chosen = dataclasses.replace(chosen, model=dataclasses.replace(chosen.model, quantization=method))
        return quantized_for_nothing(chosen, kinds)

    (told,) = warned(AMPERE, "compressed-tensors", bfloat16=100)
    assert "are kept dequantised (bfloat16)" in told and "A100 has 8.0" in told
    assert warned(AMPERE, "fp8", bfloat16=100) == []  # its settings say so already
    assert warned(HOPPER, "fp8", bfloat16=10, **{"8-bit floating point": 90}) == []
    (told,) = warned(HOPPER, "awq", bfloat16=100)
    assert "8.9" not in told


def test_attention_backends_by_vllms_names() -> None:
    assert config().attention == "auto"
    assert config(attention_backend="TRITON_ATTN").attention == "triton"
    assert config(attention_backend="flashinfer").attention == "flashinfer"
    assert config(attention_backend="TORCH_SDPA").attention == "torch"
    other = config(attention_backend="FLASH_ATTN")
    assert other.attention == "auto"
    assert any("FLASH_ATTN" in w for w in other.warnings)
    assert any("no effect on a CPU" in w for w in config(CPU, attention_backend="FLASHINFER").warnings)


def test_batch_invariance_is_off_unless_asked_for() -> None:
    assert not config().batch_invariant
    assert config(batch_invariant=True).batch_invariant
    assert config(CPU, batch_invariant=True).batch_invariant


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_environment_variable_means_the_setting(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    save_tiny(tmp_path, "llama")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    common = {"model": str(tmp_path), "device": "cpu", "skip_tokenizer_init": True}
    monkeypatch.setattr("octavo.config.device.native_kernels_path", lambda: "there")
    assert prepare_launch(EngineArgs(**common)).config.batch_invariant is (value == "1")
    assert prepare_launch(EngineArgs(**common, batch_invariant=False)).config.batch_invariant is False


def test_backends_of_a_gpu() -> None:
    pytest.importorskip("triton")
    assert attention_class(config(), HEADS).name == "triton"
    assert attention_class(config(kv_cache_dtype="fp8"), HEADS).name == "triton"
    assert attention_class(config(batch_invariant=True), HEADS).name == "triton-invariant"
    assert attention_class(config(attention_backend="TORCH_SDPA"), HEADS).name == attention_class(config(dtype="float32"), HEADS).name
    assert attention_class(config(CPU, batch_invariant=True), HEADS).name == "native-cpu"


@pytest.mark.parametrize(
    ("device", "heads", "settings", "words"),
    [
        (HOPPER, (LayerSpec(8, 2, 320, 1.0),), {"batch_invariant": True}, "--batch-invariant needs.*heads of 16 to 256.*320"),
        (HOPPER, (LayerSpec(8, 2, 8, 1.0),), {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 needs.*heads of 8"),
        (HOPPER, HEADS, {"kv_cache_dtype": "fp8", "attention_backend": "TORCH_SDPA"}, "fp8 needs.*TORCH_SDPA"),
        (TURING, HEADS, {"batch_invariant": True, "dtype": "float16"}, r"T4 is too old.*7\.5; 8\.0"),
        (HOPPER, HEADS, {"attention_backend": "TRITON_ATTN", "dtype": "float32"}, "TRITON_ATTN needs.*float32"),
    ],
)
def test_what_no_kernel_can_do_is_refused(device: DeviceInfo, heads: tuple[LayerSpec, ...], settings: dict[str, Any], words: str) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match=words):
        attention_class(config(device, **settings), heads)
