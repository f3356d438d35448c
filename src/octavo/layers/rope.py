"""Rotary position embedding: what a config can ask for (`RopeSpec`), and the cos/sin table made from it once at load.

The table must not depend on how long a sequence has become: keys stay in the cache, and blocks are shared between
sequences. The two kinds that transformers adapts to the current length (dynamic NTK, LongRoPE) are therefore fixed by the
longest sequence that will be served; up to the original context length of the model both give the same values.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.config.device import host_memory
from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_NOTICEABLE = 2**28
"""Bytes: smaller tables are made without a look at the memory."""


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class DynamicNtkScaling:
    """The base grows with the length served beyond `original_length`."""

    factor: float
    original_length: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    """Interpolation of slow dimensions, extrapolation of fast ones, a ramp between (YaRN, Peng et al. 2023)."""

    factor: float
    original_length: int
    attention_factor: float
    """Multiplies cos and sin, hence attention scores by its square."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""


@dataclass(frozen=True)
class LongRopeScaling:
    """A searched divisor for each frequency; another set when more than `original_length` is served (Ding et al. 2024)."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    attention_factor: float


@dataclass(frozen=True)
class FrequencyDivisors:
    """One divisor for each frequency, as GGUF files store Llama 3.1 scaling."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | DynamicNtkScaling | Llama3Scaling | YarnScaling | LongRopeScaling | FrequencyDivisors


@dataclass(frozen=True)
class RopeSpec:
    theta: float
    rotary_dim: int
    """Dimensions of a head that rotate; even, at most head_dim."""
    scaling: RopeScaling | None = None


def inverse_frequencies(spec: RopeSpec, max_length: int) -> tuple[Float32, float]:
    """Radians a position for each rotated pair, and the factor on cos and sin.

    Args:
        max_length: the longest sequence served.

    Returns:
        ([rotary_dim / 2], attention factor)
    """
    frequencies, attention_factor = _frequencies(spec, max_length)
    return frequencies.astype(np.float32), attention_factor


def _frequencies(spec: RopeSpec, max_length: int) -> tuple[Float64, float]:
    dim, theta = spec.rotary_dim, spec.theta
    exponents: Float64 = np.arange(0, dim, 2, dtype=np.float64) / dim
    plain: Float64 = 1.0 / theta**exponents
    match spec.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / factor, 1.0
        case DynamicNtkScaling(factor, original):
            length = max(max_length, original)
            base: float = theta * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
            return np.asarray(1.0 / base**exponents, np.float64), 1.0
        case Llama3Scaling():
            return _llama3(plain, spec.scaling), 1.0
        case YarnScaling():
            return _yarn(plain, theta, dim, spec.scaling), spec.scaling.attention_factor
        case LongRopeScaling(short, long, original, attention_factor):
            divisors = np.asarray(long if max_length > original else short, np.float64)
            return plain / divisors, attention_factor
        case FrequencyDivisors(given):
            return plain / np.asarray(given, np.float64), 1.0


def _llama3(plain: Float64, scaling: Llama3Scaling) -> Float64:
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_length / wavelength - low) / (high - low)).clip(0.0, 1.0)
    stretched: Float64 = (1 - smooth) * plain / scaling.factor + smooth * plain
    return stretched


def _yarn(plain: Float64, theta: float, dim: int, scaling: YarnScaling) -> Float64:
    def dimension_of(rotations: float) -> float:
        """The (fractional) dimension that turns `rotations` times over the original context."""
        return dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    start, end = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float64) - start) / (end - start or 0.001)
    interpolated = ramp.clip(0.0, 1.0)
    blended: Float64 = plain / scaling.factor * interpolated + plain * (1 - interpolated)
    return blended


def rotation_table(spec: RopeSpec, max_length: int) -> Float32:
    """Cosines and sines of every position.

    Returns:
        [max_length, rotary_dim]: cosines, then sines.

    Raises:
        ConfigError: there is no memory for so many positions.
    """
    _check_memory(spec.rotary_dim, max_length)
    frequencies, attention_factor = inverse_frequencies(spec, max_length)
    try:
        angles = np.arange(max_length, dtype=np.float32)[:, None] * frequencies
        table, half = np.empty((max_length, 2 * len(frequencies)), np.float32), len(frequencies)
        # Rounded from float64, like the frequencies, so that every machine has the same table: quick float32 functions differ in
        # their last bit.
        np.cos(angles, out=table[:, :half], dtype=np.float64, casting="same_kind")
        np.sin(angles, out=table[:, half:], dtype=np.float64, casting="same_kind")
        table *= np.float32(attention_factor)
        return table
    except (ValueError, MemoryError) as e:  # numpy's word for more than there are addresses
        raise ConfigError(_no_memory(max_length)) from e


def _check_memory(rotary_dim: int, max_length: int) -> None:
    """The system promises more than it has, and ends who uses it. A table needs its angles besides while it is made.

    Raises:
        ConfigError: there is less.
    """
    needed = 6 * rotary_dim * max_length
    if needed > _NOTICEABLE and needed > host_memory()[1]:
        raise ConfigError(_no_memory(max_length))


def _no_memory(max_length: int) -> str:
    return f"max_model_len={max_length}: no memory for a table of so many positions. Set --max-model-len lower."


def unrotated_table(rotary_dim: int, max_length: int) -> Float32:
    """The table of a layer that does not rotate: angles of zero, so that it takes the same kernels.

    Returns:
        [max_length, rotary_dim]: ones, then zeros.

    Raises:
        ConfigError: there is no memory for so many positions.
    """
    _check_memory(rotary_dim, max_length)
    table = np.zeros((max_length, rotary_dim), np.float32)
    table[:, : rotary_dim // 2] = 1.0
    return table


def cos_sin_table(spec: RopeSpec | None, rotary_dim: int, max_length: int, device: torch.device) -> torch.Tensor:
    """`rotation_table` on a device; of None, `unrotated_table`."""
    import torch

    table = unrotated_table(rotary_dim, max_length) if spec is None else rotation_table(spec, max_length)
    return torch.from_numpy(table).to(device)


@dataclass(frozen=True)
class Rotation:
    """The rotations of a step's tokens. A fused kernel looks them up itself; for others `cos_sin` does it once."""

    table: torch.Tensor
    """[max_length, rotary_dim] float32 from `cos_sin_table`."""
    positions: torch.Tensor
    """[tokens] int64."""

    @functools.cached_property
    def cos_sin(self) -> torch.Tensor:
        """[tokens, rotary_dim] float32: cosines, then sines."""
        return self.table[self.positions]
