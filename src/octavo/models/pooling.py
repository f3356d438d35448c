"""Models that pool: from the hidden states of whole prompts to one vector each (or one a token), and how they are loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from octavo.attention.prompt import PromptAttention
from octavo.checkpoint import text_part
from octavo.checkpoint.gguf_file import GgufFile, GgufTensor
from octavo.config.types import DenseLayer, EngineConfig, PoolingConfig, PoolingKind
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.layers.linear import Linear
from octavo.layers.mlp import activate
from octavo.models.assembly import Assembly
from octavo.models.decoder import Decoder
from octavo.models.encoder import Encoder
from octavo.models.encoder_families import ENCODERS, EncoderFamily, encoder_spec
from octavo.models.encoder_spec import encoder_parameters
from octavo.models.families.base import Target
from octavo.models.gguf_model import open_header
from octavo.models.gguf_names import gguf_encoder_targets
from octavo.models.loader import Progress, described_by, fill, read_spec, stored_tensors, too_large, weight_format
from octavo.models.registry import generating_architecture, supported_architectures
from octavo.models.spec import Parameter, parameters
from octavo.ops.registry import Ops
from octavo.protocol.pooling import Pooled, PoolRow
from octavo.weights.gguf import open_gguf
from octavo.weights.pickled import open_pickled
from octavo.weights.safetensors import open_safetensors
from octavo.weights.stored import StoredTensor

_ANSWERS = "cls.output.weight"
_UNUSED = r"^cls\.output\.|^score\.|(^|\.)rotary_emb\."
"""What a decoder that pools can leave out."""


class PoolingModel:
    """An encoder or a decoder, and what becomes of its hidden states. Holds weights and no state.

    Args:
        dense: weight, bias and activation of the layers behind the pooling.
        classifier: of a decoder with a classification head; an encoder brings its own.
    """

    def __init__(
        self,
        model: Encoder | Decoder,
        pooling: PoolingConfig,
        *,
        causal: bool,
        dense: Sequence[tuple[torch.Tensor, torch.Tensor | None, str]] = (),
        classifier: Linear | None = None,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pooling = pooling
        self._causal = causal
        self._dense = tuple(dense)
        self._classifier = classifier
        self._device = device
        self.vocab_size = model.spec.vocab_size
        self.weights_bytes = model.weights_bytes
        self.weights_kinds = model.weights_kinds
        hidden = model.spec.hidden_size
        pooled = hidden * len(pooling.kinds)
        self.embedding_size = 0 if pooling.labels else self._dense[-1][0].shape[0] if self._dense else pooled

    @torch.inference_mode()
    def pool(self, rows: Sequence[PoolRow]) -> list[Pooled]:
        """What each row asked for. The rows are computed together, padded to the longest."""
        lengths = [len(row.token_ids) for row in rows]
        hidden = self._hidden(rows, lengths)
        parts = torch.split(hidden, lengths)
        if self._pooling.labels:
            logits = self._classify(torch.stack([self._one(part) for part in parts])).float()
            return _to_host([self._activated(one, row) for one, row in zip(logits, rows, strict=True)])
        tokens = [row.params.task == "token_embed" for row in rows]
        vectors: list[torch.Tensor] = [part if whole else self._one(part) for part, whole in zip(parts, tokens, strict=True)]
        return _to_host([self._embedding(vector, row) for vector, row in zip(vectors, rows, strict=True)])

    def _hidden(self, rows: Sequence[PoolRow], lengths: list[int]) -> torch.Tensor:
        ids = torch.tensor([i for row in rows for i in row.token_ids], device=self._device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(self._device)
        if isinstance(self._model, Decoder):
            attend = PromptAttention(self._model.layer_specs, lengths, self._device, causal=self._causal)
            return self._model.forward(ids, positions, attend)
        bias = self._model.relative_bias(max(lengths))
        attend = PromptAttention(self._model.layer_specs, lengths, self._device, causal=False, bias=bias)
        types = None
        if any(row.second_from for row in rows):
            types = torch.cat([(torch.arange(n) >= (row.second_from or n)).long() for n, row in zip(lengths, rows, strict=True)])
            types = types.to(self._device)
        return self._model.forward(ids, positions, attend, types)

    def _one(self, part: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of one prompt -> [hidden]"""
        vectors = [_pooled(part, kind) for kind in self._pooling.kinds]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors)

    def _classify(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, labels]"""
        if isinstance(self._model, Encoder):
            return self._model.classify(x)
        assert self._classifier is not None
        return self._classifier(x)

    def _activated(self, logits: torch.Tensor, row: PoolRow) -> torch.Tensor:
        if row.params.use_activation is False or (row.params.use_activation is None and self._pooling.activation == "identity"):
            return logits
        many = self._pooling.activation == "softmax" or (self._pooling.activation == "identity" and len(logits) > 1)
        return logits.softmax(-1) if many else logits.sigmoid()

    def _embedding(self, vector: torch.Tensor, row: PoolRow) -> torch.Tensor:
        """[..., hidden] -> [..., dimensions], float32"""
        # Of several kinds of pooling, single tokens have no vector that fits the layers behind them.
        alone = vector.ndim == 2 and len(self._pooling.kinds) > 1
        for weight, bias, activation in () if alone else self._dense:
            vector = F.linear(vector, weight, bias)
            if activation == "tanh":
                vector = vector.tanh()
            elif activation != "identity":
                vector = activate(vector, activation)  # type: ignore[arg-type]
        vector = vector.float()
        if row.params.dimensions is not None:
            vector = vector[..., : row.params.dimensions]
        normalize = self._pooling.normalize if row.params.normalize is None else row.params.normalize
        return F.normalize(vector, dim=-1) if normalize else vector


def _pooled(part: torch.Tensor, kind: PoolingKind) -> torch.Tensor:
    """[tokens, hidden] of one prompt -> [hidden]"""
    match kind:
        case "cls":
            return part[0]
        case "last":
            return part[-1]
        case "max":
            return part.max(dim=0).values
        case "mean":
            return part.float().mean(dim=0).to(part.dtype)
        case "mean_sqrt":
            return (part.float().sum(dim=0) / math.sqrt(len(part))).to(part.dtype)
        case "weighted_mean":
            weights = torch.arange(1, len(part) + 1, device=part.device, dtype=torch.float32)
            return ((weights / weights.sum()) @ part.float()).to(part.dtype)


def _to_host(results: list[torch.Tensor]) -> list[Pooled]:
    """All results in one transfer."""
    numbers = torch.cat([result.float().flatten() for result in results]).cpu().numpy().astype("<f4", copy=False)
    ends = np.cumsum([result.numel() for result in results])
    parts = np.split(numbers, ends[:-1])
    return [Pooled(part.tobytes(), list(result.shape)) for part, result in zip(parts, results, strict=True)]


def load_pooling_model(config: EngineConfig, ops: Ops, device: torch.device, progress: Progress) -> PoolingModel:
    """Build the model that the config names, and fill it.

    Raises:
        UnsupportedModel, CheckpointError, ConfigError: see `loader.load_model`.
    """
    pooling = config.model.pooling
    assert pooling is not None
    ops = replace(ops, decoder=None)
    load = _load_encoder if config.model.architecture in ENCODERS else _load_decoder
    return load(config, pooling, ops, device, progress)


def _load_encoder(config: EngineConfig, pooling: PoolingConfig, ops: Ops, device: torch.device, progress: Progress) -> PoolingModel:
    model, dtype = config.model, _dtype(config)
    gguf = open_header(config)
    where = os.path.join(model.path, "config.json") if gguf is None else gguf.path
    spec, family = encoder_spec(model.hf_config, where, labels=len(pooling.labels))
    if gguf is not None:
        if "token_types.weight" not in gguf.tensors:
            spec = replace(spec, token_types=0)
        family = EncoderFamily((), gguf_encoder_targets(gated=spec.gated), r"^cls(\.|_)|^pooler")
    needed = _check_size(config, encoder_parameters(spec), dtype)
    form, on_the_fly = weight_format(config)
    assembly = Assembly(
        spec,
        family.weights,
        ops,
        dtype,
        device,
        strip=family.prefixes,
        ignored=family.ignored,
        on_the_fly=on_the_fly,
        described_by=described_by(gguf),
    )
    encoder = Encoder(spec, fill(assembly, config, gguf, needed, progress, form), ops, max_length=model.max_model_len)
    dense = _dense_layers(pooling.dense, spec.hidden_size * len(pooling.kinds), dtype, device)
    return PoolingModel(encoder, pooling, causal=False, dense=dense, device=device)


def _load_decoder(config: EngineConfig, pooling: PoolingConfig, ops: Ops, device: torch.device, progress: Progress) -> PoolingModel:
    hf_config, dtype = config.model.hf_config, _dtype(config)
    name = generating_architecture(config.model.architecture)
    if name is None:
        raise UnsupportedModel(
            f"{config.model.architecture} cannot pool here. Encoders that can: {', '.join(ENCODERS)}. And decoders (...Model, "
            f"...ForSequenceClassification) of {', '.join(supported_architectures())}."
        )
    spec, family, gguf = read_spec(config, {**hf_config, "architectures": [name]})
    causal = not hf_config.get("use_bidirectional_attention") and hf_config.get("is_causal") is not False
    windows = spec.sliding_windows
    if hf_config.get("use_bidirectional_attention"):
        windows = tuple(None if w is None else w // 2 + 1 for w in windows)  # the config counts both sides
    spec = replace(spec, has_head=False, labels=len(pooling.labels), sliding_windows=windows)
    needed = _check_size(config, parameters(spec), dtype)
    targets = {**family.weights, "score.weight": Target("classifier.weight")}
    form, on_the_fly = weight_format(config)
    inside = text_part.ORIGIN in hf_config
    strip, ignored = text_part.PREFIXES if inside else (), f"{_UNUSED}|{text_part.IGNORED}" if inside else _UNUSED
    assembly = Assembly(
        spec,
        targets,
        ops,
        dtype,
        device,
        prefix=family.prefix,
        strip=strip,
        ignored=ignored,
        on_the_fly=on_the_fly,
        described_by=described_by(gguf),
    )
    if pooling.answers and config.model.load_format != "dummy":
        assembly.add(_answer_rows(stored_tensors(config, gguf), assembly, pooling, "embed" if spec.tied_embeddings else "head"))
    if gguf is not None and spec.labels and (rows := gguf.tensors.get(_ANSWERS)) is not None:
        assembly.add(_better_answer(gguf, rows))
    weights = fill(assembly, config, gguf, needed, progress, form)
    decoder = Decoder(spec, weights, ops, max_length=config.model.max_model_len)
    classifier = Linear(weights.linears["classifier.weight"], None, ops) if spec.labels else None
    dense = _dense_layers(pooling.dense, spec.hidden_size * len(pooling.kinds), dtype, device)
    return PoolingModel(decoder, pooling, causal=causal, dense=dense, classifier=classifier, device=device)


def _answer_rows(tensors: Iterable[StoredTensor], assembly: Assembly, pooling: PoolingConfig, source: str) -> StoredTensor:
    """A head for classes, out of the language model's: see `PoolingConfig.answers`.

    Args:
        source: the parameter that the head for tokens is.

    Raises:
        CheckpointError: the checkpoint has no such tensor, or too few rows in it.
    """
    stored = next((one for one in tensors if assembly.parameter_of(one.name) == source), None)
    if stored is None or len(stored.shape) != 2 or max(pooling.answers) >= stored.shape[0]:
        raise CheckpointError("The checkpoint has no head with rows for the tokens of classifier_from_token.")
    rows = torch.empty(len(pooling.answers), stored.shape[1], dtype=torch.float32)
    for row, token in zip(rows, pooling.answers, strict=True):
        if stored.copy_region is not None:
            stored.copy_region((slice(token, token + 1), slice(0, stored.shape[1])), row[None])
        elif stored.raw is not None:
            row.copy_(stored.raw(torch.device("cpu"))[token])
        else:
            raise CheckpointError(f"{stored.file}: single rows of {stored.name} cannot be read. Take the model in safetensors.")
    head = rows if len(pooling.labels) == len(rows) else rows[1:] - rows[:1]

    def copy_into(destination: torch.Tensor) -> None:
        destination.copy_(head)

    return StoredTensor("score.weight", tuple(head.shape), head.nbytes, stored.file, copy_into)


def _better_answer(gguf: GgufFile, tensor: GgufTensor) -> StoredTensor:
    """A head of one class out of the rows of yes and no, in this order: see `checkpoint.gguf_architectures`."""
    (stored,) = open_gguf(replace(gguf, tensors={_ANSWERS: tensor}))
    rows = torch.empty(stored.shape, dtype=torch.float32)
    stored.copy_into(rows)
    head = rows[:1] - rows[1:]

    def copy_into(destination: torch.Tensor) -> None:
        destination.copy_(head)

    return StoredTensor("score.weight", tuple(head.shape), head.nbytes, stored.file, copy_into)


def _dtype(config: EngineConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype


def _check_size(config: EngineConfig, listed: Sequence[Parameter], dtype: torch.dtype) -> int:
    needed = sum(math.prod(p.shape) for p in listed) * dtype.itemsize
    room = config.device.free_bytes if config.device.kind == "cuda" else config.device.total_bytes
    if 0 < room < needed:
        raise ConfigError(too_large(config, needed))
    return needed


def _dense_layers(
    layers: Sequence[DenseLayer], width: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor | None, str]]:
    out: list[tuple[torch.Tensor, torch.Tensor | None, str]] = []
    for layer in layers:
        tensors = {}
        for stored in open_safetensors(layer.file) if layer.file.endswith(".safetensors") else open_pickled(layer.file):
            tensors[stored.name] = torch.empty(stored.shape, dtype=dtype, device=device)
            stored.copy_into(tensors[stored.name])
        weight = tensors.get("linear.weight")
        if weight is None or weight.ndim != 2 or weight.shape[1] != width:
            raise CheckpointError(f"{layer.file}: linear.weight must be a matrix with {width} columns.")
        out.append((weight, tensors.get("linear.bias"), layer.activation))
        width = weight.shape[0]
    return out
