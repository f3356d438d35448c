"""What a mask of transformers says of the positions that a trial run does not have."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import UnsupportedModel
from octavo.models.swapped_attention import AskedMask, causal_window

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("window", "length", "found"), [(None, 1000, None), (7, 1000, 7), (1, 50, 1), (999, 1000, 999), (1000, 1000, None), (5, 5, None)]
)
def test_windows_are_found(window: int | None, length: int, found: int | None) -> None:
    def visible(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        causal = k <= q
        return causal if window is None else causal & (k > q - window)

    assert causal_window(visible, length, CPU) == found


def test_chunks_are_causal_up_to_the_length_of_one() -> None:
    def visible(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (k // 64 == q // 64)

    assert causal_window(visible, 64, CPU) is None
    for longer in (65, 96, 128, 5000):
        with pytest.raises(UnsupportedModel, match=f"sequences of {longer} tokens .*--max-model-len 64"):
            causal_window(visible, longer, CPU)


def test_what_is_not_causal_is_refused() -> None:
    with pytest.raises(UnsupportedModel):
        causal_window(lambda q, k: torch.ones_like(k, dtype=torch.bool), 100, CPU)
    with pytest.raises(UnsupportedModel):
        causal_window(lambda q, k: (k - q).abs() < 4, 100, CPU)
    with pytest.raises(UnsupportedModel):  # the first tokens are always seen
        causal_window(lambda q, k: (k <= q) & ((k > q - 9) | (k < 4)), 100, CPU)


def test_a_mask_can_be_passed_on_whole_and_no_other_way() -> None:
    mask = AskedMask(None, padded=False)
    assert mask[:, :, slice(0, None), :] is mask
    for use in (lambda: mask[:, 0], lambda: mask[:, :, 3:], lambda: mask.dtype):
        with pytest.raises(UnsupportedModel, match="mask of the model's own"):
            use()
    assert not hasattr(mask, "__torch_function__")
