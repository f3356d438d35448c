"""Models of every family divided among ranks: together they compute what one computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.types import ParallelConfig
from octavo.errors import ConfigError
from octavo.models.loader import check_divisible, load_model
from octavo.models.sharding import Shard, possible_sizes, shard_spec
from octavo.ops.registry import load_ops
from octavo.parallel.group import ALONE, TensorGroup
from tests.models.contiguous import ContiguousAttend, load, run
from tests.models.test_parity import CASES, IDS
from tests.models.test_quantized_models import SIZES as LOW_BIT_SIZES
from tests.models.test_quantized_models import quantize
from tests.support.quantized_layouts import LAYOUTS
from tests.support.thread_group import ThreadGroup, ThreadPipeline, one_after_the_other, together
from tests.support.tiny_models import config_for, save_tiny

EXPERTS = [name for name in CASES if any(part in name for part in ("moe", "mixtral", "deepseek", "gpt-oss"))]


def logits_of_ranks(folder: Path, size: int, *, whole_experts: bool = False, ops: str = "cpu", **settings: Any) -> list[torch.Tensor]:
    config = config_for(folder, **settings)
    config = replace(config, parallel=ParallelConfig(tensor=size, whole_experts=whole_experts))

    def rank(group: TensorGroup) -> torch.Tensor:
        model = load_model(config, load_ops(ops), torch.device("cpu"), lambda *_: None, group)
        return run(model, IDS, chunks=[30, 1, 9])

    return together(size, rank)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does(tmp_path: Path, name: str) -> None:
    family, overrides = CASES[name]
    save_tiny(tmp_path, family, **overrides)
    first, second = logits_of_ranks(tmp_path, 2)
    assert torch.equal(first, second)  # each rank samples by itself
    torch.testing.assert_close(first, run(load(tmp_path), IDS), atol=1e-4, rtol=1e-4)


JOINED = {"llama": 2, "qwen3": 2, "deepseek-v3": 2, "gpt-oss": 2, "gemma2": 0, "olmo2": 0, "gpt2": 0, "falcon-7b": 0}
"""Family: sums a layer with nothing but an addition between them and an RMSNorm."""


@pytest.mark.parametrize("name", JOINED)
def test_sums_with_the_norm_behind_them_at_once(tmp_path: Path, name: str) -> None:
    family, overrides = CASES[name]
    save_tiny(tmp_path, family, **overrides)
    config = replace(config_for(tmp_path), parallel=ParallelConfig(tensor=2))

    def rank(group: ThreadGroup) -> torch.Tensor:
        group.fuses = True
        model = load_model(config, load_ops("cpu"), torch.device("cpu"), lambda *_: None, group)
        logits = run(model, IDS)
        assert group.joined == JOINED[name] * model.spec.num_layers + (JOINED[name] > 0)  # the embedding
        return logits

    first, second = together(2, rank)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, run(load(tmp_path), IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2", "gpt2", "falcon-7b", "deepseek-v3", "cohere-plus", "gpt-oss"])
def test_four_ranks_where_some_keep_the_same_heads(tmp_path: Path, name: str) -> None:
    family, overrides = CASES[name]
    save_tiny(tmp_path, family, **overrides)
    for logits in logits_of_ranks(tmp_path, 4):
        torch.testing.assert_close(logits, run(load(tmp_path), IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_dealt_out_whole(tmp_path: Path, name: str) -> None:
    family, overrides = CASES[name]
    save_tiny(tmp_path, family, **overrides)
    for logits in logits_of_ranks(tmp_path, 2, whole_experts=True):
        torch.testing.assert_close(logits, run(load(tmp_path), IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_stages_compute_what_one_does(tmp_path: Path, name: str, dtype: str) -> None:
    """To the bit: the same operations in the same order."""
    family, overrides = CASES[name]
    save_tiny(tmp_path, family, **overrides)
    config = replace(config_for(tmp_path, dtype=dtype), parallel=ParallelConfig(pipeline=2))

    def stage(pipeline: ThreadPipeline) -> torch.Tensor | None:
        model = load_model(config, load_ops("cpu"), torch.device("cpu"), lambda *_: None, pipeline=pipeline)
        if model.makes_logits:
            return run(model, IDS, chunks=[30, 1, 9])
        attend, start = ContiguousAttend(model.layer_specs), 0
        for count in (30, 1, 9):
            model.forward(torch.tensor(IDS[start : start + count]), torch.arange(start, start + count), attend)
            start += count
        return None

    _, logits = one_after_the_other(2, stage)
    assert logits is not None
    assert torch.equal(logits, run(load(tmp_path, dtype=dtype), IDS, chunks=[30, 1, 9]))


@pytest.mark.parametrize("method", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_weights_rounded_while_they_are_loaded_are_those_of_one_rank(tmp_path: Path, name: str, method: str) -> None:
    """A row's scale is that of all its columns, which ranks share."""
    family, overrides = CASES[name]
    save_tiny(tmp_path, family, **overrides)
    config = config_for(tmp_path)
    config = replace(config, model=replace(config.model, quantization=method))

    def logits(group: TensorGroup) -> torch.Tensor:
        divided = replace(config, parallel=ParallelConfig(tensor=group.size))
        return run(load_model(divided, load_ops("cpu"), torch.device("cpu"), lambda *_: None, group), IDS)

    whole = logits(ALONE)
    for found in together(2, logits):
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


QUANTIZED = Path(__file__).parents[1] / "fixtures" / "quantized"


@pytest.mark.parametrize("name", sorted(p.name for p in QUANTIZED.iterdir() if (p / "config.json").exists()))
@pytest.mark.parametrize("size", [2, 4])
def test_low_bit_checkpoints(name: str, size: int) -> None:
    """Groups are cut where ranks are; a rank's scales are those of its part."""
    expected = run(load(QUANTIZED / name), IDS)
    for logits in logits_of_ranks(QUANTIZED / name, size):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "name", ["awq-32", "gptq-act-order", "gptq-8-act-order", "w4a16-act-order", "gptq-v2", "squeezellm-3-sparse", "w8a16", "nf4", "mxfp4"]
)
@pytest.mark.parametrize("size", [2, 4])
def test_packed_kinds(name: str, size: int, tmp_path: Path) -> None:
    """Each rank computes with its part as it is packed, also where an activation order scatters its groups, or ranks share some."""
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **LOW_BIT_SIZES)
    plain = quantize(folder, LAYOUTS[name])
    expected = run(load(plain), IDS)
    for logits in logits_of_ranks(folder, size, ops="reference"):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)


def test_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", vocab_size=131, tie_word_embeddings=True)
    for logits in logits_of_ranks(tmp_path, 2):
        assert logits.shape[1] == 131
        torch.testing.assert_close(logits, run(load(tmp_path), IDS), atol=1e-4, rtol=1e-4)


def test_made_up_weights_can_be_divided(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    first, second = logits_of_ranks(tmp_path, 2, load_format="dummy")
    assert torch.equal(first, second)
    assert first.std() > 0


@pytest.mark.parametrize(
    ("family", "overrides", "size", "words"),
    [
        ("llama", {}, 3, "4 attention heads"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8}, 2, "3 key/value heads"),
        ("llama", {"intermediate_size": 33}, 2, "an intermediate size of 33"),
        ("qwen3_moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 15}, 2, "an intermediate size of 15"),
    ],
)
def test_what_does_not_divide_is_said(tmp_path: Path, family: str, overrides: dict[str, Any], size: int, words: str) -> None:
    save_tiny(tmp_path, family, **overrides)
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}.*{words}.*Possible sizes: 1"):
        logits_of_ranks(tmp_path, size)


@pytest.mark.parametrize(
    ("overrides", "whole", "advice"),
    [
        ({"num_experts": 3, "num_experts_per_tok": 2}, True, "3 experts.* Without --enable-expert-parallel 2 will do."),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 15, "intermediate_size": 32},
            False,
            "size of 15.* With --enable-expert-parallel 2 will do.",
        ),
    ],
)
def test_the_other_way_to_deal_out_experts_is_named_where_it_would_do(
    tmp_path: Path, overrides: dict[str, Any], whole: bool, advice: str
) -> None:
    save_tiny(tmp_path, "qwen3_moe", **overrides)
    config = config_for(tmp_path)
    config = replace(config, parallel=replace(config.parallel, tensor=2, whole_experts=whole))
    with pytest.raises(ConfigError, match=advice):
        check_divisible(config)


def test_possible_sizes(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_attention_heads=8, num_key_value_heads=2)
    spec = load(tmp_path).spec
    assert possible_sizes(spec) == [1, 2, 4, 8]
    assert [shard_spec(spec, Shard(0, n)).num_kv_heads for n in (1, 2, 4, 8)] == [2, 1, 1, 1]
