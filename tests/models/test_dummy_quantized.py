"""Models made from a config alone, with weights as a checkpoint of its quantization_config would have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.config.types import ParallelConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.models.loader import load_model
from octavo.ops.packed import DenseWeight, Float8Weight, Int4Weight, Int8Weight, SegmentedWeight, TableWeight
from octavo.ops.registry import load_ops
from tests.models.contiguous import load, run
from tests.models.test_quantized_models import FAMILIES
from tests.support.quantized_layouts import LAYOUTS
from tests.support.thread_group import together
from tests.support.tiny_models import config_for, tiny_model

IDS = [3, 5, 7, 9]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def config_of(family: str, quantization: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    config: dict[str, Any] = tiny_model(family, **(SIZES | overrides)).config.to_dict()
    return config | {"architectures": [type(tiny_model(family, **(SIZES | overrides))).__name__], "quantization_config": quantization}


def dummy(config: dict[str, Any], ops: str) -> Any:
    return load("nowhere", ops=ops, hf_config=config, load_format="dummy")


@pytest.mark.parametrize("ops", ["reference", "cpu", "native"])
@pytest.mark.parametrize("name", ["awq-32", "gptq-act-order", "squeezellm", "fp8-block", "fp8-static", "w4a16", "w8a8", "nf4", "mxfp4"])
def test_every_format_runs(name: str, ops: str) -> None:
    config = config_of("llama", LAYOUTS[name](64, 64, 0).config)
    model = dummy(config, ops)
    logits = run(model, IDS)
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 0.1
    assert torch.equal(run(dummy(config, ops), IDS), logits)
    if ops == "reference":
        kinds = {type(layer.attention.qkv.weight) for layer in model._layers} | {type(layer.mlp.down.weight) for layer in model._layers}
        assert len(kinds) == 1 and kinds <= {Int4Weight, TableWeight, Int8Weight, Float8Weight}
        assert isinstance(model._head.weight, DenseWeight)


def test_group_sizes_that_do_not_divide() -> None:
    with pytest.raises(CheckpointError, match=r"group_size 96 does not divide the 128 inputs of model\.layers\.0"):
        dummy(config_of("llama", LAYOUTS["awq-32"](64, 64, 0).config | {"group_size": 96}), "cpu")


@pytest.mark.parametrize("ops", ["reference", "cpu", "native"])
def test_modules_that_the_config_leaves_out(ops: str) -> None:
    quantization = LAYOUTS["awq-32"](64, 64, 0).config | {"modules_to_not_convert": ["k_proj", "layers.1"]}
    model = dummy(config_of("llama", quantization), ops)
    assert bool(run(model, IDS).isfinite().all())
    if ops == "reference":
        first, second = model._layers
        assert isinstance(first.attention.qkv.weight, SegmentedWeight)
        assert [type(part) for part in first.attention.qkv.weight.parts] == [Int4Weight, DenseWeight, Int4Weight]
        assert isinstance(second.mlp.down.weight, DenseWeight)


def test_experts() -> None:
    quantization = LAYOUTS["gptq-32"](64, 64, 0).config
    model: Any = dummy(config_of("mixtral", quantization, num_local_experts=4, num_experts_per_tok=2), "reference")
    assert isinstance(model._layers[0].mlp.gate_up.low_bit, Int4Weight)
    assert bool(run(model, IDS).isfinite().all())


def test_mxfp4_experts_alone() -> None:
    config = config_of("gpt_oss", {"quant_method": "mxfp4"}, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
    model: Any = dummy(config, "reference")
    assert isinstance(model._layers[0].mlp.gate_up.low_bit, TableWeight)
    assert isinstance(model._layers[0].attention.qkv.weight, DenseWeight)
    assert bool(run(model, IDS).isfinite().all())


def test_what_it_takes_is_known_before() -> None:
    config = config_of("llama", LAYOUTS["w4a16"](64, 64, 0).config, num_hidden_layers=8)
    sizes = []
    resolved = config_for("nowhere", hf_config=config, load_format="dummy")
    model = load_model(resolved, load_ops("reference"), torch.device("cpu"), lambda _, done, total: sizes.append((done, total)))
    assert sizes[0][0] == 0 and sizes[-1][0] == sizes[-1][1]
    assert [done for done, _ in sizes] == sorted(done for done, _ in sizes)
    assert model.weights_bytes == pytest.approx(sizes[-1][1], rel=0.05)
    small = config_for("nowhere", hf_config=config, load_format="dummy", total_bytes=model.weights_bytes // 2)
    with pytest.raises(ConfigError, match="The weights of tiny need"):
        load_model(small, load_ops("reference"), torch.device("cpu"), lambda *_: None)


@pytest.mark.parametrize("case", FAMILIES)
def test_families(case: str) -> None:
    family, overrides, name, _ = FAMILIES[case]
    model = dummy(config_of(family, LAYOUTS[name](64, 64, 0).config, **overrides), "reference")
    assert bool(run(model, IDS).isfinite().all())
    assert any(kind.startswith(("4-bit", "8-bit")) for kind in model.weights_kinds)


@pytest.mark.parametrize("name", ["awq-32", "gptq-act-order", "fp8-block", "squeezellm"])
def test_ranks_make_up_their_shares(name: str) -> None:
    resolved = config_for("nowhere", hf_config=config_of("llama", LAYOUTS[name](64, 64, 0).config), load_format="dummy")
    resolved = replace(resolved, parallel=ParallelConfig(tensor=2))
    first, second = together(
        2, lambda group: run(load_model(resolved, load_ops("reference"), torch.device("cpu"), lambda *_: None, group), IDS)
    )
    assert torch.equal(first, second)
    assert bool(first.isfinite().all()) and float(first.std()) > 0.1
