"""Made-up weights are stored as a checkpoint's would be, and are as large as a fresh initialisation's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.ops.coded import dequantize
from octavo.ops.packed import LinearWeight, TableWeight
from octavo.ops.reference.low_bit import pack_coded
from octavo.quantization.pieces import Pieces
from octavo.quantization.random_codes import Storage, everywhere, random_rows
from octavo.quantization.select import stored_format
from tests.support.quantized_layouts import LAYOUTS

ROWS, COLUMNS = 128, 256


def described(weight: LinearWeight) -> dict[str, Any]:
    """Everything about a packed weight but its numbers."""
    out: dict[str, Any] = {"kind": type(weight).__name__}
    for name, value in vars(weight).items():
        if isinstance(value, torch.Tensor):
            out[name] = (value.dtype, tuple(value.shape))
        elif name == "activations":
            out[name] = (value.kind, value.scale is not None)
        elif name not in ("nbytes", "outliers"):
            out[name] = value
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_stored_as_a_checkpoint_of_the_format_is(name: str) -> None:
    layout = LAYOUTS[name](ROWS, COLUMNS, 0)
    config = layout.config | ({"quant_method": "fbgemm_fp8"} if name == "fp8-channel" else {})
    form = stored_format({"quantization_config": config}, "config.json")
    assert form is not None
    read = form.read(Pieces("model.layers.0.mlp.up_proj", "file", layout.tensors))
    storage = form.storage("model.layers.0.mlp.up_proj", (ROWS, COLUMNS))
    assert storage is not None
    made_up = random_rows(storage, ROWS, COLUMNS, torch.Generator().manual_seed(1))
    found, wanted = described(pack_coded(made_up, torch.bfloat16)), described(pack_coded(read, torch.bfloat16))
    # Tools write scales, and a table, in float16 or in float32: that is the checkpoint's own affair.
    for either in (found, wanted):
        for piece in ("scales", "table"):
            if either.get(piece) is not None:
                either[piece] = either[piece][1]
    assert found == wanted
    weight = dequantize(made_up)
    assert bool(weight.isfinite().all())
    assert 0.5 * COLUMNS**-0.5 < float(weight.std()) < 2 * COLUMNS**-0.5
    if not isinstance(pack_coded(made_up, torch.bfloat16), TableWeight) and made_up.group_of is None:
        packed = pack_coded(made_up, torch.bfloat16)
        assert packed.nbytes == pytest.approx(ROWS * COLUMNS * storage.bits / 8, rel=0.1)


def test_what_a_list_leaves_out() -> None:
    storage = Storage("signed")
    of = everywhere(storage, ["lm_head", "mlp.gate", "re:.*layers\\.1\\..*", "model.layers.3"])
    assert of("model.layers.0.mlp.gate_proj", (64, 64)) is storage
    assert of("model.layers.0.mlp.gate", (64, 64)) is None
    assert of("lm_head", (64, 64)) is None
    assert of("model.layers.1.mlp.up_proj", (64, 64)) is None
    assert of("model.layers.3.mlp.up_proj", (64, 64)) is None
    assert of("model.layers.31.mlp.up_proj", (64, 64)) is storage
    assert of("model.layers.0.mlp.shared_expert_gate", (1, 64)) is None
    with pytest.raises(CheckpointError, match="is not a pattern"):
        everywhere(storage, ["re:("])


def test_the_seed_decides() -> None:
    a, b, c = (random_rows(Storage("unsigned", group=32), 32, 64, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a.codes, b.codes) and not torch.equal(a.codes, c.codes)
