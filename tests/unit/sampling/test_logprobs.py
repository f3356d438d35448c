"""Logprob rows: values, ranks, order, raw and processed, all of the vocabulary, named ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.protocol.params import SamplingParams
from octavo.sampling import sampler as sampler_module
from octavo.sampling.logprobs import score, to_rows
from tests.support.reference_sampler import adjusted, kept
from tests.unit.sampling.test_sampler import VOCAB, Bench, make_logits


def test_values_ranks_and_order() -> None:
    logits = make_logits(3, seed=1)
    expected = torch.log_softmax(logits.double(), -1)
    tokens = torch.tensor([int(logits[0].argmax()), 17, int(logits[2].argmin())])
    rows = to_rows(score(logits, tokens, 5), [5, 2, 0])
    for i, row in enumerate(rows):
        assert row.token_id == int(tokens[i])
        assert row.logprob == pytest.approx(float(expected[i, row.token_id]), abs=1e-5)
        assert row.rank == 1 + int((expected[i] > expected[i, row.token_id]).sum())
        assert row.top_logprobs == sorted(row.top_logprobs, reverse=True)
        assert row.top_logprobs == pytest.approx([float(expected[i, t]) for t in row.top_ids], abs=1e-5)
    assert [len(r.top_ids) for r in rows] == [5, 2, 0]
    assert rows[0].rank == 1
    assert rows[0].top_ids[0] == rows[0].token_id
    assert rows[2].rank == VOCAB


def test_all_of_the_vocabulary() -> None:
    (row,) = to_rows(score(make_logits(1), torch.tensor([3]), -1), [-1])
    assert sorted(row.top_ids) == list(range(VOCAB))
    assert sum(np.exp(row.top_logprobs)) == pytest.approx(1.0, abs=1e-4)


def sample_rows(params: list[SamplingParams], logits: torch.Tensor, *, processed: bool = False) -> Any:
    bench = Bench(params, [[5, 6, 7]] * len(params), [2] * len(params), processed=processed)
    sampled = bench.sample(logits)
    return sampled, sampled.logprob_rows()


def wishes(**more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **{"seed": 3, **more})


def test_only_rows_that_ask_are_scored_and_each_gets_its_own_count() -> None:
    logits = make_logits(4)
    params = [wishes(temperature=0.0), wishes(logprobs=2), wishes(temperature=0.0, logprobs=0), wishes(logprobs=-1)]
    sampled, rows = sample_rows(params, logits)
    assert sorted(rows) == [1, 2, 3]
    assert [len(rows[s][0].top_ids) for s in (1, 2, 3)] == [2, 0, VOCAB]
    assert all(rows[s][0].token_id == int(sampled.tokens[s]) for s in rows)
    assert sample_rows(params[:1], logits[:1])[1] is None


def test_raw_is_the_models_own_distribution() -> None:
    logits = make_logits(3, seed=8)
    heavy = {"presence_penalty": 2.0, "logit_bias": {4: 30.0}, "top_k": 3, "temperature": 0.3, "logprobs": 4}
    _, rows = sample_rows([wishes(**heavy), wishes(temperature=0.0, logprobs=4), wishes(logprobs=1, top_p=0.2)], logits)
    expected = torch.log_softmax(logits.double(), -1)
    for slot, (row,) in rows.items():
        assert row.logprob == pytest.approx(float(expected[slot, row.token_id]), abs=1e-5)
        assert row.top_ids == expected[slot].topk(len(row.top_ids)).indices.tolist()


def test_processed_is_what_was_sampled_from() -> None:
    logits = make_logits(2, seed=8)
    random = wishes(presence_penalty=2.0, logit_bias={4: 3.0}, top_k=3, temperature=0.3, logprobs=3)
    penalised = wishes(repetition_penalty=1.4, temperature=0.0, logprobs=3)
    _, rows = sample_rows([random, penalised], logits, processed=True)
    for slot, params in enumerate([random, penalised]):
        values = adjusted(logits[slot].double().numpy(), params, [5, 6, 7], 2, [0, 1])
        if not params.greedy:
            values = np.where(kept(values, params), values / params.temperature, -np.inf)
        expected = torch.log_softmax(torch.from_numpy(values), -1)
        row = rows[slot][0]
        assert row.logprob == pytest.approx(float(expected[row.token_id]), abs=1e-4)
        assert row.top_ids == expected.topk(3).indices.tolist()


def test_named_token_ids_come_after_the_top_without_repeats() -> None:
    logits = make_logits(2, seed=4)
    best = int(logits[0].argmax())
    _, rows = sample_rows([wishes(logprobs=1, logprob_token_ids=[best, 9]), wishes(logprob_token_ids=[8])], logits)
    expected = torch.log_softmax(logits.double(), -1)
    assert rows[0][0].top_ids == [best, 9]
    assert rows[1][0].top_ids == [8]
    assert rows[1][0].top_logprobs == pytest.approx([float(expected[1, 8])], abs=1e-5)


def test_slices_of_rows_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(5)
    params = [wishes(logprobs=k, seed=k) if k else wishes(logprob_token_ids=[1, 2]) for k in (3, 0, 7, 1, 2)]
    whole, rows = sample_rows(params, logits)
    monkeypatch.setattr(sampler_module, "SLICE_ELEMENTS", 2 * VOCAB)
    sliced, sliced_rows = sample_rows(params, logits)
    assert whole.tokens.tolist() == sliced.tokens.tolist()
    assert rows == sliced_rows
