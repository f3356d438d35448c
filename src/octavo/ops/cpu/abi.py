"""The compiled kernels' C interface (native/abi.h) in ctypes: structures, function signatures, and how the library is found."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any, Final, TypeVar

import numpy as np

from octavo.config.device import native_kernels_path
from octavo.config.types import CpuActivations
from octavo.errors import ConfigError
from octavo.ops.packed import PanelKind, PanelWeight
from octavo.ops.registry import Activation

S = TypeVar("S", bound=ctypes.Structure)

LAYOUT: Final = 1
"""Of panels (native/matmul.h), and of the order in which rows are packed: to be raised when either changes."""
KINDS: Final[dict[PanelKind, int]] = {"f32": 0, "f16": 1, "bf16": 2, "q4": 3, "q8": 4, "q8_minimum": 5, "q8_halves": 6}
SOURCES: Final[dict[str, tuple[int, PanelKind]]] = {
    "F32": (0, "f32"),
    "F16": (1, "f16"),
    "BF16": (2, "bf16"),
    "Q4_0": (3, "q4"),
    "Q4_1": (4, "q4"),
    "Q8_0": (5, "q8"),
    "Q4_K": (6, "q4"),
    "Q5_0": (7, "q8"),
    "Q5_1": (8, "q8_minimum"),
    "Q5_K": (9, "q8_minimum"),
    "Q6_K": (10, "q8_halves"),
    "Q3_K": (11, "q8"),
    "Q2_K": (12, "f16"),
    "IQ4_NL": (13, "q8"),
    "IQ4_XS": (14, "q8"),
    "MXFP4": (15, "q8"),
}
"""How rows are stored -> (code, the kind of panel they become)."""
PANEL_BITS: Final[dict[PanelKind, float]] = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q4": 5.0,
    "q8": 8.5,
    "q8_minimum": 9.0,
    "q8_halves": 9.0,
}
"""Of a weight, with its share of scales."""
ACTIVATIONS: Final[dict[Activation, int]] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
READ_AS: Final[dict[CpuActivations, int]] = {"float32": 0, "int16": 1, "int8": 2}
"""What packed weights are multiplied with."""
LEVELS: Final = ("portable", "avx2", "avx512", "neon")


class Segment(ctypes.Structure):
    """Consecutive rows of one kind."""

    _fields_ = [("kind", c_int32), ("rows", c_int32), ("data", c_void_p)]


class Linear(ctypes.Structure):
    """A linear layer."""

    _fields_ = [
        ("segments", POINTER(Segment)),
        ("bias", c_void_p),
        ("num_segments", c_int32),
        ("out_features", c_int32),
        ("in_features", c_int32),
        ("padding", c_int32),
    ]


class Layer(ctypes.Structure):
    """A decoder layer."""

    _fields_ = [
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm")),
        ("cos_sin", c_void_p),
    ]


class Decoder(ctypes.Structure):
    """A whole decoder."""

    _fields_ = [
        ("layers", POINTER(Layer)),
        ("embed", Linear),
        ("head", Linear),
        ("final_norm", c_void_p),
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "inner", "vocab")),
        ("activation", c_int32),
        ("activations", c_int32),
        *((name, c_float) for name in ("norm_eps", "embedding_scale", "residual_multiplier", "logit_scale", "logit_soft_cap")),
        ("padding", c_int32),
    ]


class Cache(ctypes.Structure):
    """One layer's attention, and where its keys and values are."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_stride", c_int64),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "padded_dim", "block_size", "padded_block", "half", "window")),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sliding", c_int32),
        ("padding", c_int32),
    ]


class Step(ctypes.Structure):
    """The tokens of a step and whom they belong to."""

    _fields_ = [
        *((name, c_void_p) for name in ("token_ids", "positions", "cache_slots", "sliding_slots", "row_start", "row_count")),
        *((name, c_void_p) for name in ("block_tables", "sliding_tables", "row_slots", "wanted")),
        ("table_stride", c_int64),
        *((name, c_int32) for name in ("num_tokens", "num_rows", "num_wanted", "padding")),
    ]


class Slots(ctypes.Structure):
    """What is kept of each request between steps, by slot."""

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "blocks", "numbers")),
        *((name, c_int64) for name in ("tokens_stride", "blocks_stride", "numbers_stride")),
        ("block_size", c_int32),
        ("sliding_column", c_int32),
    ]


class Plan(ctypes.Structure):
    """A step, as the core plans it."""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                "slots",
                "start",
                "count",
                "sample",
                "table_slots",
                "table_index",
                "table_blocks",
                "modes",
                "keys",
                "masks",
                "mask_rows",
            )
        ),
        *((name, c_int32) for name in ("num_rows", "num_tokens", "num_diffs", "mask_words")),
    ]


class Draw(ctypes.Structure):
    """Rows to draw tokens for."""

    _fields_ = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab", c_int64),
        *((name, c_void_p) for name in ("slots", "modes", "keys", "numbers")),
        ("numbers_stride", c_int64),
        *((name, c_void_p) for name in ("masks", "mask_rows", "places")),
        ("rows", c_int32),
        ("mask_words", c_int32),
    ]


def _done(result: int, function: object, arguments: object) -> None:
    """Of functions that need memory, see native/abi.h."""
    if not result:
        raise MemoryError("The system gives no memory for a step of this size.")


_SIGNATURES: Final[dict[str, tuple[Any, list[type]]]] = {
    "octavo_abi": (c_int32, []),
    "octavo_level": (c_int32, []),
    "octavo_set_level": (c_int32, [c_int32]),
    "octavo_engine_new": (c_void_p, [c_int32]),
    "octavo_engine_free": (None, [c_void_p]),
    "octavo_engine_trim": (None, [c_void_p]),
    "octavo_packed_bytes": (c_int64, [c_int32, c_int64, c_int64]),
    "octavo_pack": (c_int32, [c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "octavo_linear": (_done, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32]),
    "octavo_embedding": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "octavo_rms_norm": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int64]),
    "octavo_rope": (None, [c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64]),
    "octavo_gated_mul": (None, [c_void_p, c_int64, c_int64, c_int32, c_void_p]),
    "octavo_attention": (_done, [c_void_p, c_void_p, c_void_p, *([c_void_p, c_int64] * 3), c_void_p]),
    "octavo_forward": (_done, [c_void_p] * 5),
    "octavo_begin": (_done, [c_void_p] * 3),
    "octavo_layer_qkv": (_done, [c_void_p, c_void_p, c_void_p, c_int32, c_void_p]),
    "octavo_layer_rest": (_done, [c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p]),
    "octavo_step": (_done, [c_void_p] * 6),
    "octavo_step_logits": (_done, [c_void_p] * 7),
    "octavo_draw": (_done, [c_void_p] * 3),
    "octavo_logits": (_done, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p]),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built. Calls release the GIL."""
    path = native_kernels_path()
    if path is None:
        return None
    found = ctypes.CDLL(path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes = arguments
        if result is _done:
            function.restype, function.errcheck = c_int32, _done
        else:
            function.restype = result
    return found


def loaded() -> ctypes.CDLL:
    """The library, for code that only runs where it is there."""
    found = library()
    if found is None:
        raise RuntimeError("the compiled CPU kernels are not there")
    return found


class Engine:
    """Threads and scratch memory of one worker, freed with this object. One call at a time."""

    def __init__(self, threads: int) -> None:
        self._library = loaded()
        self.handle: int = self._library.octavo_engine_new(threads)
        if not self.handle:
            raise ConfigError(f"The system does not start {threads} threads for the CPU kernels. Ask for fewer with --threads.")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.octavo_engine_free(self.handle)
            self.handle = 0


def pointer(array: np.ndarray[Any, np.dtype[Any]] | None) -> int | None:
    """The address of an array's first element; null for None."""
    return None if array is None else address(array)


def address(array: np.ndarray[Any, np.dtype[Any]]) -> int:
    """Of an array's first element."""
    found: int = array.ctypes.data
    return found


def describe_linear(weight: PanelWeight, bias: np.ndarray[Any, np.dtype[np.float32]] | None = None) -> Linear:
    """The C view of a weight. Points into its arrays: keep them."""
    segments = (Segment * len(weight.segments))(
        *(Segment(KINDS[segment.kind], segment.rows, address(segment.data)) for segment in weight.segments)
    )
    return Linear(segments, pointer(bias), len(weight.segments), weight.out_features, weight.in_features, 0)


def array_of(kind: type[S], items: Sequence[S]) -> ctypes.Array[S]:
    """Structures side by side in memory."""
    return (kind * len(items))(*items)
