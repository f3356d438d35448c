"""Which CPU kernels a configuration means."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.config.types import DeviceInfo, EngineConfig
from octavo.errors import ConfigError


def config(*, built: bool | None, path: str = "/nowhere", **settings: Any) -> EngineConfig:
    return resolve(
        EngineArgs(**settings),
        path=path,
        name="tiny",
        hf_config={"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 512},
        eos_token_ids=(2,),
        device=DeviceInfo("cpu", "test", 2**33, 2**33, 1, native_kernels=built),
    )


def test_native_where_built_with_a_float16_cache() -> None:
    chosen = config(built=True)
    assert (chosen.device.native_kernels, chosen.device.activations, chosen.cache.dtype) == (True, "int8", "float16")
    assert config(built=True, kv_cache_dtype="float32").cache.dtype == "float32"
    assert config(built=True, cpu_activations="float32").device.activations == "float32"


@pytest.mark.parametrize("name", ["float32", "float"])
def test_who_asks_for_float32_gets_a_float32_cache_too_unless_asked_otherwise(name: str) -> None:
    asked = config(built=True, dtype=name)
    assert (asked.device.native_kernels, asked.model.dtype, asked.cache.dtype) == (True, "float32", "float32")
    assert config(built=True, dtype=name, kv_cache_dtype="float16").cache.dtype == "float16"


@pytest.mark.parametrize("settings", [{"cpu_kernels": "torch"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "cpu_kernels": "torch"}])
def test_torch_when_asked_or_not_float32(settings: dict[str, str]) -> None:
    chosen = config(built=True, **settings)
    assert chosen.device.native_kernels is False
    assert chosen.cache.dtype == chosen.model.dtype
    assert len(chosen.warnings) == ("cpu_kernels" not in settings)
    assert not chosen.warnings or "--dtype bfloat16" in chosen.warnings[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "half"])
def test_a_packed_file_stays_with_the_compiled_kernels_whatever_dtype_is_asked_for(dtype: str) -> None:
    chosen = config(built=True, path="/nowhere/m.gguf", dtype=dtype)
    assert (chosen.device.native_kernels, chosen.model.dtype, chosen.cache.dtype) == (True, "float32", "float16")
    assert f"--dtype {dtype}" in chosen.warnings[0]
    unpacked = config(built=True, path="/nowhere/m.gguf", dtype=dtype, cpu_kernels="torch")
    assert (unpacked.device.native_kernels, unpacked.model.dtype) == (False, "bfloat16" if dtype == "bfloat16" else "float16")
    assert not unpacked.warnings


def test_missing_kernels_are_said_once() -> None:
    [warning] = config(built=False).warnings
    assert "compiler" in warning
    assert not config(built=False, cpu_kernels="torch").warnings
    assert not config(built=None).warnings


def test_native_that_was_not_built_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--cpu-kernels native.*--cpu-kernels torch"):
        config(built=False, cpu_kernels="native")
