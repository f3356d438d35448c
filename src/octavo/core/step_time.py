"""How long a step takes, learned while serving, so that prompt chunks can be sized by time instead of by a token count.

    seconds ~ a + b * tokens + c * pairs

where `pairs` is the number of (query, key) pairs attention looks at. Fitted by recursive least squares with forgetting, so that it
follows the machine; it needs no calibration run and no knowledge of the model.
"""

from __future__ import annotations

import math

FORGET = 0.98
TOKENS_UNIT = 256.0
PAIRS_UNIT = 65536.0
GROWTH = 2
"""A step gets at most this many times the tokens of the largest step seen: the model is not trusted far outside of what it saw."""
OUTLIER = 8.0
"""An observation this many times the prediction (a compilation, a page fault storm) is cut to it once the model is warm."""
WARM = 8
MOST_TRACE = 3e3


def chunk_pairs(start: int, count: int) -> float:
    """Query-key pairs of a chunk of `count` tokens that follow `start` others."""
    return count * (start + (count + 1) / 2)


class StepTimeModel:
    """Recursive least squares over three features."""

    def __init__(self, first_chunk: int) -> None:
        """
        Args:
            first_chunk: tokens to try while nothing is known.
        """
        self._first_chunk = first_chunk
        self.observations = 0
        self.largest = 0
        """Most tokens seen in one step."""
        # Plain numbers: arrays of three cost ten times as much, every step.
        self._theta = (0.0, 0.0, 0.0)
        self._covariance = (MOST_TRACE / 3, 0.0, 0.0, MOST_TRACE / 3, 0.0, MOST_TRACE / 3)
        """Symmetric: 00, 01, 02, 11, 12, 22."""

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """A step with `tokens` tokens took `seconds`; values that are no times are ignored."""
        if tokens <= 0 or not math.isfinite(seconds) or seconds <= 0.0:
            return
        if self.observations >= WARM:
            seconds = min(seconds, OUTLIER * max(self.predict(tokens, pairs), 1e-6))
        x, y = tokens / TOKENS_UNIT, pairs / PAIRS_UNIT  # the first feature is 1
        c00, c01, c02, c11, c12, c22 = self._covariance
        g0, g1, g2 = c00 + c01 * x + c02 * y, c01 + c11 * x + c12 * y, c02 + c12 * x + c22 * y
        scale = 1.0 / (FORGET + g0 + g1 * x + g2 * y)
        t0, t1, t2 = self._theta
        step = scale * (seconds - t0 - t1 * x - t2 * y)
        self._theta = (t0 + step * g0, t1 + step * g1, t2 + step * g2)
        c00, c11, c22 = c00 - scale * g0 * g0, c11 - scale * g1 * g1, c22 - scale * g2 * g2
        c01, c02, c12 = c01 - scale * g0 * g1, c02 - scale * g0 * g2, c12 - scale * g1 * g2
        # Forgetting inflates the directions that steady traffic never shows: bound it.
        grow = min(1.0 / FORGET, MOST_TRACE / max(c00 + c11 + c22, 1e-300))
        self._covariance = (c00 * grow, c01 * grow, c02 * grow, c11 * grow, c12 * grow, c22 * grow)
        self.observations += 1
        self.largest = max(self.largest, tokens)

    def coefficients(self) -> tuple[float, float, float]:
        """(seconds a step, a token, a pair), none negative."""
        a, b, c = (max(0.0, v) for v in self._theta)
        return a, b / TOKENS_UNIT, c / PAIRS_UNIT

    def predict(self, tokens: int, pairs: float) -> float:
        a, b, c = self.coefficients()
        return a + b * tokens + c * pairs

    def cost(self, start: int, count: int) -> float:
        """Seconds that a chunk adds to a step."""
        _, b, c = self.coefficients()
        return b * count + c * chunk_pairs(start, count)

    def largest_chunk(self, start: int, seconds: float) -> int:
        """Most tokens after `start` others that add at most `seconds` to a step."""
        if seconds <= 0.0:
            return 0
        _, b, c = self.coefficients()
        linear, quadratic = b + c * (start + 0.5), c / 2
        if quadratic * seconds > 1e-12 * linear * linear:
            count = (math.sqrt(linear * linear + 4 * quadratic * seconds) - linear) / (2 * quadratic)
        elif linear > 0.0:
            count = seconds / linear
        else:
            return 1 << 30
        return min(1 << 30, int(count))

    def most_tokens(self) -> int:
        """Tokens a step may have, by what has been seen so far."""
        return max(self._first_chunk, GROWTH * self.largest)
