"""A compiled decoder with its own attention: what a sequence gets is the same bits however its tokens are cut and batched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.models.decoder import Model
from octavo.ops.cpu import abi
from tests.models.contiguous import load, run
from tests.support.paged_batches import Pool, step_batch
from tests.support.tiny_models import save_tiny

if abi.library() is None:
    pytest.skip("the compiled kernels were not built", allow_module_level=True)

from octavo.attention.native_cpu import NativeCpuAttention

IDS = torch.randint(3, 128, (4, 60), generator=torch.Generator().manual_seed(3))
BLOCK = 16


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, request.param)
    return load(folder, ops="native")


def logits_in_steps(model: Model, sequences: list[int], steps: list[list[int]]) -> dict[int, torch.Tensor]:
    """Logits of every token, by sequence. `steps`: tokens that each sequence computes; decodes are put first, as the core does."""
    attention = NativeCpuAttention(model.layer_specs, 40, BLOCK, torch.float16, torch.device("cpu"))
    tables = Pool(40, BLOCK, seed=len(sequences)).tables([60] * len(sequences))
    done = [0] * len(sequences)
    out: dict[int, list[torch.Tensor]] = {s: [] for s in sequences}
    for counts in steps:
        rows = sorted((i for i, c in enumerate(counts) if c), key=lambda i: counts[i] > 1)
        batch = step_batch([done[i] for i in rows], [counts[i] for i in rows], tables[rows], BLOCK)
        tokens = torch.cat([IDS[sequences[i], done[i] : done[i] + counts[i]] for i in rows])
        batch = replace(batch, token_ids=tokens)
        hidden = model.forward(tokens, batch.positions, attention.plan(batch))
        for i, part in zip(rows, hidden.split([counts[i] for i in rows]), strict=True):
            out[sequences[i]].append(model.logits(part))
            done[i] += counts[i]
    return {s: torch.cat(parts) for s, parts in out.items()}


def test_batches_and_chunks_change_no_bit(model: Model) -> None:
    alone = {s: logits_in_steps(model, [s], [[60]])[s] for s in range(4)}
    token_by_token = logits_in_steps(model, [0], [[1]] * 60)
    assert torch.equal(token_by_token[0], alone[0])
    mixed = logits_in_steps(model, [0, 1, 2, 3], [[30, 1, 0, 17], [1, 59, 60, 1], [29, 0, 0, 42]])
    for s in range(4):
        assert torch.equal(mixed[s], alone[s])


def test_fused_attention_equals_attention_from_outside(model: Model) -> None:
    expected = run(model, IDS[0].tolist())
    torch.testing.assert_close(logits_in_steps(model, [0], [[60]])[0], expected, atol=5e-3, rtol=1e-3)  # a float16 cache
