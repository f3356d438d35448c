"""Any causal language model that `transformers` can build, with the paged attention of this engine in place of its own.

The model's code is that of the installed `transformers`; no code from a checkpoint is ever run. Its attention is swapped through
the interface that transformers has for that: our function gets q, k and v of a layer, and hands them to the step's `Attend`, which
travels along as an argument. What each layer's attention needs (heads, scale, window, caps) is what a trial run shows.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from octavo.attention.base import Attend, KvScales, LayerSpec
from octavo.checkpoint import text_part
from octavo.checkpoint.stand_in import stand_in
from octavo.config.types import EngineConfig
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel, plain_text
from octavo.layers.rope import RopeSpec
from octavo.models.encoder_families import ENCODERS
from octavo.models.query_temperature import QueryTemperature
from octavo.models.registry import supported_architectures
from octavo.models.spec import MlpSpec, ModelSpec
from octavo.models.swapped_attention import NAME, Calls, Growing, Recorder, register
from octavo.ops.packed import added_up, stored_as
from octavo.weights.pickled import open_pickled, pickled_files

logger = logging.getLogger(__name__)

TRIAL = (9, 1, 1, 5)
"""Tokens of the steps that a trial sequence is computed in, to be compared with the whole."""
OWN_ATTENTION_ALONE: Final = frozenset(
    {"BloomForCausalLM", "MptForCausalLM", "MPTForCausalLM", "FalconForCausalLM", "StableLmForCausalLM", "StableLMEpochForCausalLM"}
) | {"ExaoneForCausalLM", "LLaMAForCausalLM"}
"""Architectures of ours that transformers cannot run for us: it does not know them, or does not let their attention be swapped. For where it
is not installed, and cannot be asked."""
_INSTEAD: Final = "Take another model, or run this one with transformers alone (transformers serve)."
_NEAR = {torch.float32: 0.01, torch.float16: 0.15, torch.bfloat16: 0.15}
"""How far from each other results may be that differ by rounding alone, relative to their size."""


def load_fallback(config: EngineConfig, device: torch.device, check_size: Callable[[int], None]) -> TransformersModel:
    """Build the model that the config names, with its weights.

    Args:
        check_size: called with the bytes that the weights will take, before any is allocated; raises if they do not fit.

    Raises:
        UnsupportedModel: transformers is not installed, does not know the architecture, or cannot swap its attention; or it is no causal
            language model.
        CheckpointError: the weights do not fit their config.
    """
    name = config.model.architecture
    model = _language_model(_build(config, check_size)).to(device).eval()
    try:
        swapped = TransformersModel(model, name, device, max_length=config.model.max_model_len)
        swapped.compare_with_own_attention()
        swapped.drop_other_parts()
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as e:
        raise UnsupportedModel(
            f"{name} cannot run through transformers: it does not run with its attention swapped ({type(e).__name__}: {first_line(e)}). "
            f"{_INSTEAD}"
        ) from e
    except UnsupportedModel as e:
        instead = "" if "--max-model-len" in str(e) else f" {_INSTEAD}"
        raise UnsupportedModel(f"{name} cannot run through transformers: {e}.{instead}") from None
    return swapped


def lets_its_attention_be_swapped(name: str) -> bool:
    """Whether an architecture may run through the installed transformers, as far as its class there tells."""
    try:
        import transformers
    except ImportError:
        return name not in OWN_ATTENTION_ALONE  # others may, once transformers is there
    return bool(getattr(getattr(transformers, name, None), "_supports_attention_backend", False))


def first_line(error: Exception) -> str:
    """Of what an error of another library says, in plain characters; the second too, where the first announces it."""
    first, _, rest = plain_text(str(error)).strip().partition("\n")
    return f"{first} {rest.strip().partition(chr(10))[0].strip()}" if first.endswith(":") and rest.strip() else first


def _build(config: EngineConfig, check_size: Callable[[int], None]) -> Any:
    """The model of transformers.

    Raises:
        UnsupportedModel, CheckpointError: see `load_fallback`.
    """
    hf_config = config.model.hf_config
    name = str(hf_config.get(text_part.ORIGIN, config.model.architecture))
    try:
        import transformers
    except ImportError:
        raise UnsupportedModel(
            f"{name} has no code in Octavo. Many such models run through transformers, which is not installed: pip install transformers."
            f"{_own_code(config)} Octavo's own: {', '.join(supported_architectures())}."
        ) from None
    if config.model.load_format == "gguf" or config.model.path.endswith(".gguf"):
        raise UnsupportedModel(f"{name} is not supported from GGUF files. Use the checkpoint in safetensors.")
    cls = getattr(transformers, name, None)
    if cls is None or not hasattr(cls, "from_pretrained"):
        near = difflib.get_close_matches(name, supported_architectures(), n=2)
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        if name.endswith("ForMaskedLM"):
            meant = f" Encoders that Octavo pools with: {', '.join(n for n in ENCODERS if n.endswith('ForMaskedLM'))}."
        raise UnsupportedModel(
            f"{name} is known neither to Octavo nor to the installed transformers {transformers.__version__}.{_own_code(config)}{meant} Octavo's own: "
            f"{', '.join(supported_architectures())}."
        )
    _check_kind(name, inside=text_part.ORIGIN in hf_config)
    if not getattr(cls, "_supports_attention_backend", False):
        why = "its implementation there does not let its attention be swapped"
        if getattr(cls, "_is_stateful", False):
            why = "it keeps a state from token to token (Mamba, linear attention, convolutions), for which Octavo has no cache"
        if name in supported_architectures():
            raise UnsupportedModel(
                f"{name} cannot run through transformers: {why}. Octavo has code of its own for it: leave --model-impl at auto."
            )
        raise UnsupportedModel(
            f"{name} has no code in Octavo, and cannot run through transformers either: {why}. {_INSTEAD} Octavo's own: "
            f"{', '.join(supported_architectures())}."
        )
    register()
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    try:
        made = cls.config_class.from_dict(_numbers(dict(hf_config.get(text_part.WHOLE, hf_config))))
        with torch.device("meta"):
            parameters = cls(made).parameters()
        check_size(sum(p.numel() for p in parameters) * dtype.itemsize)
        if config.model.load_format == "dummy":
            torch.manual_seed(config.model.seed)
            made._attn_implementation = NAME
            return cls(made).to(dtype)
        _check_pickles(config.model.path)
        with _quiet(transformers):
            model, report = cls.from_pretrained(
                config.model.path, config=made, dtype=dtype, attn_implementation=NAME, local_files_only=True, output_loading_info=True
            )
    except (ConfigError, CheckpointError):
        raise
    except Exception as e:  # whatever its readers of files, old and new, find wrong
        files = sorted(p for p in Path(config.model.path).glob("*") if p.suffix in (".safetensors", ".bin"))
        instead = next((what for file in files if (what := stand_in(file)) is not None), None)
        what = instead or f"{config.model.path}: transformers cannot load it: {first_line(e) or type(e).__name__}"
        raise CheckpointError(what) from None
    if missing := sorted(report["missing_keys"]):
        if wrapped := next((key for key in sorted(report["unexpected_keys"]) if key.startswith(("module.", "_orig_mod."))), None):
            raise CheckpointError(
                f"{config.model.path}: a wrapped model was saved: names begin with {wrapped.partition('.')[0]}. ({wrapped}). Save the model "
                "inside the wrapper."
            )
        raise CheckpointError(
            f"{config.model.path}: the checkpoint lacks {', '.join(missing[:4])}. Is the download complete, and does config.json belong to it?"
        )
    if surplus := sorted(report["unexpected_keys"]):
        names = f"{', '.join(surplus[:4])}{', ...' if len(surplus) > 4 else ''}"
        logger.warning("%s: %d tensors have no place in %s and are left out: %s.", config.model.path, len(surplus), name, names)
    return model


def _check_pickles(folder: str) -> None:
    """Whether files in PyTorch's format hold tensors alone, where there are no others to read.

    Raises:
        CheckpointError: they hold more, or are damaged.
    """
    if any(Path(folder).glob("*.safetensors")):
        return
    for file in pickled_files(folder):
        next(open_pickled(file), None)


def _numbers(value: Any) -> Any:
    """A config as transformers has it in memory: infinity, which JSON lacks, is written as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(str(value["__float__"]))
        return {key: _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def _own_code(config: EngineConfig) -> str:
    if "auto_map" not in config.model.hf_config:
        return ""
    return " It needs code from its repository, and Octavo never runs code from a checkpoint."


def _check_kind(name: str, *, inside: bool) -> None:
    """Refuse what is no causal language model.

    Args:
        inside: it is said to have one inside, beside what reads images or sounds.

    Raises:
        UnsupportedModel: it reads images or sounds, has an encoder in front of its decoder, or makes no text.
    """
    from transformers.models.auto import modeling_auto as auto

    if name in set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return
    seq2seq = set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())
    if inside and name in set(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()) - seq2seq:
        return
    kinds = (
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "has an encoder in front of its decoder"),
        (auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "reads sounds"),
        (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "reads images, and its config shows no language model of its own (text_config)"),
    )
    why = next((says for names, says in kinds if name in set(names.values())), "is none")
    raise UnsupportedModel(
        f"{name} has no code in Octavo, and only causal language models can run through transformers: it {why}. Octavo's own: "
        f"{', '.join(supported_architectures())}."
    )


@contextlib.contextmanager
def _quiet(transformers: Any) -> Any:
    """No progress bars of another library in our terminal."""
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()


class TransformersModel:
    """Implements `models.decoder.Model`. Holds weights and no state: the KV cache is behind `attend`."""

    capturable = False
    makes_logits = True
    stage = None
    kv_scales: Mapping[int, KvScales] = MappingProxyType({})

    def __init__(self, model: Any, architecture: str, device: torch.device, *, max_length: int) -> None:
        """
        Args:
            max_length: the longest sequence served.

        Raises:
            UnsupportedModel: a layer's attention is of a kind that ours is not.
        """
        self._model: Any = model
        self._device = device
        self._body = _body(model)
        text = model.config.get_text_config()
        fix_rotations(model, max_length, device)
        self._first_position = _first_position(model)
        self._temperature = QueryTemperature(model)
        vocab_size = model.get_output_embeddings().weight.shape[0]
        self._trial = torch.tensor(_trial_tokens(model.config, vocab_size), device=device)
        recorder = Recorder(max_length)
        hidden = self._hidden(self._trial, torch.arange(len(self._trial), device=device), recorder)
        self.layer_specs = tuple(recorder.layers)
        if len(self.layer_specs) < int(getattr(text, "num_hidden_layers", 1)):
            raise UnsupportedModel("not all of its layers are attention layers, and what the others keep has no place in the cache")
        self.spec = _spec(text, architecture, self.layer_specs, hidden.shape[-1], vocab_size)
        self._head = model.get_output_embeddings() if self._is_all_head(hidden) else None
        self.weights_kinds = _stored_in(model)
        self.weights_bytes = sum(self.weights_kinds.values())

    @torch.inference_mode()
    def _is_all_head(self, hidden: torch.Tensor) -> bool:
        """Whether logits are the head of hidden states. Some models scale or cap them behind it: then what passes for hidden states
        are the logits themselves."""
        positions = torch.arange(len(self._trial), device=self._device)
        logits = self._logits(self._trial, positions, Growing(self.layer_specs))
        return _apart(self._model.get_output_embeddings()(hidden), logits) < 1e-3

    @torch.inference_mode()
    def compare_with_own_attention(self) -> None:
        """Compute a sequence with the model's own attention, whole, and with ours, step by step.

        Raises:
            UnsupportedModel: the results differ: what the model keeps from token to token is not keys and values alone.
            CheckpointError: they are no numbers, because weights are not.
        """
        self._model.set_attn_implementation("eager")
        try:
            with self._temperature.left_to_the_model():
                expected: torch.Tensor = self._model(input_ids=self._trial[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(NAME)
        attend, rows, start = Growing(self.layer_specs), [], 0
        for size in TRIAL:
            positions = torch.arange(start, start + size, device=self._device)
            rows.append(self.logits(self.forward(self._trial[start : start + size], positions, attend)))
            start += size
        dtype = next(self._model.parameters()).dtype
        if not bool(torch.isfinite(expected).all()):
            named = next((name for name, p in self._model.named_parameters() if not bool(torch.isfinite(p).all())), None)
            why = "its own results are NaN or infinite" if named is None else f"tensor {named} holds NaN or infinity: it is damaged"
            raise CheckpointError(f"{self.spec.architecture}: {why}.")
        distance = _apart(torch.cat(rows)[TRIAL[0] :], expected[TRIAL[0] :], typical=dtype != torch.float32)
        if not distance < _NEAR.get(dtype, 0.15):
            raise UnsupportedModel(
                f"computed step by step with the attention swapped, its results are not its own (off by {distance:.0%}): it keeps more from "
                "token to token than keys and values, or does not compute in float32 what needs it"
            )

    def drop_other_parts(self) -> None:
        """Let go of what reads images or sounds, where the rest needs nothing but its body and its head."""
        if self._head is None:
            return
        self._model = None
        self.weights_kinds = _stored_in(self._body, self._head)
        self.weights_bytes = sum(self.weights_kinds.values())

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.forward`."""
        run = self._logits if self._head is None else self._hidden
        out = run(token_ids, positions, attend)
        return out if wanted is None else out.index_select(0, wanted)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.compact_logits(hidden).float()

    @torch.inference_mode()
    def compact_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.compact_logits`."""
        out: torch.Tensor = hidden if self._head is None else self._head(hidden)
        return out

    @torch.inference_mode()
    def _hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend | Recorder) -> torch.Tensor:
        """[tokens, hidden], after the final norm."""
        hidden: torch.Tensor = self._run(self._body, token_ids, positions, attend).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _logits(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[tokens, vocab]"""
        logits: torch.Tensor = self._run(self._model, token_ids, positions, attend).logits[0]
        return logits

    def _run(self, model: Any, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend | Recorder) -> Any:
        calls = attend if isinstance(attend, Recorder) else Calls(attend)
        places = positions[None] + self._first_position
        tempered = functools.partial(self._temperature.applied, positions=positions) if self._temperature else None
        out = model(input_ids=token_ids[None], position_ids=places, use_cache=False, octavo_attend=calls, octavo_tempered=tempered)
        if isinstance(calls, Calls) and calls.count != len(self.layer_specs):
            raise RuntimeError(f"{self.spec.architecture} attended {calls.count} times, not {len(self.layer_specs)} as in its trial run")
        return out


def _stored_in(*modules: Any) -> Mapping[str, int]:
    """Bytes of parameters by what they are stored as; shared ones once."""
    return added_up(stored_as(p) for p in {p.data_ptr(): p for module in modules for p in module.parameters()}.values())


def _language_model(model: Any) -> Any:
    """Of a model that has a whole causal language model inside (Llama 4, Mllama), that one."""
    inner = getattr(model, "language_model", None)
    return model if inner is None or getattr(inner, "lm_head", None) is None else inner


def _body(model: Any) -> Any:
    """The part of a model that gives hidden states."""
    found = model.get_decoder() if text_part.reads_more_than_text(model.config.to_dict()) else model.base_model
    return getattr(model, "model", model) if found is model else found


def _first_position(model: Any) -> int:
    """What a model counts its positions from: RoBERTa and its kind begin behind the number of the padding token."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(padding := getattr(module, "padding_idx", None), int):
            return padding + 1
    return 0


def fix_rotations(model: Any, max_length: int, device: torch.device) -> None:
    """Rotations that depend on the length of a sequence get that of the longest one served, and keep it: keys stay in the cache.

    Raises:
        UnsupportedModel: some still depend on what else is computed with them.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if not isinstance(kind, str) or kind == "default":
                continue
            more = {} if layer_type is None else {"layer_type": layer_type}
            if kind == "longrope" or "dynamic" in kind:
                module(torch.zeros(1, device=device), torch.tensor([[max_length - 1]], device=device), **more)
                if isinstance(kinds, dict):
                    kinds[layer_type] = "default"
                else:
                    module.rope_type = "default"
            if not _rotates_alone(module, max_length, device, more):
                module.forward = _beside(module.forward, max_length - 1)
            if not _rotates_alone(module, max_length, device, more):
                config = getattr(module, "config", model.config)
                trained = (getattr(config, "rope_parameters", None) or {}).get("original_max_position_embeddings")
                hint = f"; up to {trained} tokens they do not (--max-model-len {trained})" if isinstance(trained, int) else ""
                raise UnsupportedModel(f"its rotations depend on the longest sequence that is computed at the same time{hint}")


def _beside(rotate: Callable[..., Any], last: int) -> Callable[..., Any]:
    """Rotations as they are when the position `last` is computed at the same time."""

    def rotated(x: torch.Tensor, position_ids: torch.Tensor, **more: Any) -> Any:
        longer = torch.cat((position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), last)), -1)
        out = rotate(x, longer, **more)
        return tuple(part[..., :-1, :] for part in out) if isinstance(out, tuple) else out[..., :-1, :]

    return rotated


@torch.inference_mode()
def _rotates_alone(module: Any, max_length: int, device: torch.device, more: Mapping[str, Any]) -> bool:
    """Whether a position's rotation is the same beside the last position as it is alone."""

    def rotation(positions: list[int]) -> torch.Tensor:
        out = module(torch.zeros(1, device=device), torch.tensor([positions], device=device), **more)
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first[0, 0]

    try:
        return torch.equal(rotation([1]), rotation([1, max_length - 1]))
    except (RuntimeError, TypeError, IndexError):  # positions of another form: those of images, which for text are plain
        return True


def _trial_tokens(config: Any, vocab_size: int) -> list[int]:
    """Token ids that have no meaning of their own, as far as that can be told."""
    special: set[int] = set()
    for one in (config, config.get_text_config()):
        special |= {v for key, v in one.to_dict().items() if key.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    plain = [i for i in range(min(vocab_size, 4096)) if i not in special]
    return [plain[(5 + 37 * i) % len(plain)] for i in range(sum(TRIAL))]


def _apart(a: torch.Tensor, b: torch.Tensor, *, typical: bool = False) -> float:
    """How far rows are from each other relative to their size: the worst, or a typical one."""
    a, b = a.float(), b.float()
    distances = (a - b).norm(dim=-1) / (b - b.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-9)
    return float(distances.median() if typical else distances.max())


def _spec(config: Any, architecture: str, layers: Sequence[LayerSpec], hidden: int, vocab_size: int) -> ModelSpec:
    """As much of a spec as the worker reads: sizes."""
    first = layers[0]
    inner = next(
        (v for key in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") if (v := getattr(config, key, None))), 4 * hidden
    )
    if isinstance(inner, (list, tuple)) and inner and all(isinstance(one, int) for one in inner):
        inner = max(inner)  # one for each layer
    if not isinstance(inner, int):
        raise ConfigError(f"{architecture}: the width of its feed-forward blocks is {inner!r}, not one number.")
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        mlp=MlpSpec(inner),
        rope=RopeSpec(10000.0, first.head_dim // 2 * 2),
        norm_eps=1e-5,
        sliding_windows=tuple(layer.sliding_window for layer in layers),
    )
