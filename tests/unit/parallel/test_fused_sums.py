"""Which sums go with the norm behind them in one kernel, and what happens when a rank does not come. The kernel: tests/ops/cuda."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.errors import EngineDead
from octavo.models.loader import normed_rows
from octavo.ops.cuda import sum_norm
from octavo.ops.cuda.sum_norm import Form, Place, Region
from octavo.parallel.distributed import DistributedGroup, Library
from octavo.parallel.fused_sums import FusedSums
from octavo.parallel.group import ALONE, Rows
from octavo.parallel.sum_table import ASSUMED, ASSUMED_FUSED, MEASURED_FUSED, FusedLimits, fused_limits
from tests.support.engine_configs import engine_config

DIM, LIMITS = 64, FusedLimits(words=512, one_shot=1024, most=4096)
"""Rows of 128 bytes: 4, 8 and 32 of them."""


class Launches:
    def __init__(self) -> None:
        self.forms: list[tuple[Form, int]] = []

    def __call__(self, form: Form, device: torch.device, arguments: ctypes.Structure, rows: int) -> None:
        assert (arguments.rows, arguments.rank) == (rows, 1)  # type: ignore[attr-defined]
        self.forms.append((form, rows))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launched = Launches()
    monkeypatch.setattr(sum_norm, "launch", launched)
    return launched


def opened(size: int = 4) -> FusedSums:
    """As after `open`, without GPUs."""
    device = torch.device("cpu")
    rows = Rows(DIM, torch.bfloat16, patience=30.0)
    sums = FusedSums(None, 1, size, device, rows, reference=lambda x: x, first=4, limits=LIMITS)  # type: ignore[arg-type]
    words = Region(0, 2 * 2 * DIM, size, 4)
    sums._regions = {True: words, False: Region(words.end, 2 * DIM, size, 32)}
    sums._place = Place(1, tuple(range(0, 16 * size, 16)), torch.zeros(33, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    return sums


def join(sums: FusedSums, rows: int, **more: Any) -> object:
    x = torch.zeros(rows, more.pop("dim", DIM), dtype=more.pop("dtype", torch.bfloat16))
    return sums.add_norm(x, x.clone(), x.new_ones(x.shape[1], **more), 1e-5)


def test_rows_say_how_they_go(launches: Launches) -> None:
    sums = opened()
    for rows in (1, 4, 5, 8, 9, 32):
        assert join(sums, rows) is not None
    ways = [(form.words, form.two_shots, rows) for form, rows in launches.forms]
    assert ways == [(True, False, 1), (True, False, 4), (False, False, 5), (False, False, 8), (False, True, 9), (False, True, 32)]
    assert sums.described == "with the norm behind it in one kernel up to 4 KiB"
    assert sorted({(way.form.words, way.form.two_shots) for way in sums._ways()}) == [(False, False), (False, True), (True, False)]
    assert sums._sizes() == [1, 4, 5, 8, 9, 32]


def test_a_row_is_not_divided_between_more_ranks_than_there_are_rows(launches: Launches) -> None:
    sums = opened()
    sums._limits = FusedLimits(words=512, one_shot=0, most=4096)
    for rows in (3, 4):
        join(sums, rows)
    assert [form.two_shots for form, _ in launches.forms] == [False, True]


@pytest.mark.parametrize(
    "case", [{"rows": 33}, {"rows": 0}, {"rows": 2, "dim": 128}, {"rows": 2, "dtype": torch.float32}, {"rows": 2, "dtype": torch.float16}]
)
def test_others_go_another_way(case: dict[str, Any], launches: Launches) -> None:
    assert join(opened(), **case) is None
    assert not launches.forms


def test_a_weight_of_another_type_goes_another_way(launches: Launches) -> None:
    x = torch.zeros(2, DIM, dtype=torch.bfloat16)
    assert opened().add_norm(x, x.clone(), torch.ones(DIM), 1e-5) is None
    assert not launches.forms


def test_what_is_not_there_yet_is_not_used(launches: Launches) -> None:
    sums = opened()
    sums.close()
    assert join(sums, 2) is None
    sums.check()


def test_a_rank_that_did_not_come_is_named_by_its_number_among_all() -> None:
    sums = opened()
    group = DistributedGroup(Library(None), 1, 4, fused=sums)
    group.check()
    assert sums._place is not None
    sums._place.missing[0] = 1 + 2
    with pytest.raises(EngineDead, match=r"^Rank 6 did not take part in a sum over GPUs for 30 s\.$"):
        group.check()


def test_groups_without_it_leave_it_to_the_kernels_apart(launches: Launches) -> None:
    x = torch.zeros(2, DIM, dtype=torch.bfloat16)
    assert ALONE.add_norm(x, x, x[0], 1e-5) is None
    plain = DistributedGroup(Library(None), 1, 4)
    assert plain.add_norm(x, x, x[0], 1e-5) is None
    plain.check()
    fused = DistributedGroup(Library(None), 1, 4, fused=opened())
    assert fused.add_norm(x, x, x[0], 1e-5) == (x, x)
    assert len(launches.forms) == 1


def test_cpus_have_none() -> None:
    words = FusedSums(
        None,  # type: ignore[arg-type]
        0,
        2,
        torch.device("cpu"),
        Rows(DIM, torch.bfloat16, 1.0),
        reference=lambda x: x,
    ).unusable()
    assert words == "its kernel is for Hopper GPUs, and needs NVRTC"


def test_the_table_is_in_order() -> None:
    assert set(ASSUMED_FUSED) == set(ASSUMED)
    for given in (*ASSUMED_FUSED.values(), *MEASURED_FUSED.values()):
        assert given is None or (0 <= given.words <= given.most and 0 <= given.one_shot <= given.most)
    assert fused_limits("a card that nobody has measured", 4) == ASSUMED_FUSED[4]
    assert fused_limits("a card that nobody has measured", 3) is None


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_models_whose_norms_are_elsewhere_do_without() -> None:
    def rows(tensor: int = 2, *, batch_invariant: bool = False, **more: Any) -> Rows | None:
        hf_config = {**LLAMA, **more}
        config = engine_config(hf_config=hf_config, architecture=hf_config["architectures"][0], dtype="bfloat16", vocab_size=64)
        return normed_rows(replace(config, parallel=replace(config.parallel, tensor=tensor), batch_invariant=batch_invariant))

    found = rows()
    assert found is not None
    assert (found.dim, found.dtype) == (32, torch.bfloat16)
    assert found.patience == engine_config(hf_config=LLAMA).reliability.hang_timeout / 2
    assert rows(tensor=1) is None
    assert rows(batch_invariant=True) is None
    assert rows(architectures=["GraniteForCausalLM"], residual_multiplier=0.5) is None
    assert rows(architectures=["Olmo2ForCausalLM"]) is None
