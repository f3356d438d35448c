"""Loading as a whole: what does not fit together is refused by name, and the ways to store weights are equivalent."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from octavo.checkpoint.gguf_config import gguf_hf_config
from octavo.checkpoint.gguf_file import read_gguf
from octavo.config import address_space
from octavo.errors import CheckpointError, ConfigError, OctavoError, UnsupportedModel
from octavo.models.assembly import Assembly
from octavo.models.loader import _check_room, load_model, too_large
from octavo.models.registry import model_spec
from octavo.ops.registry import load_ops
from octavo.weights.parallel_read import ParallelReader
from octavo.weights.safetensors import open_safetensors
from tests.models.contiguous import load, run
from tests.support.tiny_models import config_for, save_tiny, tiny_model

IDS = list(range(5, 30))
Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(path := folder / "model.safetensors")
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    save_tiny(tmp_path, "qwen3")
    return tmp_path


def test_missing_tensors_are_named(tiny: Path) -> None:
    rewrite(tiny, lambda t: (t.pop("model.layers.1.self_attn.k_proj.weight"), t.pop("model.norm.weight")))  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight, model\.norm\.weight.*does config\.json belong"
    ):
        load(tiny)


def test_surplus_tensor_is_named(tiny: Path) -> None:
    rewrite(tiny, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor model\.layers\.0\.self_attn\.q_proj\.bias has no place"):
        load(tiny)


def test_layers_beyond_the_config_are_surplus(tiny: Path) -> None:
    rewrite(tiny, lambda t: t.update({"model.layers.2.mlp.down_proj.weight": torch.zeros(32, 48)}))
    with pytest.raises(CheckpointError, match=r"layers\.2.*\(2 layers\)"):
        load(tiny)


def test_wrong_shape_is_named(tiny: Path) -> None:
    rewrite(tiny, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(32, 48)}))
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight has the shape \[32, 48\], config.json asks for \[48, 32\]"):
        load(tiny)


def test_the_same_parameter_twice(tiny: Path) -> None:
    rewrite(tiny, lambda t: t.update({"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(96, 32)}))
    with pytest.raises(CheckpointError, match="filled already"):
        load(tiny)


def test_rotary_buffers_and_a_tied_head_are_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    expected = run(load(tmp_path), IDS)
    rewrite(
        tmp_path,
        lambda t: t.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": t["model.embed_tokens.weight"].clone()}
        ),
    )
    assert torch.equal(run(load(tmp_path), IDS), expected)


def test_a_head_that_is_not_the_embedding_though_the_config_says_so(tmp_path: Path) -> None:
    """Either may be meant: programs differ in what they take."""
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": torch.randn(128, 32)}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load(tmp_path)
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "pytorch_model.bin")
    load(tmp_path)


def test_two_of_one_matrix_are_compared_before_they_go_to_another_device(tmp_path: Path) -> None:
    """To a GPU they go through readers of their own; the first rows are read here all the same."""
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": torch.randn(128, 32)}))
    spec, family = model_spec(json.loads((tmp_path / "config.json").read_text()))
    assembly = Assembly(spec, family.weights, replace(load_ops("reference"), decoder=None), torch.float32, torch.device("meta"))
    with ParallelReader(torch.device("meta")) as reader, pytest.raises(CheckpointError, match="tie_word_embeddings"):
        for stored in open_safetensors(str(tmp_path / "model.safetensors"), reader):
            if "embed" in stored.name or "lm_head" in stored.name:
                assembly.add(stored)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("pickled", [False, True])
def test_what_wrappers_put_in_front_of_names_is_taken_off(tmp_path: Path, wrapper: str, pickled: bool) -> None:
    save_tiny(tmp_path, "llama")
    expected = run(load(tmp_path), IDS)
    rewrite(tmp_path, lambda t: [t.update({wrapper + name: t.pop(name)}) for name in list(t)])
    if pickled:
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    assert torch.equal(run(load(tmp_path), IDS), expected)


def test_fused_tensors_equal_split_ones(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", attention_bias=True)
    expected = run(load(tmp_path), IDS)

    def fuse(tensors: Tensors) -> None:
        for layer in ("model.layers.0.", "model.layers.1."):
            for kind in ("weight", "bias"):
                qkv = [tensors.pop(f"{layer}self_attn.{p}_proj.{kind}") for p in "qkv"]
                tensors[f"{layer}self_attn.qkv_proj.{kind}"] = torch.cat(qkv)
            gate_up = [tensors.pop(f"{layer}mlp.{p}_proj.weight") for p in ("gate", "up")]
            tensors[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(gate_up)

    rewrite(tmp_path, fuse)
    assert torch.equal(run(load(tmp_path), IDS), expected)


def test_truncated_shard_of_several(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: .*tensor model\."):
        load(tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "rms_norm_eps", "head_dim"])
def test_nan_in_the_config(tiny: Path, key: str) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {key: math.nan}
    with pytest.raises(CheckpointError, match=key):
        load(tiny, hf_config=config)


def test_weights_that_belong_to_another_config(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {"hidden_size": 64}
    with pytest.raises(CheckpointError, match=r"config\.json asks for"):
        load(tiny, hf_config=config)


def test_larger_than_memory_is_refused_before_loading(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights of tiny need \d.* in float32.*test CPU"):
        load(tiny, total_bytes=1000)


def test_what_would_fit_is_what_can_be_had(tiny: Path, tmp_path: Path) -> None:
    """Low-bit weights are no way out where the file has its own, or transformers runs the model."""
    plain = config_for(tiny)
    room = plain.device.free_bytes or plain.device.total_bytes
    assert "or low-bit weights (--quantization int8" in too_large(plain, 2 * room), "a quarter of float32"
    assert too_large(plain, 5 * room).endswith("billion parameters in float32: use a smaller model or a checkpoint with 4 bits a weight.")
    assert too_large(plain, 9 * room).endswith("use a smaller model.")
    through = replace(plain, model=replace(plain.model, implementation="transformers"))
    assert too_large(through, 2 * room).endswith("use a smaller model.")
    low_bit = {**plain.model.hf_config, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    for stored in (replace(plain.model, path=str(tmp_path / "m.gguf")), replace(plain.model, hf_config=low_bit)):
        said = too_large(replace(plain, model=stored), 2**40)
        assert (
            "need 1024.0 GiB as they are kept, but" in said
            and "It has room for weights of about" in said
            and said.endswith("use a smaller model or one with fewer bits a weight.")
        )


def test_weights_beyond_their_share_of_a_gpu_are_not_read(tiny: Path) -> None:
    config = config_for(tiny)
    config = replace(
        config,
        cache=replace(config.cache, memory_utilization=0.1, num_blocks_override=None),
        device=replace(config.device, kind="cuda", free_bytes=2**34, total_bytes=2**34),
    )
    with pytest.raises(ConfigError, match=r"need 2.0 GiB, and --gpu-memory-utilization 0.1 leaves 1.6 GiB of 16.0 GiB .* above 0.13"):
        _check_room(config, 2**31)
    _check_room(config, 2**30)
    _check_room(replace(config, cache=replace(config.cache, num_blocks_override=10)), 2**31)
    asked = replace(config, cache=replace(config.cache, memory_bytes=2**33))
    _check_room(asked, 2**33)
    with pytest.raises(
        ConfigError, match=rf"--kv-cache-memory-bytes {2**33} \(8\.0 GiB\) .* \(9\.0 GiB\) are more than .* Lower it, or leave it"
    ):
        _check_room(asked, 9 * 2**30)


@pytest.mark.parametrize(
    ("family", "device", "through", "words"),
    [
        ("llama", "cpu", False, None),
        ("llama", "cpu", True, "LlamaForCausalLM runs through transformers here, whose products depend on the batch"),
        ("llama", "cuda", True, "LlamaForCausalLM runs through transformers here"),
        ("gpt_oss", "cpu", False, "the compiled kernels do not run GptOssForCausalLM as a whole"),
        ("deepseek_v3", "cpu", False, "the compiled kernels do not run DeepseekV3ForCausalLM as a whole"),
        ("mixtral", "cuda", False, "the products of experts on a GPU .* MixtralForCausalLM has experts"),
        ("glm4_moe_lite", "cuda", False, "the products of experts on a GPU"),
    ],
)
def test_the_same_bits_are_promised_only_where_they_are_kept(
    tmp_path: Path, family: str, device: str, through: bool, words: str | None
) -> None:
    save_tiny(tmp_path, family)
    plain = config_for(tmp_path)
    model = replace(plain.model, implementation="transformers") if through else plain.model
    config = replace(plain, batch_invariant=True, model=model, device=replace(plain.device, kind=device))  # type: ignore[arg-type]
    if words is None:
        load_model(config, load_ops("cpu"), torch.device("cpu"), lambda *_: None)
        return
    with pytest.raises(ConfigError, match=rf"--batch-invariant: {words}.*Leave it out"):
        load_model(config, load_ops("cpu"), torch.device("cpu"), lambda *_: None)


def test_a_limit_of_addresses_is_named_where_the_memory_is_there(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "limit", lambda: 2**32)
    config = config_for(tiny)
    config = replace(config, device=replace(config.device, free_bytes=2**32, total_bytes=2**32))
    said = too_large(config, 2**30)
    assert "1.0 GiB beside the files they are read from" in said and "limited to 4.0 GiB (ulimit -v)" in said
    assert "use a smaller model" in too_large(config, 2**33)


def test_safetensors_alone_means_that(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    torch.save(tensors, tiny / "pytorch_model.bin")
    load(tiny)
    config = config_for(tiny, load_format="safetensors")
    for asked in (config, replace(config, model=replace(config.model, implementation="transformers"))):
        with pytest.raises(ConfigError, match=r"--load-format safetensors: .* has weights in PyTorch's format alone. Leave it out"):
            load_model(asked, load_ops("cpu"), torch.device("cpu"), lambda *_: None)


@pytest.mark.parametrize(
    "refusal",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("unable to mmap 8 bytes from file: Cannot allocate memory (12)"),
        RuntimeError("can't start new thread"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_that_is_refused_while_loading_is_said_as_such(tiny: Path, refusal: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise refusal

    monkeypatch.setattr(Assembly, "add", refused)
    with pytest.raises(ConfigError, match=r"weights of tiny need \d.* It has room for about .* use a smaller model"):
        load(tiny)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("shapes cannot be multiplied")])
def test_other_errors_while_loading_are_not_taken_for_it(tiny: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: object) -> None:
        raise error

    monkeypatch.setattr(Assembly, "add", failed)
    with pytest.raises(type(error), match=str(error.args[-1])):
        load(tiny)


def test_progress_goes_from_nothing_to_everything(tiny: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    load_model(config_for(tiny), load_ops("cpu"), torch.device("cpu"), lambda *call: calls.append(call))
    done = [d for _, d, _ in calls]
    total = (tiny / "model.safetensors").stat().st_size
    assert {(phase, t) for phase, _, t in calls} == {("weights", total)}
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, total)
    assert len(done) > 10


def test_weights_bytes_are_those_in_memory(tmp_path: Path) -> None:
    save_tiny(tmp_path / "untied", "llama")
    size = sum(p.nbytes for p in load_file(tmp_path / "untied" / "model.safetensors").values())
    assert load(tmp_path / "untied").weights_bytes == size
    save_tiny(tmp_path / "tied", "llama", tie_word_embeddings=True)
    size = sum(p.nbytes for p in load_file(tmp_path / "tied" / "model.safetensors").values())
    assert load(tmp_path / "tied", ops="reference").weights_bytes == size  # the plain embedding is the head
    head = 128 * 32 * 4 if load_ops("cpu").pack_linear(torch.zeros(4, 4)).layout == "onednn" else 0
    assert load(tmp_path / "tied").weights_bytes == size + head  # packed, the head is a copy


# Dummy weights


@pytest.mark.parametrize("ops", ["cpu", "native"])
def test_dummy_weights_depend_on_the_seed_only(tiny: Path, ops: str) -> None:
    first, again, other = (run(load(tiny, load_format="dummy", seed=s, ops=ops), IDS) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dummy_logits_are_finite_and_lively(tmp_path: Path, dtype: Any) -> None:
    config = tiny_model("qwen2", num_hidden_layers=8).config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    logits = run(load(tmp_path, hf_config=config, load_format="dummy", dtype=dtype), IDS)
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10
    assert len(set(logits.argmax(-1).tolist())) > 3


# GGUF files

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


GGUF_BOTH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, model: Any, arch: str, kind: GGMLQuantizationType = GGMLQuantizationType.F32, rope_freqs: Any = None) -> None:
    """What a converter makes of a model: renamed, q and k of Llama with the halves of each head interleaved."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if arch != "qwen2" else config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            writer.add_float32(f"{arch}.{key}", getattr(config, key))
    writer.add_vocab_size(config.vocab_size)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, dtype=np.float32))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy()
        stem, _, suffix = name.rpartition(".")
        if arch == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if arch.startswith("gemma") and value.ndim == 1:
            value = value + 1  # Gemma's norms are stored around zero, and around one in these files
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            names = GGUF_NAMES | (GGUF_BOTH_NORMS if arch in ("gemma2", "gemma3") else {})
            target = f"blk.{layer}.{names[rest]}.{suffix}"
        else:
            target = f"{GGUF_NAMES[stem]}.{suffix}"
        if value.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(target, value)
        else:
            writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_gguf(path: Path, **config: Any) -> Any:
    parsed = read_gguf(str(path))
    return load(path, hf_config=gguf_hf_config(parsed.metadata, parsed.tensors), **config)


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("gemma", {}),
        (
            "gemma2",
            {
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 8,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
            },
        ),
        (
            "gemma3",
            {
                "num_hidden_layers": 6,
                "sliding_window": 6,
                "query_pre_attn_scalar": 8,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
        ),
    ],
)
def test_gguf_equals_transformers(tmp_path: Path, arch: str, overrides: dict[str, Any]) -> None:
    model = tiny_model(arch, **overrides)
    write_gguf(tmp_path / "m.gguf", model, arch)
    torch.testing.assert_close(run(load_gguf(tmp_path / "m.gguf"), IDS), logits_of(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ops", ["cpu", "native"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_packed_gguf_is_close(tmp_path: Path, kind: str, ops: str) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    write_gguf(tmp_path / "m.gguf", model, "llama", GGMLQuantizationType[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                packed = gguf.quants.quantize(parameter.numpy(), GGMLQuantizationType[kind])
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, GGMLQuantizationType[kind])))
    torch.testing.assert_close(run(load_gguf(tmp_path / "m.gguf", ops=ops), IDS), logits_of(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_1", 5), ("Q8_0", 8.5), ("F16", 16)])
def test_gguf_stays_packed_for_native_kernels(tmp_path: Path, kind: str, bits: float) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    write_gguf(tmp_path / "m.gguf", model, "llama", GGMLQuantizationType[kind])
    loaded = load_gguf(tmp_path / "m.gguf", ops="native")
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert loaded.weights_bytes == matrices * bits / 8 + sum(p.nbytes for p in model.parameters() if p.ndim == 1)


def test_native_weights_are_as_wide_as_the_checkpoint(tmp_path: Path) -> None:
    tiny_model("llama", intermediate_size=64).to(torch.bfloat16).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors").values()
    matrices, vectors = ([p for p in stored if p.ndim == n] for n in (2, 1))
    assert load(tmp_path, ops="native").weights_bytes == sum(p.nbytes for p in matrices) + 2 * sum(p.nbytes for p in vectors)


def test_gguf_with_rotary_divisors(tmp_path: Path) -> None:
    """Converters store Llama 3.1 scaling as one divisor for each frequency."""
    rope = {"rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    model = tiny_model("llama", rope_parameters={"rope_type": "llama3", **rope})
    plain = 1.0 / 500.0 ** (torch.arange(0, 8, 2) / 8)
    write_gguf(tmp_path / "m.gguf", model, "llama", rope_freqs=plain / model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(run(load_gguf(tmp_path / "m.gguf"), IDS), logits_of(model), atol=1e-4, rtol=1e-4)
    write_gguf(tmp_path / "bad.gguf", model, "llama", rope_freqs=[1.0, math.nan, 1.0, 1.0])
    with pytest.raises(CheckpointError, match="rope_freqs"):
        load_gguf(tmp_path / "bad.gguf")


def test_folder_with_one_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama")
    parsed = read_gguf(str(tmp_path / "m.gguf"))
    config = gguf_hf_config(parsed.metadata, parsed.tensors)
    assert run(load(tmp_path, hf_config=config, load_format="gguf"), IDS).isfinite().all()
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files"):
        load(tmp_path, hf_config=config, load_format="gguf")
    with pytest.raises(ConfigError, match="needs a model folder"):
        load(tmp_path / "m.gguf", hf_config=config, load_format="safetensors")


def test_gguf_of_another_architecture_than_its_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), "qwen3")
    config = tiny_model("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor.*and the file's metadata do not belong together") as caught:
        load(tmp_path / "m.gguf", hf_config=config)
    assert "config" not in str(caught.value).partition("with this config")[2]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_gguf_gets_past_an_octavo_error(tmp_path: Path, data: st.DataObject) -> None:
    whole = tmp_path / "m.gguf"
    if not whole.exists():
        write_gguf(whole, tiny_model("llama", num_hidden_layers=1), "llama")
    parsed = read_gguf(str(whole))
    content = bytearray(whole.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, parsed.data_offset - 1))] ^= data.draw(st.integers(1, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        model = load_gguf(damaged, max_model_len=64)
        run(model, IDS[:3])
    except OctavoError as e:
        assert str(e)


@pytest.mark.parametrize("name", ["self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{}_proj.{}_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_scales_of_a_float8_cache_are_found(tiny: Path, name: str, shape: tuple[int, ...]) -> None:
    rewrite(
        tiny,
        lambda t: t.update({f"model.layers.1.{name.format(kind, kind)}": torch.full(shape, 0.25 if kind == "k" else 0.5) for kind in "kv"}),
    )
    scales = load(tiny).kv_scales
    assert list(scales) == [1]
    assert scales[1].k.tolist() == [0.25] * max(1, *shape, 0)
    assert scales[1].v.tolist() == [0.5] * max(1, *shape, 0)
    assert scales[1].k.dtype == torch.float32


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor(math.nan), torch.ones(3)])
def test_impossible_scale_is_named(tiny: Path, scale: torch.Tensor) -> None:
    rewrite(tiny, lambda t: t.update({"model.layers.0.self_attn.k_scale": scale}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.k_scale.*positive scale"):
        load(tiny)


@pytest.mark.parametrize("ops", ["cpu", "native"])
def test_weights_in_pytorchs_own_format(tmp_path: Path, ops: str) -> None:
    reference = save_tiny(tmp_path, "llama")
    expected = run(load(tmp_path, ops=ops), IDS)
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    torch.testing.assert_close(run(load(tmp_path, ops=ops), IDS), expected)


@pytest.mark.parametrize(
    ("family", "more", "says"),
    [
        ("deepseek_v3", {"n_group": 3}, "n_group"),
        ("deepseek_v3", {"n_group": 2, "topk_group": 3}, "topk_group"),
        ("olmoe", {"clip_qkv": -8.0}, "clip_qkv"),
        ("llama", {"num_hidden_layers": 1_000_000_000}, "num_hidden_layers"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(family: str, more: dict[str, Any], says: str) -> None:
    base = {"num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
    }
    names = {"deepseek_v3": "DeepseekV3ForCausalLM", "olmoe": "OlmoeForCausalLM", "llama": "LlamaForCausalLM"}
    config = base | latent | experts | {"architectures": [names[family]], "model_type": family} | more
    with pytest.raises((CheckpointError, UnsupportedModel), match=says):
        model_spec(config)
