"""Any causal language model that `transformers` can build, with the paged attention of this engine in place of its own.

The model's code is that of the installed `transformers`; no code from a checkpoint is ever run. Its attention is swapped through
the interface that transformers has for that: our function gets q, k and v of a layer, and hands them to the step's `Attend`, which
travels along as an argument. What each layer's attention needs (heads, scale, window, caps) is what a trial run shows.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from octavo.attention.base import Attend, KvScales, LayerSpec
from octavo.attention.prompt import PromptAttention
from octavo.config.types import EngineConfig
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.layers.rope import RopeSpec
from octavo.models.encoder_families import ENCODERS
from octavo.models.registry import supported_architectures
from octavo.models.spec import MlpSpec, ModelSpec
from octavo.ops.packed import added_up, stored_as

logger = logging.getLogger(__name__)

_NAME = "octavo"
"""Of our attention, among those that transformers knows."""
TRIAL = (1, 2, 3, 4, 5)
"""Token ids of the trial run."""


def load_fallback(config: EngineConfig, device: torch.device, check_size: Callable[[int], None]) -> TransformersModel:
    """Build the model that the config names, with its weights.

    Args:
        check_size: called with the bytes that the weights will take, before any is allocated; raises if they do not fit.

    Raises:
        UnsupportedModel: transformers is not installed, does not know the architecture, or cannot swap its attention; or it is no causal
            language model.
        CheckpointError: the weights do not fit their config.
    """
    model = _build(config, check_size).to(device).eval()
    try:
        return TransformersModel(model, config.model.architecture, device)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as e:
        raise UnsupportedModel(f"{config.model.architecture} does not run with swapped attention ({type(e).__name__}: {e}).") from e


def _build(config: EngineConfig, check_size: Callable[[int], None]) -> Any:
    """The model of transformers.

    Raises:
        UnsupportedModel, CheckpointError: see `load_fallback`.
    """
    name = config.model.architecture
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
    _check_kind(name)
    if not getattr(cls, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{name} has no code in Octavo, and cannot run through transformers either: its implementation there does not let its attention be "
            f"swapped. Octavo's own: {', '.join(supported_architectures())}."
        )
    _register(transformers)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    made = cls.config_class.from_dict(dict(config.model.hf_config))
    try:
        with torch.device("meta"):
            parameters = cls(made).parameters()
        check_size(sum(p.numel() for p in parameters) * dtype.itemsize)
        if config.model.load_format == "dummy":
            torch.manual_seed(config.model.seed)
            made._attn_implementation = _NAME
            return cls(made).to(dtype)
        with _quiet(transformers):
            model, report = cls.from_pretrained(
                config.model.path, config=made, dtype=dtype, attn_implementation=_NAME, local_files_only=True, output_loading_info=True
            )
    except ConfigError:
        raise
    except Exception as e:  # whatever its readers of files, old and new, find wrong
        raise CheckpointError(
            f"{config.model.path}: transformers cannot load it: {str(e).splitlines()[0] if str(e) else type(e).__name__}"
        ) from None
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{config.model.path}: the checkpoint lacks {', '.join(missing[:4])}. Is the download complete?")
    if surplus := sorted(report["unexpected_keys"]):
        names = f"{', '.join(surplus[:4])}{', ...' if len(surplus) > 4 else ''}"
        logger.warning("%s: %d tensors have no place in %s and are left out: %s.", config.model.path, len(surplus), name, names)
    return model


def _own_code(config: EngineConfig) -> str:
    if "auto_map" not in config.model.hf_config:
        return ""
    return " It needs code from its repository, and Octavo never runs code from a checkpoint."


def _check_kind(name: str) -> None:
    """Refuse what is no causal language model.

    Raises:
        UnsupportedModel: it reads images or sounds, has an encoder in front of its decoder, or makes no text.
    """
    from transformers.models.auto import modeling_auto as auto

    if name in set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return
    kinds = (
        (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "reads images"),
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "has an encoder in front of its decoder"),
        (auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "reads sounds"),
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


def _register(transformers: Any) -> None:
    """Make our attention known. Doing it again changes nothing: the functions hold no state."""
    from transformers.masking_utils import AttentionMaskInterface

    transformers.AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Who sees whom is the `Attend`'s to know."""


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer.

    Args:
        query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim].

    Returns:
        [1, tokens, heads, head_dim]
    """
    attend: Any = kwargs["octavo_attend"]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if isinstance(attend, _Recorder):
        attend.record(module, q, k, v, attention_mask, kwargs)
        return attend.run(module.layer_idx, q, k, v).unsqueeze(0), None
    return attend(module.layer_idx, q.contiguous(), k.contiguous(), v.contiguous()).unsqueeze(0), None


@dataclass
class _Recorder:
    """Notes what each layer's attention is like, and computes it without a cache."""

    layers: dict[int, LayerSpec] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)

    def record(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, given: Mapping[str, Any]) -> None:
        self.calls[module.layer_idx] += 1
        if mask is not None:
            raise UnsupportedModel("attention with a mask of the model's own is not supported")
        if v.shape[-1] != k.shape[-1]:
            raise UnsupportedModel("keys and values of different sizes are not supported")
        if not getattr(module, "is_causal", True) or given.get("position_bias") is not None:
            raise UnsupportedModel("attention that is not plainly causal is not supported")
        scale, sinks = given.get("scaling"), given.get("s_aux")
        self.layers[module.layer_idx] = LayerSpec(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            scale=q.shape[2] ** -0.5 if scale is None else float(scale),
            sliding_window=given.get("sliding_window"),
            soft_cap=given.get("softcap"),
            sinks=None if sinks is None else tuple(sinks.float().tolist()),
        )

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return PromptAttention([self.layers[layer]], [q.shape[0]], q.device, causal=True)(0, q, k, v)


class TransformersModel:
    """Implements `models.decoder.Model`. Holds weights and no state: the KV cache is behind `attend`."""

    capturable = False
    makes_logits = True
    kv_scales: Mapping[int, KvScales] = MappingProxyType({})

    def __init__(self, model: Any, architecture: str, device: torch.device) -> None:
        """
        Raises:
            UnsupportedModel: a layer's attention is of a kind that ours is not.
        """
        self._model = model
        self._device = device
        recorder = _Recorder()
        ids = torch.tensor(TRIAL, device=device)
        hidden = self._hidden(ids, torch.arange(len(TRIAL), device=device), recorder)
        if sorted(recorder.layers) != list(range(len(recorder.layers))) or not recorder.layers:
            raise UnsupportedModel(f"{architecture}: not all of its layers are attention layers.")
        if max(recorder.calls.values()) > 1:
            raise UnsupportedModel(f"{architecture}: its layers attend more than once each, which a cache for one does not hold.")
        self.layer_specs = tuple(recorder.layers[i] for i in range(len(recorder.layers)))
        vocab_size = model.get_output_embeddings().weight.shape[0]
        self.spec = _spec(model.config.get_text_config(), architecture, self.layer_specs, hidden.shape[-1], vocab_size)
        self.weights_kinds = added_up(stored_as(p) for p in {p.data_ptr(): p for p in model.parameters()}.values())
        self.weights_bytes = sum(self.weights_kinds.values())
        self._head = model.get_output_embeddings() if self._is_all_head(ids, hidden, recorder) else None

    @torch.inference_mode()
    def _is_all_head(self, ids: torch.Tensor, hidden: torch.Tensor, attend: Any) -> bool:
        """Whether logits are the head of hidden states. Some models scale or cap them behind it: then what passes for hidden states
        are the logits themselves."""
        logits = self._logits(ids, torch.arange(len(ids), device=ids.device), attend)
        return torch.allclose(self._model.get_output_embeddings()(hidden), logits, atol=1e-3)

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
    def _hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """[tokens, hidden], after the final norm."""
        out = self._model.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, octavo_attend=attend)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _logits(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """[tokens, vocab]"""
        out = self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, octavo_attend=attend)
        logits: torch.Tensor = out.logits[0]
        return logits


def _spec(config: Any, architecture: str, layers: tuple[LayerSpec, ...], hidden: int, vocab_size: int) -> ModelSpec:
    """As much of a spec as the worker reads: sizes."""
    first = layers[0]
    inner = next(
        (v for key in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") if (v := getattr(config, key, None))), 4 * hidden
    )
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
