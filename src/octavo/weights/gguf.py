"""Weights of a GGUF file under their Hugging Face names, unpacked on the way into the parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch

from octavo.checkpoint.gguf_file import GgufFile, GgufTensor
from octavo.errors import CheckpointError
from octavo.ops.packed import EncodedRows
from octavo.weights.gguf_blocks import unpack
from octavo.weights.stored import StoredTensor

_CHUNK_VALUES: Final = 2**20
"""Values unpacked at a time: small enough that the temporaries stay in the cache."""

_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BOTH_NORMS: Final = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Of models with norms on both sides of a block."""
_ROPE_DIVISORS: Final = "rope_freqs.weight"


def open_gguf(gguf: GgufFile) -> Iterator[StoredTensor]:
    """The tensors of a parsed file, except the rotary divisors (see `rope_divisors`).

    A name without a Hugging Face counterpart is handed on as it is; the loader refuses it by that name.

    Raises:
        CheckpointError: the file cannot be mapped, or it is not what its header says.
    """
    try:
        data = np.memmap(gguf.path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{gguf.path}: cannot be read: {e}") from None
    arch = gguf.metadata.get("general.architecture")
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"} if arch == "llama" else {}
    for tensor in gguf.tensors.values():
        if tensor.name == _ROPE_DIVISORS:
            continue
        head_key = heads.get(tensor.name.split(".")[-2]) if tensor.name.startswith("blk.") else None
        num_heads = gguf.metadata.get(f"{arch}.attention.{head_key}", gguf.metadata.get(f"{arch}.attention.head_count"))
        order = _unpermuted(tensor, num_heads if head_key else None, gguf.path)
        copier, encoded = _copier(data, tensor, order, gguf.path), _encoded(data, tensor, order)
        yield StoredTensor(
            hf_name(tensor.name, both_norms=arch in ("gemma2", "gemma3")), tensor.shape, tensor.nbytes, gguf.path, copier, encoded=encoded
        )


def hf_name(name: str, *, both_norms: bool = False) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names come back unchanged."""
    stem, _, kind = name.rpartition(".")
    layer_names = _BOTH_NORMS if both_norms else _LAYER_NAMES
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) and match[2] in layer_names:
        return f"model.layers.{match[1]}.{layer_names[match[2]]}.{kind}"
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def rope_divisors(gguf: GgufFile) -> list[float] | None:
    """Divisors of the rotary frequencies: how converters store Llama 3.1 scaling. None: the file has none."""
    if (tensor := gguf.tensors.get(_ROPE_DIVISORS)) is None:
        return None
    out = torch.empty(tensor.shape, dtype=torch.float32)
    _copier(np.memmap(gguf.path, dtype=np.uint8, mode="r"), tensor, None, gguf.path)(out)
    return out.flatten().tolist()


def _unpermuted(tensor: GgufTensor, num_heads: Any, path: str) -> np.ndarray[tuple[int], np.dtype[np.intp]] | None:
    """Which stored row each row of q or k comes from.

    llama.cpp's Llama files interleave the two halves of each head, as its rotation of neighbouring pairs wants it; ours
    rotates halves. Rows of every block format are whole bytes, so the packed rows can be put in order.
    """
    if num_heads is None:
        return None
    rows = tensor.shape[0]
    if len(tensor.shape) == 1 and tensor.nbytes % rows:
        raise CheckpointError(f"{path}: tensor {tensor.name} is a {tensor.type} vector; biases must be floating point.")
    if not isinstance(num_heads, int) or num_heads < 1 or rows % (2 * num_heads):
        raise CheckpointError(f"{path}: tensor {tensor.name} has {rows} rows, which {num_heads!r} heads cannot share.")
    return np.arange(rows).reshape(num_heads, rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _encoded(
    data: np.ndarray[Any, np.dtype[np.uint8]], tensor: GgufTensor, order: np.ndarray[tuple[int], np.dtype[np.intp]] | None
) -> Callable[[], EncodedRows] | None:
    if len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape
    stored = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(rows, -1)
    return lambda: EncodedRows(tensor.type, (rows, columns), stored, order)


def _copier(
    data: np.ndarray[Any, np.dtype[np.uint8]],
    tensor: GgufTensor,
    order: np.ndarray[tuple[int], np.dtype[np.intp]] | None,
    path: str,
) -> Callable[[torch.Tensor], None]:
    def copy_into(destination: torch.Tensor) -> None:
        rows = tensor.shape[0] if len(tensor.shape) > 1 or order is not None else 1
        stored = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(rows, -1)
        target = destination.view(rows, -1)
        step = max(1, _CHUNK_VALUES // target.shape[1])
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = np.array(stored[start:stop] if order is None else stored[order[start:stop]])  # a copy: the map is read-only
            try:
                target[start:stop].copy_(unpack(chunk, tensor.type))
            except NotImplementedError:
                raise CheckpointError(f"{path}: tensor {tensor.name} has type {tensor.type}, which cannot be read.") from None

    return copy_into
