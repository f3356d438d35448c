"""Whole models with low-bit layers answer as the same models with the dequantised weights do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.models.loader import has_low_bit, load_model
from octavo.ops.packed import Float8Weight, Int8Weight, SegmentedWeight
from octavo.ops.registry import load_ops
from octavo.worker.worker import quantized_for_nothing
from tests.models.contiguous import load, run
from tests.models.test_parity import LATENT
from tests.support.quantized_layouts import LAYOUTS, Layout, Tensors, gptq
from tests.support.tiny_models import config_for, save_tiny

IDS = torch.randint(3, 128, (12,), generator=torch.Generator().manual_seed(7)).tolist()
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
Make = Callable[[int, int, int], Layout]


def quantize(folder: Path, make: Make, *, leave: tuple[str, ...] = (), change: Callable[[Tensors], None] | None = None) -> Path:
    """Replace the linear layers of a checkpoint by random low-bit ones; the checkpoint of what they are worth.

    Args:
        leave: parts of names that stay as they are.
    """
    plain = folder.with_name(folder.name + "-plain")
    plain.mkdir()
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    quantized, dense = dict(tensors), dict(tensors)
    layout = None
    for seed, name in enumerate(sorted(tensors)):
        rows_columns = tensors[name].shape
        linear = len(rows_columns) == 2 and name.endswith(".weight") and "embed" not in name and "lm_head" not in name
        if not linear or any(part in name for part in leave):
            continue
        layout = make(rows_columns[0], rows_columns[1], seed)
        del quantized[name]
        quantized |= {f"{name.removesuffix('weight')}{piece}": t.contiguous() for piece, t in layout.tensors.items()}
        dense[name] = layout.weight
    assert layout is not None
    if change is not None:
        change(quantized)
    (plain / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in dense.items()}, plain / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
    save_file(quantized, folder / "model.safetensors")
    return plain


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_format_in_a_model(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    plain = quantize(folder, LAYOUTS[name])
    expected = run(load(plain), IDS)
    assert distance(run(load(folder), IDS), expected) < 1e-4
    assert distance(run(load(folder, ops="native"), IDS), expected) < 0.02


@pytest.mark.parametrize("name", ["awq-32", "gptq-act-order", "squeezellm-3-sparse", "fp8-block", "w4a16", "gptq-8", "nf4"])
def test_packed_kinds_compute_the_same(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES, attention_bias=True, mlp_bias=True)
    plain = quantize(folder, LAYOUTS[name])
    limit = 0.1 if name == "fp8-block" else 1e-4  # inputs are rounded too
    assert distance(run(load(folder, ops="reference"), IDS), run(load(plain), IDS)) < limit


FAMILIES: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "fused in the file": ("phi3", {"sliding_window": None}, "w4a16", ()),
    "fused in groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "gptq-32", ()),
    "stored transposed": ("gpt2", {"n_positions": 256}, "gptq-32", ("wte", "wpe")),
    "tied": ("llama", {"tie_word_embeddings": True}, "awq-32", ()),
    "experts, float8": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        "fp8-block",
        ("mlp.gate.",),
    ),
    "experts, 4 bits": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "gptq-32", (".gate.",)),
    "latent attention": (
        "deepseek_v3",
        {
            **LATENT,
            "moe_intermediate_size": 64,
            "num_attention_heads": 4,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
        "fp8-block",
        ("mlp.gate.", "kv_a_proj"),
    ),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_families(case: str, tmp_path: Path) -> None:
    family, overrides, name, leave = FAMILIES[case]
    folder = tmp_path / "m"
    save_tiny(folder, family, **(SIZES | overrides))
    if case == "stored transposed":
        plain = quantize_conv1d(folder)
    else:
        plain = quantize(folder, LAYOUTS[name], leave=leave)
    assert distance(run(load(folder), IDS), run(load(plain), IDS)) < 1e-4


def test_experts_stay_packed(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    family, overrides, name, leave = FAMILIES["experts, 4 bits"]
    save_tiny(folder, family, **(SIZES | overrides))
    plain = quantize(folder, LAYOUTS[name], leave=leave)
    packed, dense = load(folder, ops="reference"), load(plain, ops="reference")
    assert distance(run(packed, IDS), run(dense, IDS)) < 1e-4
    assert packed.weights_bytes < 0.4 * dense.weights_bytes


def test_experts_of_different_kinds_are_dequantised(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    family, overrides, name, leave = FAMILIES["experts, 4 bits"]
    save_tiny(folder, family, **(SIZES | overrides))
    plain = quantize(folder, LAYOUTS[name], leave=(*leave, "experts.2.w1", "experts.0.w2"))
    assert distance(run(load(folder, ops="reference"), IDS), run(load(plain), IDS)) < 1e-4


def quantize_conv1d(folder: Path) -> Path:
    """GPT-2's own files hold [inputs, outputs]; quantisers write [outputs, inputs] as for any layer."""
    plain = folder.with_name("plain")
    plain.mkdir()
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    quantized, dense = dict(tensors), dict(tensors)
    for seed, name in enumerate(sorted(tensors)):
        if tensors[name].ndim == 2 and ".h." in f".{name}":
            columns, rows = tensors[name].shape
            layout = gptq(rows, columns, 32, seed=seed)
            del quantized[name]
            quantized |= {f"{name.removesuffix('weight')}{piece}": t.contiguous() for piece, t in layout.tensors.items()}
            dense[name] = layout.weight.T.contiguous()
    (plain / "config.json").write_text(json.dumps(config))
    save_file(dense, plain / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
    save_file(quantized, folder / "model.safetensors")
    return plain


def mxfp4(folder: Path) -> Path:
    """gpt-oss's own layout: two codes a byte, the even one low, and the logarithm of a scale plus 127."""
    plain = folder.with_name("plain")
    plain.mkdir()
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    quantized, dense = dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        codes = torch.randint(0, 16, (experts, outputs, inputs))
        exponents = torch.randint(120, 125, (experts, outputs, inputs // 32))
        scales = torch.pow(2.0, exponents.float() - 127).repeat_interleave(32, -1)
        dense[name] = (table[codes] * scales).transpose(1, 2).contiguous()
        del quantized[name]
        quantized[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).view(experts, outputs, -1, 16).to(torch.uint8)
        quantized[f"{name}_scales"] = exponents.to(torch.uint8)
    (plain / "config.json").write_text(json.dumps(config))
    save_file(dense, plain / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    save_file(quantized, folder / "model.safetensors")
    return plain


def test_mxfp4_experts(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "gpt_oss", **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
    plain = mxfp4(folder)
    assert distance(run(load(folder), IDS), run(load(plain), IDS)) < 1e-6
    packed, dense = load(folder, ops="reference"), load(plain, ops="reference")
    assert distance(run(packed, IDS), run(dense, IDS)) < 1e-6
    assert packed.weights_bytes < 0.6 * dense.weights_bytes
    tensors = load_file(folder / "model.safetensors")
    missing = {n: t for n, t in tensors.items() if n != "model.layers.1.mlp.experts.down_proj_scales"}
    save_file(missing, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks is there without .*down_proj_scales"):
        load(folder)


@pytest.mark.parametrize("ops", ["reference", "cpu", "native"])
def test_modules_left_as_they_are(ops: str, tmp_path: Path) -> None:
    """Of q, k and v one, and a whole layer, as modules_to_not_convert and ignore lists have them."""
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    plain = quantize(folder, LAYOUTS["awq-32"], leave=("k_proj", "layers.1.", "up_proj"))
    model = load(folder, ops=ops)
    assert distance(run(model, IDS), run(load(plain), IDS)) < 5e-3
    if ops == "reference":
        weight = model._layers[0].attention.qkv.weight  # type: ignore[attr-defined]
        assert isinstance(weight, SegmentedWeight)
        assert [type(p).__name__ for p in weight.parts] == ["Int4Weight", "DenseWeight", "Int4Weight"]


def test_parts_with_other_groups_stay_apart(tmp_path: Path) -> None:
    """Activation order of q, k and v each by itself."""
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    plain = quantize(folder, lambda r, c, s: gptq(r, c, 32, act_order=True, seed=s))
    model = load(folder, ops="reference")
    assert isinstance(model._layers[0].attention.qkv.weight, SegmentedWeight)  # type: ignore[attr-defined]
    assert distance(run(model, IDS), run(load(plain), IDS)) < 1e-4


def test_low_bit_weights_take_little_memory(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES, num_hidden_layers=4)
    plain = quantize(folder, LAYOUTS["awq-32"])
    for ops in ("reference", "native"):
        embeddings = 2 * 128 * 64 * 4
        small, large = (load(f, ops=ops).weights_bytes - embeddings for f in (folder, plain))
        assert small < 0.2 * large


def test_biases_that_a_quantiser_added(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    zeros = {f"model.layers.{i}.mlp.down_proj.bias": torch.zeros(64).half() for i in range(2)}
    plain = quantize(folder, LAYOUTS["gptq-32"], change=lambda t: t.update(zeros))
    assert distance(run(load(folder), IDS), run(load(plain), IDS)) < 1e-4
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.bias"] += 1.0
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.bias has no place"):
        load(folder)


def test_pieces_in_different_files(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    quantize(folder, LAYOUTS["gptq-32"])
    expected = run(load(folder), IDS)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [{n: t for i, (n, t) in enumerate(sorted(tensors.items())) if i % 2 == half} for half in (0, 1)]
    for half, part in enumerate(halves):
        save_file(part, folder / f"model-{half}.safetensors")
    index = {"weight_map": {n: f"model-{half}.safetensors" for half, part in enumerate(halves) for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(run(load(folder), IDS), expected)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (LAYOUTS["awq-32"], lambda t: t.pop("model.layers.1.mlp.up_proj.scales"), r"model\.layers\.1\.mlp\.up_proj\.scales is missing"),
        (LAYOUTS["fp8-tensor"], lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale"), r"up_proj\.weight_scale is missing"),
        (
            LAYOUTS["gptq-32"],
            lambda t: t["model.layers.0.self_attn.o_proj.scales"].fill_(float("inf")),
            r"o_proj\.scales holds 128 values of 128 that are NaN or infinite",
        ),
        (
            LAYOUTS["awq-32"],
            lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(64, 8, dtype=torch.int32)}),
            r"up_proj\.scales.*must be of shape \[2, 64\]",
        ),
        (LAYOUTS["fp8-static"], lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale"), r"1\.mlp\.up_proj\.weight_scale is missing"),
        (LAYOUTS["fp8-block"], lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale_inv"), r"up_proj\.weight_scale_inv is missing"),
        (LAYOUTS["w8a8"], lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale"), r"up_proj\.weight_scale is missing"),
        (LAYOUTS["w4a16"], lambda t: t.pop("model.layers.0.mlp.up_proj.weight_shape"), r"up_proj\.weight_shape is missing"),
        (
            LAYOUTS["w4a16"],
            lambda t: [t.pop(f"model.layers.0.mlp.up_proj.{n}") for n in ("weight_packed", "weight_scale", "weight_shape")],
            r"lacks model\.layers\.0\.mlp\.up_proj\.weight",
        ),
    ],
)
def test_damage_is_named_at_load(make: Make, change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    quantize(folder, make, change=change)
    for ops in ("reference", "native"):
        with pytest.raises(CheckpointError, match=message):
            load(folder, ops=ops)


def test_float8_without_a_config_says_what_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    plain = quantize(folder, LAYOUTS["fp8-tensor"])
    with pytest.raises(CheckpointError, match="has dtype F8_E4M3; weights must be one of"):
        load(folder, hf_config=json.loads((plain / "config.json").read_text()))


@pytest.mark.parametrize(("name", "tools"), [("gptq-32", "GPTQ"), ("awq-32", "GPTQ or AWQ"), ("w4a16", "compressed-tensors")])
def test_low_bit_weights_of_which_the_config_says_nothing(name: str, tools: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    config = json.loads((quantize(folder, LAYOUTS[name]) / "config.json").read_text())
    with pytest.raises(
        CheckpointError, match=f"a piece of a low-bit weight, as {tools} stores it, but config.json has no quantization_config"
    ):
        load(folder, hf_config=config | {"quantization_config": None})
    if name == "gptq-32":
        with pytest.raises(CheckpointError, match="as GPTQ stores it"):
            load(folder, hf_config=config | {"quantization_config": LAYOUTS["fp8-tensor"](32, 32, 0).config})


def test_plain_weights_that_the_config_calls_low_bit(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    config = config_for(folder)
    quantization = {"quantization_config": LAYOUTS["awq-32"](64, 64, 0).config}
    config = replace(config, model=replace(config.model, quantization="awq", hf_config={**config.model.hf_config, **quantization}))
    assert not has_low_bit(config)
    (told,) = quantized_for_nothing(config, {"bfloat16": 100}, stored=lambda: has_low_bit(config))
    assert "says that the weights are quantised with awq, but none of them is" in told and "dequantised" not in told
    mxfp4 = replace(
        config, model=replace(config.model, hf_config={**config.model.hf_config, "quantization_config": {"quant_method": "mxfp4"}})
    )
    assert not has_low_bit(mxfp4)
    quantize(folder, LAYOUTS["awq-32"])
    assert has_low_bit(config)


def with_quantization(path: Path, method: str, ops: str) -> Any:
    config = config_for(path)
    config = replace(config, model=replace(config.model, quantization=method))
    return load_model(config, load_ops(ops), torch.device("cpu"), lambda *_: None)


@pytest.mark.parametrize(("method", "kind"), [("fp8", Float8Weight), ("int8", Int8Weight)])
def test_rounded_while_loading(method: str, kind: type, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", **SIZES)
    expected = run(load(tmp_path), IDS)
    for ops in ("reference", "cpu", "native"):
        model = with_quantization(tmp_path, method, ops)
        assert 1e-4 < distance(run(model, IDS), expected) < 0.2
        if ops == "reference":
            assert isinstance(model._layers[0].attention.qkv.weight, kind)
            assert model.weights_bytes < 0.5 * load(tmp_path, ops=ops).weights_bytes


@pytest.mark.parametrize("ops", ["reference", "native"])
def test_a_damaged_weight_that_is_rounded_is_called_what_the_checkpoint_calls_it(ops: str, tmp_path: Path) -> None:
    """Also where it is a part of a fused layer."""
    save_tiny(tmp_path, "llama", **SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"The weight model\.layers\.1\.self_attn\.k_proj\.weight holds NaN or infinity: it is damaged"
    ):
        with_quantization(tmp_path, "int8", ops)


def test_the_file_of_a_damaged_piece_is_named(tmp_path: Path) -> None:
    """Pieces of one weight may be in several files."""
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    quantize(folder, LAYOUTS["awq-32"])
    tensors = load_file(folder / "model.safetensors")
    damaged = "model.layers.0.self_attn.q_proj.scales"
    tensors[damaged][0, 0] = torch.inf
    (folder / "model.safetensors").unlink()
    first = {name: tensor for name, tensor in tensors.items() if name.endswith("scales")}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in first}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=rf"model-00001-of-00002\.safetensors: tensor {damaged} holds 1 values"):
        load(folder)


def test_what_cannot_be_combined(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_tiny(folder, "llama", **SIZES)
    plain = quantize(folder, LAYOUTS["awq-32"])
    config = config_for(plain)
    through = replace(config, model=replace(config.model, quantization="fp8", implementation="transformers"))
    with pytest.raises(
        ConfigError, match=r"--quantization fp8: .* where no weights are rounded\. Leave it out, or leave --model-impl at auto\."
    ):
        load_model(through, load_ops("cpu"), torch.device("cpu"), lambda *_: None)
    stored = {**config.model.hf_config, "quantization_config": LAYOUTS["awq-32"](64, 64, 0).config}
    with pytest.raises(
        UnsupportedModel, match=r"runs through transformers, and quantised .* Leave --model-impl at auto, or take an unquantised"
    ):
        load_model(replace(through, model=replace(through.model, hf_config=stored)), load_ops("cpu"), torch.device("cpu"), lambda *_: None)
