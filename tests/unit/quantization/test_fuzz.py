"""Whatever a checkpoint's config and tensors hold: it is read, or refused in our words."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import OctavoError
from octavo.ops.coded import dequantize
from octavo.ops.reference.low_bit import pack_coded
from octavo.quantization.pieces import Pieces
from octavo.quantization.select import stored_format
from octavo.weights.block_rows import block_rows
from tests.support.quantized_layouts import LAYOUTS, Layout

MADE: dict[str, Layout] = {name: make(32, 64, 1) for name, make in LAYOUTS.items()}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 200),
    st.just(2**70),
    st.floats(allow_nan=True),
    st.sampled_from(["", "int", "group", "channel", "tensor", "gemm", "gptq_v2", "re:(", "nvfp4-pack-quantized"]),
    st.lists(st.integers(-1, 64), max_size=3),
    st.dictionaries(st.sampled_from(["weights", "bits", "+:(", "-:x"]), st.integers(-1, 9), max_size=2),
)
DTYPES = (torch.float32, torch.float16, torch.int32, torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn)


def places(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(config, dict):
        for key, value in config.items():
            found += places(value, (*path, key))
    return found


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    layout = MADE[draw(st.sampled_from(sorted(MADE)))]
    config, tensors = copy.deepcopy(layout.config), dict(layout.tensors)
    for _ in range(draw(st.integers(0, 2))):
        *path, last = draw(st.sampled_from(places(config)))
        inner = config
        for key in path:
            inner = inner[key]
        if isinstance(inner, dict) and last in inner:
            inner[last] = draw(VALUES)
            if not isinstance(inner[last], dict):
                break
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(tensors)))
        tensor = tensors[name]
        match draw(st.integers(0, 3)):
            case 0 if len(tensors) > 1:
                del tensors[name]
            case 1:
                tensors[name] = tensor.float().to(draw(st.sampled_from(DTYPES)))
            case 2 if tensor.ndim:
                tensors[name] = tensor[: draw(st.integers(0, len(tensor)))]
            case _:
                tensors[name] = tensor.reshape(-1)
    return config, tensors


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spoilt())
def test_read_or_refused(case: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    config, tensors = case
    try:
        form = stored_format({"quantization_config": config}, "config.json")
        assert form is not None
        used = {name: t for name, t in tensors.items() if name in form.pieces}
        coded = form.read(Pieces("model.layers.0.mlp.up_proj", "a.safetensors", used))
    except OctavoError as e:
        assert str(e)
        return
    assert dequantize(coded).shape == coded.shape
    pack_coded(coded, torch.float32)
    block_rows(coded)
