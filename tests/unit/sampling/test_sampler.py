"""The sampler against a slow numpy reference, and its promises: reproducible, independent of the batch, safe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protocol.params import SamplingParams
from octavo.sampling import filters, penalties
from octavo.sampling import sampler as sampler_module
from octavo.sampling.keys import row_keys
from octavo.sampling.random import categorical
from octavo.sampling.sampler import Sampled, Sampler
from octavo.sampling.state import Feature, SamplerState, features_of
from tests.support.reference_sampler import adjusted, kept
from tests.support.step_plans import slot_init

VOCAB = 700
CPU = torch.device("cpu")


def greedy(**wishes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=None, **wishes)


def random(**wishes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **{"seed": 11, **wishes})


class Bench:
    """A sampler with requests in slots: `tokens` are all tokens of each, `prompts` how many of them are prompt."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        tokens: Sequence[Sequence[int]],
        prompts: Sequence[int],
        *,
        slots: Sequence[int] | None = None,
        indices: Sequence[int] | None = None,
        processed: bool = False,
        vocab: int = VOCAB,
    ) -> None:
        self.slots = np.asarray(range(len(params)) if slots is None else slots, np.int32)
        self.positions = np.asarray([len(t) for t in tokens], np.int32)
        table = torch.zeros(int(self.slots.max()) + 1, 64, dtype=torch.int32)
        state = SamplerState(len(table), CPU)
        state.enter(
            [
                slot_init(slot, t, [1], sampling=p, num_prompt=n, index=0 if indices is None else indices[i], eos=[0, 1])
                for i, (slot, p, t, n) in enumerate(zip(self.slots.tolist(), params, tokens, prompts, strict=True))
            ]
        )
        for slot, t in zip(self.slots.tolist(), tokens, strict=True):
            table[slot, : len(t)] = torch.tensor(t)
        self.sampler = Sampler(state, table, processed_logprobs=processed)

    def sample(self, logits: torch.Tensor, rows: Sequence[int] | None = None) -> Sampled:
        rows = range(len(self.slots)) if rows is None else rows
        index = np.asarray(list(rows))
        return self.sampler.sample(logits[torch.from_numpy(index)].clone(), self.slots[index], self.positions[index])


def make_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def one(params: SamplingParams, logits: torch.Tensor, tokens: Sequence[int] = (5, 6, 7), prompt: int = 2) -> int:
    return int(Bench([params], [tokens], [prompt]).sample(logits.view(1, -1)).tokens[0])


token_ids = st.integers(0, VOCAB - 1)
few_ids = st.lists(token_ids, min_size=1, max_size=6)


@st.composite
def params_and_tokens(draw: st.DrawFn) -> tuple[SamplingParams, list[int], int]:
    """Any mixture of features, with histories short enough in vocabulary that tokens repeat."""
    wishes: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.7]))}
    tokens = draw(st.lists(st.sampled_from([3, 4, 5, 0, 699]), min_size=1, max_size=20))
    prompt = draw(st.integers(1, len(tokens)))
    if draw(st.booleans()):
        wishes["repetition_penalty"] = draw(st.sampled_from([0.5, 1.3, 2.0]))
    if draw(st.booleans()):
        wishes["presence_penalty"] = draw(st.sampled_from([-1.5, 0.7]))
    if draw(st.booleans()):
        wishes["frequency_penalty"] = draw(st.sampled_from([-0.5, 2.0]))
    if draw(st.booleans()):
        wishes["logit_bias"] = draw(st.dictionaries(st.sampled_from([3, 4, 9, 600]), st.sampled_from([-100.0, 1.5, 8.0]), min_size=1))
    if draw(st.booleans()):
        wishes["allowed_token_ids"] = draw(few_ids)
    if draw(st.booleans()):
        wishes["min_tokens"] = draw(st.integers(1, 12))
        wishes["stop_token_ids"] = draw(few_ids)
        wishes["ignore_eos"] = draw(st.booleans())
    if draw(st.booleans()):
        end = st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=3)
        wishes["bad_words_token_ids"] = [*draw(st.lists(end, min_size=1, max_size=3)), [tokens[-1], draw(token_ids)]]
    for name, choices in {"top_k": [1, 5, 690], "top_p": [0.1, 0.6, 0.95], "min_p": [0.05, 0.5]}.items():
        if draw(st.booleans()):
            wishes[name] = draw(st.sampled_from(choices))
    return SamplingParams(max_tokens=None, seed=draw(st.integers(-5, 5)), **wishes), tokens, prompt


@settings(max_examples=150, deadline=None)
@given(st.lists(params_and_tokens(), min_size=1, max_size=6), st.integers(0, 10_000), st.integers(1, 700))
def test_every_mixture_of_features_matches_the_reference(rows: list[Any], seed: int, candidates: int) -> None:
    """Greedy rows give the reference's argmax, random rows draw from the reference's surviving set with their own key."""
    logits = make_logits(len(rows), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "CANDIDATES", candidates)
        patch.setattr(penalties, "MOST_ELEMENTS", 40)
        patch.setattr(sampler_module, "SLICE_ELEMENTS", 3 * VOCAB)
        sampled = Bench([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]).sample(logits)
    for i, (params, tokens, prompt) in enumerate(rows):
        expected = adjusted(logits[i].double().numpy(), params, tokens, prompt, eos=[0, 1])
        if not np.isfinite(expected).any():
            assert not sampled.valid[i]
            continue
        assert sampled.valid[i]
        token = int(sampled.tokens[i])
        if params.greedy:
            assert expected[token] == pytest.approx(expected.max(), abs=1e-4)
            continue
        survivors = np.where(kept(expected, params), expected / params.temperature, -np.inf)
        key = row_keys(np.asarray([params.seed], np.int64), np.zeros(1, np.int32), np.asarray([len(tokens)], np.int32))
        drawn, _ = categorical(torch.from_numpy(survivors).float().view(1, -1), torch.from_numpy(key))
        assert token == int(drawn[0])


@pytest.mark.parametrize(
    ("wishes", "feature"),
    [
        ({}, Feature(0)),
        ({"logit_bias": {}}, Feature(0)),
        ({"temperature": 1.0}, Feature.RANDOM),
        ({"top_p": 0.5}, Feature(0)),
        ({"temperature": 1.0, "top_k": 5}, Feature.RANDOM | Feature.FILTERS),
        ({"presence_penalty": 0.1}, Feature.PENALTIES),
        ({"logprobs": 0}, Feature.LOGPROBS),
        ({"min_tokens": 3}, Feature.MIN_TOKENS),
    ],
)
def test_requests_pay_only_for_what_they_use(wishes: dict[str, Any], feature: Feature) -> None:
    assert features_of(SamplingParams(max_tokens=None, **{"temperature": 0.0, **wishes})) == feature


def test_greedy_ties_take_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 300, 650]] = 2.0
    assert one(greedy(), logits) == 40
    assert one(greedy(presence_penalty=1.0), logits, tokens=(5, 40), prompt=1) == 300


def test_seeds_reproduce_in_any_batch_slot_and_order() -> None:
    logits = make_logits(6)
    params = [random(seed=s, top_p=p) for s, p in [(1, 1.0), (2, 0.9), (3, 1.0), (1, 1.0)]] + [greedy(), random(top_k=3)]
    tokens = [[5] * n for n in (3, 4, 5, 3, 2, 9)]
    together = Bench(params, tokens, [1] * 6).sample(logits).tokens
    elsewhere = Bench(params, tokens, [1] * 6, slots=[9, 2, 14, 0, 3, 7])
    backwards = elsewhere.sample(logits, rows=[5, 4, 3, 2, 1, 0]).tokens.flip(0)
    alone = torch.cat([elsewhere.sample(logits, rows=[i]).tokens for i in range(6)])
    assert together.tolist() == backwards.tolist() == alone.tolist()


def test_seed_index_and_position_all_matter() -> None:
    flat = torch.zeros(1, VOCAB)
    base = Bench([random(seed=1)], [[5, 6]], [1]).sample(flat).tokens
    again = Bench([random(seed=1)], [[7, 8]], [2]).sample(flat).tokens
    assert base.tolist() == again.tolist()
    others = [
        Bench([random(seed=2)], [[5, 6]], [1]).sample(flat).tokens,
        Bench([random(seed=1)], [[5, 6, 7]], [1]).sample(flat).tokens,
        Bench([random(seed=1)], [[5, 6]], [1], indices=[1]).sample(flat).tokens,
    ]
    assert len({int(t) for t in [base, *others]}) == 4


def test_greedy_rows_of_a_mixed_batch_equal_all_greedy() -> None:
    logits = make_logits(8, seed=3)
    alone = Bench([greedy()] * 8, [[5]] * 8, [1] * 8).sample(logits).tokens
    mixed = [greedy() if i % 2 else random(seed=i, top_k=4) for i in range(8)]
    assert Bench(mixed, [[5]] * 8, [1] * 8).sample(logits).tokens[1::2].tolist() == alone[1::2].tolist()


@pytest.mark.parametrize("wishes", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_frequencies_follow_the_distribution(wishes: dict[str, Any]) -> None:
    """4,000 seeds of one distribution, judged by chi-square."""
    logits = make_logits(1, seed=5, vocab=300)[0] / 2
    params = random(**wishes)
    scaled = np.where(kept(logits.double().numpy(), params), logits.double().numpy() / params.temperature, -np.inf)
    expected = torch.softmax(torch.from_numpy(scaled), 0).numpy() * 4000
    bench = Bench([random(seed=s, **wishes) for s in range(4000)], [[5, 6]] * 4000, [1] * 4000, vocab=300)
    observed = np.bincount(bench.sample(logits.expand(4000, -1)).tokens.numpy(), minlength=300)
    assert observed[expected == 0].sum() == 0
    likely = expected >= 6
    pooled_expected = np.append(expected[likely], expected[~likely].sum())
    pooled_observed = np.append(observed[likely], observed[~likely].sum())
    pooled_expected[-1] = max(pooled_expected[-1], 1e-9)
    statistic = ((pooled_observed - pooled_expected) ** 2 / pooled_expected).sum()
    freedom = len(pooled_expected) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_top_k_one_is_greedy_and_ties_survive() -> None:
    logits = make_logits(4, seed=9)
    drawn = Bench([random(seed=i, top_k=1) for i in range(4)], [[5]] * 4, [1] * 4).sample(logits).tokens
    assert drawn.tolist() == logits.argmax(-1).tolist()
    tied = torch.full((200, VOCAB), -5.0)
    tied[:, [8, 9, 10]] = 4.0
    tokens = Bench([random(seed=i, top_k=2) for i in range(200)], [[5]] * 200, [1] * 200).sample(tied).tokens
    assert set(tokens.tolist()) == {8, 9, 10}


def test_bad_word_needs_its_whole_prefix_in_the_output() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 50] = 9.0
    params = greedy(bad_words_token_ids=[[20, 21, 50]])
    assert one(params, logits, tokens=(1, 20, 21), prompt=1) != 50
    assert one(params, logits, tokens=(1, 20, 21), prompt=2) == 50
    assert one(params, logits, tokens=(1, 21, 20), prompt=1) == 50
    assert one(greedy(bad_words_token_ids=[[50]]), logits, tokens=(1,), prompt=1) != 50


def test_min_tokens_blocks_eos_and_stop_tokens_until_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 30], logits[0, 2] = 9.0, 8.0, 7.0
    params = greedy(min_tokens=2, stop_token_ids=[30])
    assert one(params, logits, tokens=(5, 6), prompt=1) == 2
    assert one(params, logits, tokens=(5, 6, 6), prompt=1) == 1
    assert one(greedy(min_tokens=2, stop_token_ids=[30], ignore_eos=True), logits, tokens=(5, 6), prompt=1) == 1


def test_unusable_logits_fail_their_row_alone() -> None:
    logits = make_logits(6, seed=2)
    params = [greedy(), random(seed=4), greedy(allowed_token_ids=[0], min_tokens=1), random(seed=6, top_p=0.5), random(seed=7), greedy()]
    bench = Bench(params, [[5, 6]] * 6, [2] * 6)
    clean = bench.sample(logits)
    assert clean.valid.tolist() == [True, True, False, True, True, True]
    broken = logits.clone()
    broken[0, 600] = torch.nan
    broken[1, 0] = torch.nan
    broken[3, 5] = torch.inf
    sampled = bench.sample(broken)
    assert sampled.valid.tolist() == [False, False, False, False, True, True]
    assert sampled.tokens[4:].tolist() == clean.tokens[4:].tolist()
    assert bool(((sampled.tokens >= 0) & (sampled.tokens < VOCAB)).all())


def test_leaving_a_slot_forgets_its_request() -> None:
    state = SamplerState(2, CPU)
    state.enter([slot_init(1, [5], [1], sampling=greedy(logit_bias={3: 50.0}, prompt_logprobs=2))])
    assert state.features[1]
    assert state.wants_prompt_logprobs[1]
    state.leave(np.asarray([1], np.int32))
    assert not state.features[1]
    assert not state.wants_prompt_logprobs[1]
    assert state.records[1].bias_ids is None
