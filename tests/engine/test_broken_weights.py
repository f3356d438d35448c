"""A model whose numbers are none: refused while it loads, or each request ends with an error that names the layer, and the engine goes on."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.config.home import packed_dir
from octavo.errors import CheckpointError
from octavo.ops.cpu import panel_file
from tests.models.test_gguf_packed import packed_and_plain
from tests.support.tiny_models import save_tiny

GGUF_PLACES = {"Q4_1": 0, "Q8_0": 0, "Q6_K": 208}
"""Where in a block its scale is."""
CASES = {
    "model.layers.0.self_attn.q_proj.weight": "in layer 0, before the attention of layer 0",
    "model.layers.1.mlp.up_proj.weight": "in layer 1 or 2, before the attention of layer 2",
    "model.layers.2.mlp.down_proj.weight": "in layer 2, behind its attention",
    "lm_head.weight": "in the head",
}


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_named(name: str, kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=3)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"device": "cpu", "cpu_kernels": kernels, "num_gpu_blocks_override": 32, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **settings) as llm:
        for _ in range(2):
            outputs = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)
            assert outputs[0].outputs[0].finish_reason == "error"
            error = outputs[0].outputs[0].error or ""
            assert CASES[name] in error
            assert f"The weights in {tmp_path} may be damaged" in error
            assert "logit_bias" not in error and "float32" not in error, "what the request did not ask for, and what is the case already"


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(("name", "number"), [("blk.1.ffn_norm.weight", "nan"), ("output_norm.weight", "-inf")])
def test_vectors_of_a_gguf_file(name: str, number: str, kernels: str, tmp_path: Path) -> None:
    """Norms and biases are looked at while the model loads."""
    packed, _ = packed_and_plain(tmp_path, lambda _: "Q4_1")
    (found,) = (t for t in gguf.GGUFReader(packed).tensors if t.name == name)
    data, place = bytearray(packed.read_bytes()), int(found.data_offset) + 4 * 7
    data[place : place + 4] = np.float32(number).tobytes()
    packed.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"packed\.gguf: tensor {re.escape(name)} holds NaN or infinity: it is damaged"):
        LLM(str(packed), device="cpu", cpu_kernels=kernels, num_gpu_blocks_override=32, skip_tokenizer_init=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_vectors_of_a_safetensors_file(dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"device": "cpu", "num_gpu_blocks_override": 32, "skip_tokenizer_init": True}
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.input_layernorm\.weight holds NaN or infinity"):
        LLM(str(tmp_path), dtype=dtype, **settings)
    tensors["model.layers.1.input_layernorm.weight"][3] = 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    if dtype == "float16":
        with pytest.raises(CheckpointError, match=r"infinite in float16: it is damaged, or needs another --dtype"):
            LLM(str(tmp_path), dtype=dtype, **settings)
    else:
        LLM(str(tmp_path), dtype=dtype, **settings).close()


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("kind", GGUF_PLACES)
def test_scales_of_a_gguf_file(kind: str, kernels: str, tmp_path: Path) -> None:
    packed, _ = packed_and_plain(tmp_path, lambda _: kind)
    (found,) = (t for t in gguf.GGUFReader(packed).tensors if t.name == "blk.1.ffn_up.weight")
    data, place = bytearray(packed.read_bytes()), int(found.data_offset) + GGUF_PLACES[kind]
    data[place : place + 2] = np.float16("nan").tobytes()
    packed.write_bytes(data)
    settings = {"device": "cpu", "cpu_kernels": kernels, "num_gpu_blocks_override": 32, "skip_tokenizer_init": True}
    # Looked at on the way into panels, or while they are unpacked.
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_up\.weight holds scales that are NaN or infinite"):
        LLM(str(packed), **settings)


def test_a_refused_model_leaves_no_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_file, "MIN_BYTES", 1)
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    sound, _ = packed_and_plain(tmp_path, lambda _: "Q8_0")
    settings = {"device": "cpu", "cpu_kernels": "native", "num_gpu_blocks_override": 32, "skip_tokenizer_init": True}
    with LLM(str(sound), **settings):
        pass
    (kept,) = packed_dir().iterdir()
    (found,) = (t for t in gguf.GGUFReader(sound).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(sound.read_bytes())
    data[int(found.data_offset) : int(found.data_offset) + 2] = np.float16("inf").tobytes()
    sound.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight holds scales that are NaN or infinite"):
        LLM(str(sound), **settings)
    assert list(packed_dir().iterdir()) == [], "nor those of the file that was there before"
    assert kept.suffix == panel_file.SUFFIX
