"""The kernel that adds up over GPUs, on a CPU: each rank is a thread, whose memory the others write into."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from octavo.ops.cuda.sum_norm import DTYPES, Form, Place, Region, arguments, grid_of, packed, source, takes
from octavo.ops.reference.norm import rms_norm
from tests.support.cuda_emulator import COMPILER, MACHINE, emulated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

EPS = 1e-5
CAPACITY = 6
PATIENCE = 60.0


@dataclass
class Rank:
    """A GPU: its memory, and its copy of the stream."""

    place: Place
    residual: torch.Tensor

    def sum(self, form: Form, region: Region, x: torch.Tensor, weight: torch.Tensor, sms: int, patience: float = PATIENCE) -> torch.Tensor:
        out = torch.full_like(x, torch.nan)
        given = packed(form, region, self.place, x, self.residual[: len(x)], weight, out, EPS, patience, early=False)
        run = emulated(source(form, MACHINE.read_text()), "sum_norm", 0, copy=self.place.rank)
        run(given, *grid_of(form, len(x), sms))
        return out


class Gpus:
    def __init__(self, ranks: int, dtype: torch.dtype, dim: int, ways: tuple[tuple[bool, bool], ...]) -> None:
        self.forms = [Form(dtype, dim, ranks, words, two_shots) for words, two_shots in ways]
        words = Region(0, 2 * dim * dtype.itemsize, ranks, CAPACITY)
        plain = Region(words.end, dim * dtype.itemsize, ranks, CAPACITY)
        self.regions = {True: words, False: plain}
        self.memory = [torch.zeros(plain.end // 16 + 1, 4, dtype=torch.int32) for _ in range(ranks)]
        self.stream = torch.randn(CAPACITY, dim).to(dtype)
        self.weight = torch.randn(dim).to(dtype)
        addresses = tuple(memory.data_ptr() for memory in self.memory)
        self.ranks = [
            Rank(Place(r, addresses, torch.zeros(1 + CAPACITY, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)), self.stream.clone())
            for r in range(ranks)
        ]
        for form in self.forms:
            for rank in range(ranks):  # not while others wait
                emulated(source(form, MACHINE.read_text()), "sum_norm", 0, copy=rank)

    def sum(self, form: Form, rows: int, sms: int = 1) -> None:
        """All ranks together; compared with the sum in one place."""
        parts = [torch.randn(rows, form.dim).to(form.dtype) for _ in self.ranks]
        kept = [part.clone() for part in parts]
        with ThreadPoolExecutor(len(parts)) as pool:
            outs = list(
                pool.map(lambda r: self.ranks[r].sum(form, self.regions[form.words], parts[r], self.weight, sms), range(len(parts)))
            )
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        self.stream[:rows] = (total + self.stream[:rows].float()).to(form.dtype)
        expected = rms_norm(self.stream[:rows], self.weight, EPS)
        near = {"rtol": 1e-5, "atol": 1e-5} if form.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
        for rank, out in zip(self.ranks, outs, strict=True):
            assert torch.equal(rank.residual, self.stream)
            torch.testing.assert_close(out, expected, **near)
            assert torch.equal(out, outs[0])
            assert not rank.place.missing.item()
        assert all(torch.equal(part, was) for part, was in zip(parts, kept, strict=True))


WAYS = [(words, two_shots) for words in (True, False) for two_shots in (False, True)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_gives_the_sum_and_its_norm_on_all_ranks(ranks: int, dtype: torch.dtype) -> None:
    """In turns and with other rows each time, as steps have them: slots are used again."""
    torch.manual_seed(ranks)
    gpus = Gpus(ranks, dtype, 264, tuple(WAYS))
    for _ in range(2):
        for form in gpus.forms:
            for rows in (1, 5, 3):
                gpus.sum(form, rows)


def test_blocks_take_several_rows_and_threads_several_pieces() -> None:
    torch.manual_seed(0)
    gpus = Gpus(2, torch.bfloat16, 8960, tuple(WAYS))
    assert {(form.vectors, form.threads, form.blocks_an_sm) for form in gpus.forms} == {(2, 576, 1)}
    for form in gpus.forms:
        gpus.sum(form, CAPACITY, sms=4)


@pytest.mark.parametrize("way", WAYS)
def test_a_rows_bits_do_not_depend_on_the_others(way: tuple[bool, bool]) -> None:
    torch.manual_seed(3)
    gpus = Gpus(2, torch.bfloat16, 512, ((True, False), way))
    x = [torch.randn(CAPACITY, 512).bfloat16() for _ in range(2)]

    def normed(form: Form, row: slice) -> torch.Tensor:
        for rank in gpus.ranks:
            rank.residual = gpus.stream[row].clone()
        with ThreadPoolExecutor(2) as pool:
            outs = pool.map(lambda r: gpus.ranks[r].sum(form, gpus.regions[form.words], x[r][row].clone(), gpus.weight, 1), range(2))
        return next(outs)

    one, other = gpus.forms
    alone = torch.cat([normed(one, slice(row, row + 1)) for row in range(CAPACITY)])
    assert torch.equal(alone, normed(other, slice(0, CAPACITY)))


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_does_not_come_is_named_and_not_waited_for_again(way: tuple[bool, bool]) -> None:
    gpus = Gpus(3, torch.bfloat16, 128, (way,))
    form, first = gpus.forms[0], gpus.ranks[0]
    x, began = torch.randn(2, 128).bfloat16(), time.monotonic()
    with ThreadPoolExecutor(2) as pool:  # the third does not
        list(pool.map(lambda r: gpus.ranks[r].sum(form, gpus.regions[form.words], x.clone(), gpus.weight, 1, patience=0.3), range(2)))
    assert 0.3 <= time.monotonic() - began < 10
    assert first.place.missing.item() == 1 + 2
    assert first.place.epochs[0] == 1
    began = time.monotonic()
    first.sum(form, gpus.regions[form.words], x.clone(), gpus.weight, 1, patience=1000.0)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("way", WAYS)
def test_the_host_ends_what_waits(way: tuple[bool, bool]) -> None:
    gpus = Gpus(2, torch.bfloat16, 128, (way,))
    form, first = gpus.forms[0], gpus.ranks[0]
    with ThreadPoolExecutor(1) as pool:  # the second does not come
        waiting = pool.submit(first.sum, form, gpus.regions[form.words], torch.randn(2, 128).bfloat16(), gpus.weight, 1, 60.0)
        time.sleep(0.2)
        assert not waiting.done()
        first.place.epochs[:1].fill_(1)
        waiting.result(10)
    assert first.place.missing.item() == 0


@pytest.mark.parametrize(
    ("dtype", "dim", "taken"),
    [
        (torch.bfloat16, 4096, True),
        (torch.float32, 4096, True),
        (torch.float16, 8, True),
        (torch.bfloat16, 100, False),  # no whole pieces
        (torch.float32, 16384, True),
        (torch.float32, 16400, False),
        (torch.int32, 4096, False),
    ],
)
def test_what_rows_may_be(dtype: torch.dtype, dim: int, taken: bool) -> None:
    assert takes(dtype, dim) == taken


@pytest.mark.parametrize("dim", [8, 256, 264, 4096, 8192, 8200, 14336, 32768])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_cover_a_row(dtype: torch.dtype, dim: int) -> None:
    form = Form(dtype, dim, 2, True, False)
    if takes(dtype, dim):
        assert form.threads <= 1024 and form.threads % 32 == 0
        assert form.threads * (form.vectors - 1) < form.pieces <= form.threads * form.vectors


def test_slots_and_flags_lie_apart() -> None:
    region = Region(256, 512, ranks=2, rows=5)
    assert region.flags_at == 2 * 2 * 5 * 512
    assert region.end >= 256 + region.flags_at + 2 * 2 * 5 * 4
    assert (
        ctypes.sizeof(arguments(Form(torch.bfloat16, 64, 8, True, False)))
        == ctypes.sizeof(arguments(Form(torch.bfloat16, 64, 2, True, False))) + 48
    )
