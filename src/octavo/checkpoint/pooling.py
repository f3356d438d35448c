"""How a checkpoint pools: read from sentence-transformers' files beside the weights, else from the architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from octavo.checkpoint.files import is_there, read_json, read_json_object
from octavo.checkpoint.gguf_config import POOLING_TYPES
from octavo.checkpoint.types import Checkpoint
from octavo.config.types import DenseLayer, PoolingConfig, PoolingKind
from octavo.errors import CheckpointError, UnsupportedModel

_ENCODERS: Final = re.compile(
    r"(Bert|Roberta|XLMRoberta|Camembert|DistilBert|Electra|MPNet|ModernBert|NomicBert|New|Gte)"
    r"(Model|ForMaskedLM|ForSequenceClassification)"
)
_CLASSIFIER: Final = "ForSequenceClassification"
_MODES: Final[Mapping[str, PoolingKind]] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
"""sentence-transformers' names, in the order in which its older versions put several one behind the other."""
_FLAGS: Final = {f"pooling_mode_{'cls_token' if mode == 'cls' else mode}": mode for mode in _MODES} | {
    f"pooling_mode_{mode}_tokens": mode for mode in ("max", "mean", "weightedmean")
}
_ACTIVATIONS: Final[dict[str, Literal["tanh", "identity", "relu", "gelu", "silu"]]] = {
    "Tanh": "tanh",
    "Identity": "identity",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}


@dataclass(frozen=True)
class PoolingSettings:
    config: PoolingConfig
    max_length: int | None
    """The longest prompt, in tokens, where the files say so."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """What the model's texts begin with, by what they are for: whoever sends a text puts it there."""


def pooling_settings(checkpoint: Checkpoint, runner: str) -> PoolingSettings | None:
    """How the model pools; None when it is to generate.

    Args:
        runner: auto, generate or pooling; see `EngineArgs`.

    Raises:
        CheckpointError: a file beside the weights is damaged.
        UnsupportedModel: it asks for a module or a pooling that is not known, or an encoder is asked to generate.
    """
    config, architecture = checkpoint.hf_config, str(checkpoint.hf_config["architectures"][0])
    encoder = _ENCODERS.fullmatch(architecture) is not None
    if runner == "generate":
        if encoder:
            raise UnsupportedModel(f"A {architecture} cannot generate: it is an encoder. Leave --runner out, or use pooling.")
        return None
    modules = _modules(checkpoint.folder) if checkpoint.format != "gguf" else None
    stated = _gguf_pooling(checkpoint.gguf_metadata)
    bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    if runner == "auto" and not (encoder or modules or bare or stated or architecture.endswith(_CLASSIFIER)):
        return None
    if architecture.endswith(_CLASSIFIER):
        answers = config.get("classifier_from_token")
        classifier = _classifier(config, encoder) if answers is None else _answering(config, answers, checkpoint)
        return PoolingSettings(classifier, _positions(config, encoder))
    if modules is None:
        kind: Any = stated or ("mean" if encoder else "last")
        return PoolingSettings(PoolingConfig((kind,), normalize=True), _positions(config, encoder))
    return _sentence_transformer(checkpoint.folder, modules, _positions(config, encoder))


def _gguf_pooling(metadata: Mapping[str, Any]) -> str | None:
    """How a GGUF file says that its model pools."""
    value = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return POOLING_TYPES.get(value) if isinstance(value, int) else None


def _modules(folder: Path) -> list[Any] | None:
    """The entries of sentence-transformers' modules.json."""
    path = folder / "modules.json"
    if not is_there(path):
        return None
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules):
        raise CheckpointError(f"{path} must hold a list of modules, each with a type.")
    return modules


def _sentence_transformer(folder: Path, modules: list[Any], positions: int | None) -> PoolingSettings:
    kinds: tuple[PoolingKind, ...] = ("mean",)
    normalize, dense = False, []
    for module in modules:
        name = module["type"].rpartition(".")[2]
        where = _inside(folder, str(module.get("path", "")))
        if name == "Pooling":
            kinds = _pooling_kinds(where / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name == "Dense":
            dense.append(_dense(where))
        elif name not in ("Transformer", "Dropout"):
            raise UnsupportedModel(f"{folder / 'modules.json'}: the module {name} is not supported. Supported: Pooling, Dense, Normalize.")
    sizes = read_json_object(folder / "sentence_bert_config.json") if is_there(folder / "sentence_bert_config.json") else {}
    length = sizes.get("max_seq_length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise CheckpointError(f"{folder / 'sentence_bert_config.json'}: max_seq_length must be a whole number from 1, got {length!r}.")
    lengths = [n for n in (length, positions) if n is not None]
    return PoolingSettings(PoolingConfig(kinds, normalize, tuple(dense)), min(lengths, default=None), _prompts(folder))


def _prompts(folder: Path) -> dict[str, str]:
    """Those that sentence-transformers would put in front of a text when asked to."""
    path = folder / "config_sentence_transformers.json"
    stated = read_json_object(path).get("prompts") if is_there(path) else None
    given = stated.items() if isinstance(stated, Mapping) else ()
    return {str(name): text for name, text in given if isinstance(text, str) and text}


def _inside(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{folder / 'modules.json'} names {name!r}; only folders inside the model's are allowed.")
    return path


def _pooling_kinds(path: Path) -> tuple[PoolingKind, ...]:
    config = read_json_object(path)
    if (mode := config.get("pooling_mode")) is not None:
        chosen = [mode] if isinstance(mode, str) else mode
        if not isinstance(chosen, list) or not chosen or not all(isinstance(one, str) and one in _MODES for one in chosen):
            raise UnsupportedModel(f"{path}: pooling_mode {mode!r} is not supported. Supported: {', '.join(_MODES)}, and lists of them.")
        return tuple(_MODES[one] for one in chosen)
    flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if not set(flags) <= set(_FLAGS):
        raise UnsupportedModel(f"{path} must choose of {', '.join(_FLAGS)}; it chooses {', '.join(flags)}.")
    if not flags and config.get("pooling_mode_mean_tokens") is False:
        raise UnsupportedModel(f"{path} chooses no pooling: all of its pooling_mode_... are false. Set one of {', '.join(_FLAGS)} to true.")
    named = {_FLAGS[key] for key in flags} or {"mean"}
    return tuple(kind for mode, kind in _MODES.items() if mode in named)


def _dense(folder: Path) -> DenseLayer:
    activation = str(read_json_object(folder / "config.json").get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = activation.rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"{folder / 'config.json'}: activation {name} is not supported. Supported: {', '.join(_ACTIVATIONS)}.")
    file = next((f for name in ("model.safetensors", "pytorch_model.bin") if is_there(f := folder / name)), None)
    if file is None:
        raise CheckpointError(f"{folder} has no model.safetensors or pytorch_model.bin for its Dense layer.")
    return DenseLayer(str(file), _ACTIVATIONS[name])


def _classifier(config: Mapping[str, Any], encoder: bool) -> PoolingConfig:
    labels = config.get("id2label")
    if isinstance(labels, Mapping) and labels:
        names = tuple(str(label) for _, label in sorted(labels.items(), key=lambda item: int(item[0]) if str(item[0]).isdigit() else 0))
    else:
        count = config.get("num_labels", 2)
        names = tuple(f"LABEL_{i}" for i in range(count if isinstance(count, int) and count > 0 else 2))
    own = config.get("sentence_transformers")
    given = own.get("activation_fn") if isinstance(own, Mapping) else config.get("sbert_ce_default_activation_function")
    kind: Literal["softmax", "sigmoid", "identity"]
    if isinstance(given, str) and given.endswith(("Identity", "Sigmoid")):
        kind = "identity" if given.endswith("Identity") else "sigmoid"
    elif config.get("problem_type") == "regression":
        kind = "identity"
    else:
        kind = "sigmoid" if len(names) == 1 or config.get("problem_type") == "multi_label_classification" else "softmax"
    pooled: Literal["cls", "last", "mean"] = "cls" if encoder else "last"
    if encoder and config.get("classifier_pooling") == "mean":
        pooled = "mean"
    return PoolingConfig((pooled,), normalize=False, labels=names, activation=kind)


def _answering(config: Mapping[str, Any], answers: Any, checkpoint: Checkpoint) -> PoolingConfig:
    """A language model that scores by how likely an answer is: the override `classifier_from_token` names the tokens, `method` says what
    becomes of them, and `is_original_qwen3_reranker` stands for the method of two.

    Raises:
        UnsupportedModel, CheckpointError: entries that do not say that, or tokens that the vocabulary does not have.
    """
    if not isinstance(answers, list) or not answers or not all(isinstance(token, str) for token in answers):
        raise CheckpointError(f'classifier_from_token must be a list of tokens (["no", "yes"]), got {answers!r}.')
    two_ways, each = "from_2_way_softmax", "no_post_processing"
    method = config.get("method") or (two_ways if config.get("is_original_qwen3_reranker") or len(answers) == 2 else each)
    if method not in (two_ways, each) or (method == two_ways and len(answers) != 2):
        raise UnsupportedModel(
            f"classifier_from_token {answers} with method {method!r} is not supported: {two_ways} takes two tokens (no and yes), {each} any."
        )
    if checkpoint.format == "gguf":
        raise UnsupportedModel("classifier_from_token is not supported for GGUF files. Take the safetensors.")
    path = checkpoint.folder / "tokenizer.json"
    vocabulary = _vocabulary(path)
    if missing := [token for token in answers if token not in vocabulary]:
        raise CheckpointError(f"classifier_from_token: {path} has no token {missing[0]!r}.")
    labels = ("LABEL_0",) if method == two_ways else tuple(answers)
    activation: Literal["sigmoid", "softmax"] = "sigmoid" if len(labels) == 1 else "softmax"
    ids = tuple(vocabulary[token] for token in answers)
    return PoolingConfig(("last",), normalize=False, labels=labels, activation=activation, answers=ids)


def _vocabulary(path: Path) -> dict[str, int]:
    """Token -> id, of a tokenizer.json."""
    written = read_json_object(path)
    model = written.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    known = {str(token): i for token, i in vocab.items() if isinstance(i, int)} if isinstance(vocab, Mapping) else {}
    added = written.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, Mapping) and isinstance(token.get("content"), str) and isinstance(token.get("id"), int):
            known[token["content"]] = token["id"]
    return known


def _positions(config: Mapping[str, Any], encoder: bool) -> int | None:
    """What an encoder's table of positions holds; RoBERTa's and MPNet's begin behind the padding token's. Of one that rotates, how long
    the texts are that it can read."""
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if not encoder or isinstance(positions, bool) or not isinstance(positions, int):
        return None
    architecture = str(config["architectures"][0])
    if config.get("rotary_scaling_factor") is not None and isinstance(trained := config.get("max_trained_positions", 2048), int):
        # Nomic's rotation changes with the text's length beyond those it was trained with.
        return min(positions, trained)
    padding = config.get("pad_token_id") if "MPNet" not in architecture else 1
    shifted = any(name in architecture for name in ("Roberta", "Camembert", "MPNet"))
    return positions - (int(padding if isinstance(padding, int) else 1) + 1) if shifted else positions
