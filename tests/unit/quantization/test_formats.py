"""Every format, written byte for byte as it is published, is worth what its formula says; what is wrong with one is named."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.ops.coded import CodedRows, dequantize, joined
from octavo.ops.packed import DenseWeight, Float8Weight, Int4Weight, Int8Weight, TableWeight
from octavo.ops.reference.low_bit import pack_coded, unpack
from octavo.quantization.pieces import Pieces
from octavo.quantization.select import stored_format
from octavo.weights.block_rows import block_rows
from octavo.weights.gguf_blocks import unpack as unpack_blocks
from tests.support.quantized_layouts import (
    LAYOUTS,
    Layout,
    Tensors,
    as_int32,
    awq,
    bit_words,
    compressed,
    compressed_fp8,
    float4,
    fp8,
    gptq,
    int8,
    nf4,
    squeezellm,
)

MODULE = "model.layers.0.self_attn.q_proj"
KINDS = {
    "awq": Int4Weight,
    "gptq": Int4Weight,
    "gptq-8": Int8Weight,
    "gptq-16": DenseWeight,
    "squeezellm": TableWeight,
    "fp8": Float8Weight,
    "int8": Int8Weight,
    "w4a16": Int4Weight,
    "w8a": Int8Weight,
    "compressed-fp8": Float8Weight,
    "nvfp4": DenseWeight,
    "mxfp4": TableWeight,
    "nf4": TableWeight,
    "llm-int8": Int8Weight,
}


def read(layout: Layout, tensors: Tensors | None = None) -> CodedRows:
    form = stored_format({"quantization_config": layout.config}, "config.json")
    assert form is not None
    given = layout.tensors if tensors is None else tensors
    used = {name: t for name, t in given.items() if name not in form.ignored}
    assert used.keys() <= form.pieces
    return form.read(Pieces(MODULE, "a.safetensors", used))


@pytest.fixture(params=LAYOUTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (32, 192)])
def test_codes_are_worth_what_the_formula_says(name: str, rows: int, columns: int) -> None:
    layout = LAYOUTS[name](rows, columns, 3)
    coded = read(layout)
    assert coded.shape == (rows, columns)
    torch.testing.assert_close(dequantize(coded), layout.weight, rtol=1e-6, atol=1e-7)
    if layout.input_scale is not None:
        assert coded.activations.scale is not None
        assert float(coded.activations.scale) == pytest.approx(layout.input_scale)


def test_packing_loses_nothing(name: str) -> None:
    layout = LAYOUTS[name](64, 192, 4)
    packed = pack_coded(read(layout), torch.float32)
    kind = KINDS[max((k for k in KINDS if name.startswith(k)), key=len)]
    assert isinstance(packed, kind)
    assert (packed.out_features, packed.in_features) == (64, 192)
    torch.testing.assert_close(unpack(packed, torch.float32), layout.weight, rtol=1e-6, atol=1e-7)


def test_rows_can_be_cut_reordered_and_joined(name: str) -> None:
    layout = LAYOUTS[name](96, 128, 5)
    coded = read(layout)
    parts = [coded.narrow_rows(0, 32), coded.narrow_rows(32, 80), coded.narrow_rows(80, 96)]
    torch.testing.assert_close(torch.cat([dequantize(p) for p in parts]), layout.weight, rtol=1e-6, atol=1e-7)
    whole = joined(parts)
    assert whole is not None
    torch.testing.assert_close(dequantize(whole), layout.weight, rtol=1e-6, atol=1e-7)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(dequantize(coded.select_rows(order)), layout.weight[order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cuts", [(0, 64, 128), (0, 32, 96, 128), (0, 48, 128)])
def test_ranks_that_share_the_inputs_add_up(name: str, cuts: tuple[int, ...]) -> None:
    """A layer split by its inputs: groups fall to one rank or are cut, and with activation order they lie anywhere."""
    layout = LAYOUTS[name](32, 128, 6)
    coded, x = read(layout), torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(5, 32)
    for start, stop in itertools.pairwise(cuts):
        part = coded.narrow_columns(start, stop)
        torch.testing.assert_close(dequantize(part), layout.weight[:, start:stop], rtol=1e-6, atol=1e-7)
        packed = pack_coded(part, torch.float32)
        torch.testing.assert_close(unpack(packed, torch.float32), layout.weight[:, start:stop], rtol=1e-6, atol=1e-7)
        total += x[:, start:stop] @ unpack(packed, torch.float32).T
    torch.testing.assert_close(total, x @ layout.weight.T, rtol=1e-4, atol=1e-4)


def test_blocks_for_the_cpu_are_close_and_small(name: str) -> None:
    layout = LAYOUTS[name](32, 128, 7)
    rows = block_rows(read(layout))
    values = unpack_blocks(rows.data.copy(), rows.encoding).float()
    torch.testing.assert_close(values, layout.weight, rtol=2e-3, atol=2e-3 * float(layout.weight.abs().max()))
    bits = rows.data.nbytes * 8 / layout.weight.numel()
    assert bits <= 16.0
    if name in ("awq-32", "gptq-32", "gptq-v2", "gptq-sym", "w4a16", "w4a16-channel"):
        assert rows.encoding == "Q4_1"
    if name in ("int8", "gptq-8-sym", "w8a16", "w8a8", "llm-int8"):
        assert rows.encoding == "Q8_0"


def test_scales_outside_float16_take_wider_rows() -> None:
    layout = fp8(32, 64)
    tiny = replace(read(compressed(32, 64, bits=8)), scales=torch.full((32, 2), 1e-9))
    assert block_rows(tiny).encoding == "F16"
    huge = replace(read(layout), scales=torch.full((1, 1), 1e6))
    assert block_rows(huge).encoding == "F32"


def test_parts_that_cannot_be_one_matrix() -> None:
    first = read(gptq(32, 128, 32))
    assert joined([first, read(gptq(32, 128, 64))]) is None
    assert joined([first, read(gptq(32, 128, 32, act_order=True))]) is None
    assert joined([first, read(compressed(32, 128, bits=8))]) is None
    assert joined([first, read(squeezellm(32, 128))]) is None


def test_scales_of_parts_stay_their_own_and_the_input_has_the_largest() -> None:
    a, b = read(fp8(64, 64, static=True, seed=1)), read(fp8(32, 64, static=True, seed=2))
    b = replace(b, activations=replace(b.activations, scale=torch.tensor(0.5)))
    whole = joined([a, b])
    assert whole is not None
    assert whole.activations.scale is not None
    torch.testing.assert_close(dequantize(whole), torch.cat((dequantize(a), dequantize(b))))
    assert float(whole.activations.scale) == 0.5


def test_input_scales_under_the_name_that_transformers_gives_them() -> None:
    """As in Ministral 3's checkpoints."""
    layout = fp8(64, 64, static=True, seed=1)
    renamed = {("activation_scale" if name == "input_scale" else name): tensor for name, tensor in layout.tensors.items()}
    assert "activation_scale" in renamed
    found, expected = read(layout, renamed), read(layout)
    assert found.activations.scale is not None and expected.activations.scale is not None
    assert torch.equal(found.activations.scale, expected.activations.scale)
    with pytest.raises(CheckpointError, match=r"activation_scale .* must be greater than 0"):
        read(layout, renamed | {"activation_scale": torch.tensor(-1.0)})


def broken(layout: Layout, **changes: torch.Tensor | None) -> Tensors:
    tensors = dict(layout.tensors)
    for piece, tensor in changes.items():
        tensors.pop(piece, None)
        if tensor is not None:
            tensors[piece] = tensor
    return tensors


NAN = torch.tensor(float("nan"))
BAD: dict[str, tuple[Layout, dict[str, Any], str]] = {
    "missing scales": (awq(32, 64, 32), {"scales": None}, r"q_proj\.scales is missing"),
    "missing zeros": (gptq(32, 64, 32), {"qzeros": None}, r"q_proj\.qzeros is missing"),
    "missing float8 scales": (fp8(32, 64), {"weight_scale": None}, r"q_proj\.weight_scale is missing"),
    "missing input scale": (fp8(32, 64, static=True), {"input_scale": None}, r"q_proj\.input_scale is missing"),
    "missing scales of blocks": (fp8(32, 64, scale="block"), {"weight_scale_inv": None}, r"q_proj\.weight_scale_inv is missing"),
    "negative float8 scale": (fp8(32, 64), {"weight_scale": torch.tensor(-1.0)}, r"q_proj\.weight_scale .*nowhere negative"),
    "negative int8 scale": (int8(32, 64, 0), {"weight_scale": -torch.ones(32)}, r"q_proj\.weight_scale .*nowhere negative"),
    "nan in a scale": (awq(32, 64, 32), {"scales": torch.full((2, 32), NAN).half()}, r"q_proj\.scales holds 64 values.*NaN or infinite"),
    "inf in a scale": (fp8(32, 64), {"weight_scale": torch.tensor(float("inf"))}, r"q_proj\.weight_scale holds 1 value"),
    "nan in float8": (fp8(32, 64), {"weight": torch.full((32, 64), NAN).to(torch.float8_e4m3fn)}, r"q_proj\.weight holds 2048 values"),
    "group that does not fit": (awq(32, 64, 32), {"scales": torch.ones(3, 32).half()}, r"\[2, 32\] for 64 inputs in groups of 32"),
    "zeros of another shape": (gptq(32, 64, 32), {"qzeros": torch.zeros(2, 5, dtype=torch.int32)}, r"qzeros.*\[2, 4\]"),
    "codes of another dtype": (gptq(32, 64, 32), {"qweight": torch.zeros(8, 32)}, r"qweight has dtype float32.*int32"),
    "missing order": (gptq(32, 64, 32, act_order=True), {"g_idx": None}, r"q_proj\.g_idx is missing"),
    "missing outliers": (squeezellm(32, 64, outliers=4), {"vals": None}, r"q_proj\.vals is missing"),
    "missing whole rows": (squeezellm(32, 64, outliers=4, full=2), {"full_rows": None}, r"q_proj\.full_rows is missing"),
    "group index out of range": (gptq(32, 64, 32), {"g_idx": torch.full((64,), 2, dtype=torch.int32)}, r"g_idx.*from 0 to 1"),
    "blocks that do not fit": (fp8(64, 64, scale="block"), {"weight_scale_inv": torch.ones(1, 2)}, r"\[2, 2\] for blocks of 32 x 32"),
    "packed shape": (compressed(32, 64), {"weight_shape": torch.tensor([32, 96])}, r"weight_packed.*32 x 96"),
    "zero points of symmetric weights": (
        compressed(32, 64),
        {"weight_zero_point": compressed(32, 64, symmetric=False).tensors["weight_zero_point"]},
        r"weight_zero_point .* 0 everywhere or left out, for the config says symmetric: true of weights",
    ),
    "zero points of symmetric 8-bit weights": (
        compressed(32, 64, layout="int-quantized", bits=8),
        {"weight_zero_point": torch.ones(32, 2, dtype=torch.int8)},
        r"weight_zero_point .* symmetric: true of weights",
    ),
    "zero points of float8": (
        compressed_fp8(32, 64),
        {"weight_zero_point": torch.ones(32, 1)},
        r"weight_zero_point .* symmetric: true of weights",
    ),
    "zero points of symmetric inputs": (
        compressed(32, 64, layout="int-quantized", bits=8, inputs="static"),
        {"input_zero_point": torch.tensor([-3], dtype=torch.int8)},
        r"input_zero_point .* symmetric: true of input_activations",
    ),
    "second version said to be the first": (
        gptq(32, 64, 32, sym=True),
        {"qzeros": gptq(32, 64, 32, sym=True, version=2).tensors["qzeros"]},
        r"qzeros .*checkpoint_format gptq; left out.* zero points are those of gptq_v2",
    ),
    "first version said to be the second": (
        gptq(32, 64, -1, bits=8, sym=True, version=2),
        {"qzeros": gptq(32, 64, -1, bits=8, sym=True).tensors["qzeros"]},
        r"qzeros .*checkpoint_format gptq_v2; .* zero points are those of gptq\.",
    ),
    "outliers without values": (squeezellm(32, 64, outliers=4), {"vals": torch.zeros(0)}, r"q_proj\.vals has .*more than nothing"),
    "whole rows without rows": (
        squeezellm(32, 64, full=2),
        {"full_rows": torch.zeros(64, 0)},
        r"q_proj\.full_rows has .*more than nothing",
    ),
    "negative global scale": (
        float4(32, 64, kind="nvfp4"),
        {"weight_global_scale": torch.tensor(-1.0)},
        r"weight_global_scale .*nowhere negative",
    ),
    "negative nvfp4 scale": (
        float4(32, 64, kind="nvfp4"),
        {"weight_scale": torch.full((32, 4), -1.0).to(torch.float8_e4m3fn)},
        r"weight_scale .*nowhere negative",
    ),
    "negative run scales": (nf4(32, 64), {"weight.absmax": torch.full((32,), -0.1)}, r"weight\.absmax .*nowhere negative"),
    "state beyond numbers": (
        nf4(32, 64),
        {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b'{"shape": [32, 64], "blocksize": Infinity}'), dtype=torch.uint8)},
        r"quant_state.*JSON",
    ),
    "state without an end": (
        nf4(32, 64),
        {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"[" * 100_000), dtype=torch.uint8)},
        r"quant_state.*JSON",
    ),
    "nested offset": (
        nf4(32, 64, nested=True),
        {
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(b'{"shape": [32, 64], "blocksize": 64, "nested_blocksize": 16, "nested_offset": NaN}'), dtype=torch.uint8
            )
        },
        r"nested_absmax .*nested_offset that is a number, not nan",
    ),
    "table": (squeezellm(32, 64), {"lookup_table": torch.ones(32, 8)}, r"lookup_table.*\[32, 16\]"),
    "outlier column": (squeezellm(32, 64, outliers=4), {"cols": torch.full((4,), 64, dtype=torch.int32)}, r"cols.*from 0 to 63"),
    "outlier rows": (squeezellm(32, 64, outliers=4), {"rows": torch.full((33,), 4, dtype=torch.int32)}, r"rows.*ascending"),
    "state": (nf4(32, 64), {"weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}, r"quant_state.*JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case: str) -> None:
    layout, changes, message = BAD[case]
    with pytest.raises(CheckpointError, match=r"a\.safetensors: tensor model.*" + message):
        read(layout, broken(layout, **changes))


GROUP: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"quant_method": "quip"}, UnsupportedModel, "'quip', which Octavo does not read.*awq"),
        ({}, CheckpointError, "has no quant_method"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, UnsupportedModel, "gemv"),
        ({"quant_method": "awq", "bits": 3}, UnsupportedModel, "bits 3 is not supported. Supported: 4"),
        ({"quant_method": "awq"}, CheckpointError, "bits must be a whole number, got nothing"),
        ({"quant_method": "gptq", "bits": 5}, UnsupportedModel, "bits 5"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, CheckpointError, "group_size must be"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, UnsupportedModel, "'marlin' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, CheckpointError, "not a pattern"),
        ({"quant_method": "fp8", "activation_scheme": "tidal"}, UnsupportedModel, "tidal"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, CheckpointError, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, UnsupportedModel, "nvfp4"),
        ({"quant_method": "squeezellm", "wbits": 2}, UnsupportedModel, "wbits 2"),
        ({"quant_method": "compressed-tensors"}, CheckpointError, "config_groups"),
        (
            {"quant_method": "compressed-tensors", "ignore": ["re:["], "config_groups": {"g": GROUP}},
            CheckpointError,
            "'re:\\[' is not a pattern",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:[": {}}}, CheckpointError, "is not a pattern"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "zz"}, UnsupportedModel, "'zz' is not supported. Supported: nf4, fp4"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, UnsupportedModel, "sparsity"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"g": GROUP}}, UnsupportedModel, "marlin-24"),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}, "config_groups": {"g": GROUP}},
            UnsupportedModel,
            "rotations",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP | {"weights": GROUP["weights"] | {"actorder": "up"}}}},
            CheckpointError,
            "actorder must be true, false, group, dynamic, weight, static, got 'up'",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP | {"input_activations": {"dynamic": "false"}}}},
            CheckpointError,
            """dynamic must be true, false or "local", got 'false'""",
        ),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"m": 8}}, CheckpointError, "extra_config: m must be an object, got 8"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"m": {"bits": 5}}}, UnsupportedModel, "bits 5 is not supported"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {".*(": {"bits": 8}}}, CheckpointError, "is not a pattern"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllama"}, UnsupportedModel, "exllama"),
    ],
)
def test_configs_that_cannot_be_read(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stored_format({"quantization_config": config}, "m/config.json")


def test_modules_with_settings_of_their_own() -> None:
    usual, own = gptq(32, 128, 32), gptq(32, 128, 64, bits=8)
    config = {**usual.config, "dynamic": {"-:.*lm_head": {}, r"+:.*\.q_proj$": {"bits": 8, "group_size": 64}}}
    torch.testing.assert_close(dequantize(read(replace(own, config=config))), own.weight, rtol=1e-6, atol=1e-7)
    groups = {
        "all": compressed(32, 64).config["config_groups"]["group_0"],
        "one": {**compressed(32, 64, bits=8, strategy="channel").config["config_groups"]["group_0"], "targets": [r"re:.*q_proj$"]},
    }
    mixed = compressed(32, 64, bits=8, strategy="channel")
    coded = read(replace(mixed, config={**mixed.config, "config_groups": groups}))
    torch.testing.assert_close(dequantize(coded), mixed.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [MODULE, r"layers\.0\..*q_proj"])
def test_layers_with_settings_of_auto_rounds_own(name: str) -> None:
    """Its `extra_config`, by name or pattern: other bits, or none."""
    usual, own = gptq(32, 128, 32, sym=True), gptq(32, 128, 64, bits=8)
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq"}
    extra = {name: {"bits": 8, "group_size": 64, "sym": False, "data_type": "int"}, "model.layers.1.mlp.up_proj": {"bits": 16}}
    mixed = config | {"extra_config": extra}
    torch.testing.assert_close(dequantize(read(replace(own, config=mixed))), own.weight, rtol=1e-6, atol=1e-7)
    others = config | {"extra_config": {"model.layers.1.self_attn.q_proj": extra[name]}}
    torch.testing.assert_close(dequantize(read(replace(usual, config=others))), usual.weight, rtol=1e-6, atol=1e-7)
    form = stored_format({"quantization_config": mixed}, "config.json")
    assert form is not None
    made = [form.storage(module, (64, 128)) for module in (MODULE, "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj")]
    assert [None if storage is None else storage.levels for storage in made] == [256, None, 16]
    with pytest.raises(UnsupportedModel, match=r"extra_config has other settings for .*q_proj, which are read with GPTQ's packing alone"):
        stored_format({"quantization_config": mixed | {"packing_format": "auto_round:auto_awq"}}, "config.json")
    spared = config | {"packing_format": "auto_round:auto_awq", "extra_config": {"lm_head": {"bits": 16}, name: {"bits": 4, "sym": False}}}
    assert stored_format({"quantization_config": spared}, "config.json") is not None


def test_zero_points_that_say_nothing_are_read_over() -> None:
    """Older tools write those of symmetric weights too: zeros, or packed, the middle code."""
    packed = compressed(32, 64)
    plain = compressed(32, 64, layout="int-quantized", bits=8, inputs="static")
    middle = as_int32([bit_words([8] * 32, 4)] * 2).T.contiguous()
    for layout, more in (
        (packed, {"weight_zero_point": torch.zeros(32, 2, dtype=torch.int8)}),
        (packed, {"weight_zero_point": middle}),
        (plain, {"weight_zero_point": torch.zeros(32, 2, dtype=torch.int64), "input_zero_point": torch.zeros(1, dtype=torch.int8)}),
        (compressed_fp8(32, 64), {"weight_zero_point": torch.zeros(32, 1).to(torch.float8_e4m3fn)}),
    ):
        torch.testing.assert_close(dequantize(read(layout, layout.tensors | more)), layout.weight, rtol=1e-6, atol=1e-7)


def test_the_order_of_activations_has_two_names() -> None:
    layout = compressed(32, 64, act_order=True)
    group = layout.config["config_groups"]["group_0"]
    dynamic = replace(
        layout, config=layout.config | {"config_groups": {"g": group | {"weights": group["weights"] | {"actorder": "dynamic"}}}}
    )
    with pytest.raises(CheckpointError, match="weight_g_idx is missing"):
        read(dynamic, broken(dynamic, weight_g_idx=None))
    usual = compressed(32, 64)
    group = usual.config["config_groups"]["group_0"]
    static = replace(usual, config=usual.config | {"config_groups": {"g": group | {"weights": group["weights"] | {"actorder": "static"}}}})
    torch.testing.assert_close(dequantize(read(static)), usual.weight, rtol=1e-6, atol=1e-7)


def test_modules_that_no_group_is_for() -> None:
    """Groups that differ, none of which names the module; alike, any of them will do."""
    first, second = compressed(32, 64), compressed(32, 64, bits=8)
    groups = [layout.config["config_groups"]["group_0"] for layout in (first, second)]
    apart = {"a": groups[0] | {"targets": ["re:.*mlp"]}, "b": groups[1] | {"targets": ["re:.*o_proj"]}}
    with pytest.raises(CheckpointError, match=f"no target of its config_groups is for {MODULE}"):
        read(replace(first, config=first.config | {"config_groups": apart}))
    alike = {"a": groups[0] | {"targets": ["re:.*mlp"]}, "b": groups[0] | {"targets": ["re:.*o_proj"]}}
    torch.testing.assert_close(
        dequantize(read(replace(first, config=first.config | {"config_groups": alike}))), first.weight, rtol=1e-6, atol=1e-7
    )
    classes = {"a": groups[1] | {"targets": ["Embedding"]}, "b": groups[0] | {"targets": ["Linear"]}}
    torch.testing.assert_close(
        dequantize(read(replace(first, config=first.config | {"config_groups": classes}))), first.weight, rtol=1e-6, atol=1e-7
    )


def test_a_group_size_that_does_not_divide_is_said() -> None:
    layout = awq(32, 64, 32)
    with pytest.raises(CheckpointError, match="group_size 48 does not divide 64"):
        read(Layout(layout.config | {"group_size": 48}, layout.tensors | {"scales": torch.ones(2, 32).half()}, layout.weight))
    layout = gptq(32, 64, 32)
    with pytest.raises(CheckpointError, match=r"\[2, 32\] for 64 inputs in groups of 48, of which 48 does not divide 64: the last one"):
        read(Layout(layout.config | {"group_size": 48}, layout.tensors | {"scales": torch.ones(1, 32).half()}, layout.weight))
