"""Whether small sums go another way than NCCL: all ranks decide alike, whichever of them has a reason against it, and at which step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo.errors import ConfigError
from octavo.parallel import symmetric
from octavo.parallel.distributed import DistributedGroup, Library
from octavo.parallel.small_sums import Verdict, off, try_out
from octavo.parallel.sum_table import ASSUMED, Limits, limits
from octavo.parallel.symmetric import ALIGNMENT, RANKS, Signals, SymmetricSums, choose
from octavo.protocol.boot import NO_MULTICAST, child_environment

STEPS = ("unusable", "open", "test")


class Everybody:
    """`smallest` over threads: each call waits for all. A rank that does not come is an error, not a hang."""

    def __init__(self, ranks: int) -> None:
        self._numbers = [0] * ranks
        self._barrier = threading.Barrier(ranks, timeout=10)
        self._local = threading.local()

    def as_rank(self, rank: int) -> Callable[[int], int]:
        def smallest(number: int) -> int:
            self._numbers[rank] = number
            self._barrier.wait()
            least = min(self._numbers)
            self._barrier.wait()
            return least

        return smallest


class Scripted:
    """Fails at a step, by words or by raising."""

    described = "two cans and a string"

    def __init__(self, fails: str | None = None, error: BaseException | None = None) -> None:
        self.fails = fails
        self.error = error
        self.called: list[str] = []

    def _step(self, name: str) -> str | None:
        self.called.append(name)
        if self.fails != name:
            return None
        if self.error is not None:
            raise self.error
        return f"no {name}"

    def unusable(self) -> str | None:
        return self._step("unusable")

    def open(self) -> str | None:
        return self._step("open")

    def test(self, seconds: float) -> str | None:
        assert seconds == 2.0
        return self._step("test")

    def close(self) -> None:
        self.called.append("close")

    def abandon(self) -> None:
        self.called.append("abandon")

    def sum(self, x: torch.Tensor) -> torch.Tensor | None:
        return 2 * x if x.numel() == 4 else None


def verdicts(*candidates: Scripted) -> list[Verdict]:
    everybody = Everybody(len(candidates))
    with ThreadPoolExecutor(len(candidates)) as pool:
        return list(pool.map(lambda r: try_out(candidates[r], everybody.as_rank(r)), range(len(candidates))))


def test_what_passes_everywhere_is_used_everywhere() -> None:
    candidates = Scripted(), Scripted(), Scripted()
    for candidate, verdict in zip(candidates, verdicts(*candidates), strict=True):
        assert verdict.small is candidate
        assert verdict.words.startswith("two cans and a string; self-test passed in 0.")
        assert candidate.called == list(STEPS)


@pytest.mark.parametrize("error", [None, RuntimeError("no peer access\nand a long story"), KeyError()])
@pytest.mark.parametrize("step", STEPS)
def test_one_rank_that_fails_at_any_step_is_enough_for_all(step: str, error: Exception | None) -> None:
    well, ill = Scripted(), Scripted(step, error)
    theirs, own = verdicts(well, ill)
    assert theirs.small is own.small is None
    assert theirs.words == "NCCL for all sizes: another rank cannot use symmetric memory"
    assert (
        own.words
        == f"NCCL for all sizes: {f'no {step}' if error is None else 'RuntimeError: no peer access' if error.args else 'KeyError: no message'}"
    )
    # Nobody goes on to a step that waits for the one that failed.
    assert well.called == ill.called == [*STEPS[: STEPS.index(step) + 1], "close"]


def test_what_takes_the_rest_is_named() -> None:
    assert try_out(Scripted("test"), lambda number: number, otherwise="pigeons").words == "pigeons for all sizes: no test"
    assert off("asked for", "pigeons").words == "pigeons for all sizes: asked for"


def test_a_gpu_that_is_lost_is_no_fall_back() -> None:
    with pytest.raises(ConfigError, match="cannot be ended"):
        try_out(Scripted("test", ConfigError("cannot be ended")), lambda number: number)


def test_a_group_asks_the_quick_way_first_and_takes_the_other_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: list[int] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x, group: slow.append(x.numel()))
    small, library = Scripted(), Library(None)
    group = DistributedGroup(library, 0, 2, small=small)
    four, five = torch.ones(4), torch.ones(5)
    assert torch.equal(group.sum(four), torch.full((4,), 2.0))
    assert group.sum(five) is five
    assert slow == [5]
    assert DistributedGroup(library, 0, 2).sum(four) is four
    assert slow == [5, 4]
    assert DistributedGroup(library, 0, 1, small=Scripted()).sum(four) is four
    group.abandon()
    group.close()
    assert small.called == ["abandon", "close"]


TABLE = Limits(one_shot=1024, two_shot=4096)


@pytest.mark.parametrize(
    ("nbytes", "dtype", "method"),
    [
        (16, torch.bfloat16, "one_shot"),
        (1024, torch.float32, "one_shot"),
        (1024 + 64, torch.bfloat16, "two_shot"),
        (4096, torch.float32, "two_shot"),
        (4096 + 64, torch.float32, None),
        (2048 + 16, torch.float32, None),  # four ranks cannot share it equally
        (0, torch.float32, None),
        (8, torch.bfloat16, None),
        (1000, torch.float32, None),
        (64, torch.float16, None),  # the kernels do not add it
        (64, torch.int32, None),
    ],
)
def test_the_size_says_which_way(nbytes: int, dtype: torch.dtype, method: str | None) -> None:
    assert choose(TABLE, nbytes, dtype, 4) == method
    assert choose(None, nbytes, dtype, 4) is None


def test_the_table_is_of_sizes_that_all_can_share() -> None:
    assert set(ASSUMED) == set(RANKS)
    for ranks, given in ASSUMED.items():
        assert 0 < given.one_shot <= given.two_shot
        for nbytes in (given.one_shot // 2, given.one_shot, given.two_shot):
            assert nbytes % (ALIGNMENT * ranks) == 0
            assert choose(given, nbytes, torch.bfloat16, ranks) is not None
    assert limits("a card that nobody has measured", 4) == ASSUMED[4]
    assert limits("a card that nobody has measured", 3) is None


def unusable(size: int, hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> str | None:
    everybody = Everybody(len(hosts))
    here = threading.local()
    monkeypatch.setattr("octavo.parallel.symmetric._host_id", lambda: bytes([here.host]))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: type("P", (), {"name": "Old", "major": 7, "minor": 5}))

    def ask(rank: int) -> str | None:
        here.host = hosts[rank]
        group = type("G", (), {"group_name": "0"})()
        return SymmetricSums(
            group, rank, size, torch.device("cuda", rank), reference=lambda x: x, smallest=everybody.as_rank(rank)
        ).unusable()

    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = set(pool.map(ask, range(len(hosts))))
    assert len(answers) == 1
    return answers.pop()


def test_several_hosts_many_gpus_and_old_ones_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unusable(2, [1, 2], monkeypatch) == "the ranks that share layers are on several hosts"
    assert unusable(3, [1, 1, 1], monkeypatch) == "symmetric memory is for 2, 4, 8 GPUs, not 3"
    assert unusable(2, [1, 1], monkeypatch) == "Old is older than compute capability 8.0"


def test_turned_off_is_said() -> None:
    assert off("--disable-custom-all-reduce") == Verdict(None, "NCCL for all sizes: --disable-custom-all-reduce")


class Operations:
    """torch's operations on symmetric memory, as a rank sees them whose only peer has ones everywhere."""

    def __init__(self) -> None:
        self.called: list[tuple[str, int]] = []

    def one_shot_all_reduce_copy_out(self, shared: torch.Tensor, x: torch.Tensor, op: str, name: str, out: torch.Tensor) -> None:
        assert (op, name) == ("sum", "a group")
        assert shared.shape == x.shape == out.shape  # the kernel refuses anything else
        assert shared.dtype == x.dtype == out.dtype
        assert shared.data_ptr() % ALIGNMENT == x.data_ptr() % ALIGNMENT == 0
        self.called.append(("one_shot", x.nbytes))
        shared.copy_(x)
        out.copy_(shared + 1)

    def two_shot_all_reduce_out(self, shared: torch.Tensor, op: str, name: str, out: torch.Tensor) -> None:
        assert (op, name) == ("sum", "a group")
        assert shared.shape == out.shape
        self.called.append(("two_shot", shared.nbytes))
        out.copy_(shared + 1)


def test_sums_leave_what_they_add_and_come_in_the_callers_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = Operations()
    monkeypatch.setattr("octavo.parallel.symmetric.torch.ops.symm_mem", operations, raising=False)
    group = type("G", (), {"group_name": "a group"})()
    sums = SymmetricSums(group, 0, 2, torch.device("cpu"), reference=lambda x: x, smallest=lambda n: n, limits=TABLE)
    buffer = torch.zeros(TABLE.two_shot, dtype=torch.uint8)
    sums._views = {dtype: buffer.view(dtype) for dtype in (torch.bfloat16, torch.float32)}
    small, large = torch.randn(2, 64), torch.randn(8, 64).bfloat16().repeat(1, 2)
    odd = torch.randn(65)[1:]
    assert odd.data_ptr() % ALIGNMENT
    for x in (small, large, odd):
        before = x.clone()
        total = sums.sum(x)
        assert total is not None
        assert torch.equal(total, x + 1)
        assert torch.equal(x, before)
        assert total.data_ptr() not in (x.data_ptr(), buffer.data_ptr())  # the buffer is everybody's, and soon holds the next
    assert sums.sum(torch.zeros(8, 1024)) is None
    assert operations.called == [("one_shot", 512), ("two_shot", 2048), ("one_shot", 256)]
    assert sums.described == "symmetric memory in one shot up to 1 KiB, in two shots up to 4 KiB, NCCL above"


def test_a_process_that_has_shared_memory_before_and_a_new_one_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In threads for ranks, of which the first has had engines before."""
    here, made, everybody = threading.local(), list[tuple[int, int]](), Everybody(2)

    class Shared:
        @property
        def times(self) -> int:
            return int(here.times)

    def share(nbytes: int, group: int, device: torch.device) -> None:
        made.append((group, nbytes))
        here.times += 1

    monkeypatch.setattr(symmetric, "_Shared", Shared())
    monkeypatch.setattr(symmetric, "share", share)

    def rank(number: int) -> int:
        for times in ((3, 0), (2, 2)):
            here.times = times[number]
            symmetric.catch_up(everybody.as_rank(number), lambda: number, torch.device("cpu"))
        return int(here.times)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [2, 2]
    assert made == [(1, ALIGNMENT)] * 3


class Pads:
    """Two ranks' pads, as the handle of one shows them."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.pads = [torch.zeros(8, dtype=torch.int32) for _ in range(2)]

    def get_signal_pad(self, rank: int) -> torch.Tensor:
        return self.pads[rank]


@pytest.mark.parametrize("itself", [False, True])
def test_kernels_that_wait_for_a_lost_rank_are_let_go(itself: bool) -> None:
    """Whether they signal to themselves, as sums do, or do not, as barriers: many, one after the other."""
    pads = Pads()
    signals = Signals(pads, torch.device("cpu"))
    ended = threading.Event()

    def kernels() -> None:
        def becomes(pad: torch.Tensor, at: int, before: int, after: int) -> None:
            deadline = time.monotonic() + 20
            while int(pad[at]) != before:
                assert time.monotonic() < deadline
                time.sleep(1e-5)
            pad[at] = after

        for _ in range(20):
            for other in (0, 1) if itself else (1,):
                becomes(pads.pads[other], 0, 0, 1)
                becomes(pads.pads[0], other, 1, 0)
        ended.set()

    thread = threading.Thread(target=kernels, daemon=True)
    thread.start()
    assert not ended.wait(0.2)
    signals.let_go_for_good()
    assert ended.wait(20)
    signals.close()


def test_processes_that_are_started_use_no_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    environment = child_environment()
    assert {name: environment[name] for name in NO_MULTICAST} == NO_MULTICAST
    assert NO_MULTICAST == {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
