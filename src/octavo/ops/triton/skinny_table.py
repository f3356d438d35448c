"""Which kernel multiplies few rows with a weight: measured on one H200 by `benchmarks/gpu_matmul.py --write-table`.

A row class covers the numbers of rows from the class before it up to its own. None is cuBLAS.
"""

from __future__ import annotations

from octavo.ops.triton.skinny_matmul import SkinnyTuning

ROW_CLASSES = (1, 16, 32, 64)

Choices = tuple[SkinnyTuning | None, ...]
"""One a row class."""


def choices(columns: int, inner: int, sm_count: int) -> Choices:
    """For a weight of `columns` output and `inner` input features: as measured, or for other shapes and cards by their likeness."""
    known = MEASURED.get((columns, inner))
    return known if known is not None and sm_count == MEASURED_SMS else (*(_alike(columns, inner, sm_count),) * 2, None, None)


def _alike(columns: int, inner: int, sm_count: int) -> SkinnyTuning:
    if columns >= 128 * sm_count:
        return SkinnyTuning(columns=64, inner=256, split=1, warps=4, stages=3)
    # Two thread blocks an SM keep enough of a long inner dimension in flight; short ones have no time for a second.
    strip, step, blocks = (64, 128, 2 * sm_count) if inner >= 4096 else (32, 256, sm_count)
    split = 1
    while split < 8 and -(-columns // strip) * split * 2 <= blocks and inner >= 4 * split * step:
        split *= 2
    return SkinnyTuning(columns=strip, inner=step, split=split, warps=4, stages=4)


MEASURED_SMS = 132
MEASURED: dict[tuple[int, int], Choices] = {
    # (out_features, in_features): one choice a row class
    (6144, 4096): (
        SkinnyTuning(4, 1024, 1, 4, 3, "vector"),
        SkinnyTuning(64, 128, 1, 4, 4, "weights_first"),
        SkinnyTuning(64, 128, 1, 4, 4, "weights_first"),
        None,
    ),
    (4096, 4096): (
        SkinnyTuning(8, 256, 1, 4, 4, "vector"),
        SkinnyTuning(64, 128, 2, 4, 4, "weights_first"),
        SkinnyTuning(64, 256, 2, 4, 3, "weights_first"),
        None,
    ),
    (28672, 4096): (
        SkinnyTuning(16, 256, 1, 4, 3, "vector"),
        SkinnyTuning(64, 128, 1, 4, 4, "weights_first"),
        SkinnyTuning(64, 128, 1, 4, 4, "weights_first"),
        None,
    ),
    (4096, 14336): (
        SkinnyTuning(8, 256, 1, 4, 4, "vector"),
        SkinnyTuning(64, 256, 2, 4, 3, "weights_first"),
        SkinnyTuning(64, 128, 2, 4, 4, "weights_first"),
        SkinnyTuning(64, 128, 2, 4, 4),
    ),
    (128256, 4096): (
        SkinnyTuning(16, 256, 1, 4, 3, "vector"),
        SkinnyTuning(64, 128, 1, 4, 4),
        SkinnyTuning(64, 128, 1, 4, 4, "weights_first"),
        None,
    ),
    (151936, 1024): (SkinnyTuning(8, 512, 1, 4, 3, "vector"), SkinnyTuning(64, 128, 1, 4, 4, "weights_first"), None, None),
    (4096, 1024): (SkinnyTuning(8, 256, 1, 4, 4, "vector"), SkinnyTuning(32, 128, 1, 4, 4), None, None),
    (1024, 2048): (
        SkinnyTuning(4, 1024, 1, 4, 3, "vector"),
        SkinnyTuning(32, 128, 4, 4, 4),
        SkinnyTuning(32, 128, 4, 4, 4),
        None,
    ),
    (6144, 1024): (
        SkinnyTuning(16, 256, 1, 4, 3, "vector"),
        SkinnyTuning(64, 128, 1, 4, 4, "weights_first"),
        SkinnyTuning(64, 128, 1, 4, 4, "weights_first"),
        None,
    ),
    (1024, 3072): (
        SkinnyTuning(4, 1024, 1, 4, 3, "vector"),
        SkinnyTuning(32, 128, 4, 4, 4),
        SkinnyTuning(32, 128, 4, 4, 4),
        None,
    ),
}
