"""Packed weights in a shared file: the same panels as in private memory, whatever state the file, the disk or the checkpoint is in."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.ops.cpu import abi, held_file, panel_file, panels
from octavo.ops.cpu.held_file import Region, Sound
from octavo.ops.packed import EncodedRows, Panels, Unread
from tests.support.encoded_rows import random_rows
from tests.support.leases import leases_work

if abi.library() is None:
    pytest.skip("the compiled kernels were not built", allow_module_level=True)

HEADER = 64
ROWS = [random_rows("Q4_1", 40, 64, 1), random_rows("Q8_0", 17, 32, 2), random_rows("F16", 5, 32, 3)]
ROWS.append(EncodedRows("Q4_1", (40, 64), ROWS[0].data, np.random.default_rng(0).permutation(40)))


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(panel_file, "MIN_BYTES", 1)
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(HEADER) + bytes(100_000))
    return path


def load(checkpoint: Path, rows: list[EncodedRows] = ROWS) -> tuple[list[Panels], int]:
    """The panels, and how many of them had to be packed."""
    packed: list[EncodedRows] = []

    def pack(asked: EncodedRows, place: object) -> Panels:
        packed.append(asked)
        return panels.pack_rows(asked, place)  # type: ignore[arg-type]

    folder = checkpoint.with_name("packed")
    with panel_file.panel_file(folder, str(checkpoint), HEADER, pack, panels.packed_bytes) as pack_rows:
        return [pack_rows(r) for r in rows], len(packed)


def files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.with_name("packed").glob("*"))


def assert_right(found: list[Panels], rows: list[EncodedRows] = ROWS) -> None:
    for got, asked in zip(found, rows, strict=True):
        expected = panels.pack_rows(asked)
        assert (got.kind, got.rows) == (expected.kind, expected.rows)
        assert np.array_equal(got.data, expected.data)


def is_mapped(got: Panels, path: Path) -> bool:
    """Whether the panel is a piece of that file in memory that cannot be written."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_, name = line.split(maxsplit=5)
        start, stop = (int(n, 16) for n in span.split("-"))
        if start <= got.data.ctypes.data < stop:
            return rights == "r--s" and name.strip() == str(path)
    return False


def test_the_second_load_packs_nothing_and_both_map_the_file(checkpoint: Path) -> None:
    first, packed = load(checkpoint)
    assert packed == len(ROWS)
    (path,) = files(checkpoint)
    second, packed = load(checkpoint)
    assert packed == 0
    assert_right(first), assert_right(second)
    for got in (*first, *second):
        assert is_mapped(got, path) == leases_work(checkpoint.parent)
        assert got.data.ctypes.data % panel_file.ALIGNMENT == 0


def test_rows_that_had_to_be_unpacked_stay_private_and_void_nothing(checkpoint: Path) -> None:
    rows = [ROWS[0], replace(random_rows("F16", 48, 64, 5), unpacked=True), *ROWS[1:]]
    for expected in (len(rows), 1, 1):
        found, packed = load(checkpoint, rows)
        assert packed == expected
        assert_right(found, rows)
        (path,) = files(checkpoint)
        mapped = leases_work(checkpoint.parent)
        assert [is_mapped(got, path) for got in found] == [mapped, False, *(mapped for _ in ROWS[1:])]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def no_header(path: Path) -> None:
    path.write_bytes(bytes(panel_file.HEADER_BYTES) + path.read_bytes()[panel_file.HEADER_BYTES :])


def other_index(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"count": 40', b'"count": 41'))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(10_000))


def one_bit_of_the_weights(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[panel_file.HEADER_BYTES + 300] ^= 4
    path.write_bytes(data)


def a_page_of_zeros(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(panel_file.HEADER_BYTES)
        file.write(bytes(1000))


@pytest.mark.parametrize("damage", [truncate, grow, no_header, other_index, empty, noise, one_bit_of_the_weights, a_page_of_zeros])
def test_a_damaged_file_is_replaced_with_one_line(
    checkpoint: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    load(checkpoint)
    (path,) = files(checkpoint)
    damage(path)
    found, packed = load(checkpoint)
    assert packed == len(ROWS)
    assert_right(found)
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert str(path) in line and "packed anew" in line
    assert load(checkpoint)[1] == 0


@pytest.mark.parametrize("damage", [truncate, empty, noise, one_bit_of_the_weights])
@pytest.mark.parametrize("which", ["the writer", "a reader"])
def test_a_file_that_is_changed_while_in_use_changes_nothing(checkpoint: Path, damage: Callable[[Path], None], which: str) -> None:
    found, _ = load(checkpoint)
    if which == "a reader":
        found, packed = load(checkpoint)
        assert packed == 0
    (path,) = files(checkpoint)
    damage(path)
    assert_right(found)
    assert not any(is_mapped(got, path) for got in found)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [a_pipe, a_link_to_a_device])
def test_what_is_no_regular_file_holds_up_no_start(checkpoint: Path, put: Callable[[Path], None]) -> None:
    load(checkpoint)
    (path,) = files(checkpoint)
    path.unlink()
    put(path)
    put(path.with_name("other.panels"))
    found, packed = load(checkpoint)
    assert packed == len(ROWS)
    assert_right(found)
    assert path.is_file() and not path.is_symlink(), "it was replaced"
    assert path.with_name("other.panels") in files(checkpoint), "not ours"
    assert load(checkpoint)[1] == 0


def test_panels_know_whether_they_are_still_what_they_were(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process asks that was stopped for so long that the file may have been changed under it."""
    asked: list[Callable[[np.ndarray], bool]] = []  # type: ignore[type-arg]

    def hold(path: str, size: int, region: Region | None = None, sound: Sound | None = None) -> Region:
        assert sound is not None
        asked.append(sound)
        return held_file.hold(path, size, region, sound)

    monkeypatch.setattr(panel_file, "hold", hold)
    load(checkpoint)
    load(checkpoint)
    assert len(asked) == 2, "who writes it, and who finds it"
    (path,) = files(checkpoint)
    data = np.fromfile(path, np.uint8)
    assert [sound(data) for sound in asked] == [True, True]
    data[panel_file.HEADER_BYTES + 300] ^= 4
    assert [sound(data) for sound in asked] == [False, False]


def test_panels_of_a_checkpoint_that_changed_meanwhile_are_not_kept(checkpoint: Path) -> None:
    """It may be put back later, with its old time."""

    def pack(rows: EncodedRows, place: object) -> Panels:
        os.utime(checkpoint, ns=(0, 0))
        return panels.pack_rows(rows, place)  # type: ignore[arg-type]

    folder = checkpoint.with_name("packed")
    with panel_file.panel_file(folder, str(checkpoint), HEADER, pack, panels.packed_bytes) as pack_rows:
        assert_right([pack_rows(r) for r in ROWS])
    assert files(checkpoint) == []


def test_rows_that_are_packed_already_are_not_read(checkpoint: Path) -> None:
    read: list[int] = []

    def unread(i: int) -> EncodedRows:
        return replace(ROWS[i], data=Unread(ROWS[i].data.shape, lambda: read.append(i) or ROWS[i].bytes()))  # type: ignore[func-returns-value, arg-type]

    for packed in (len(ROWS), 0):
        found, count = load(checkpoint, [unread(i) for i in range(len(ROWS))])
        assert count == packed
        assert_right(found)
        assert read == list(range(len(ROWS)))


def test_flipped_bytes_are_noticed_or_harmless(checkpoint: Path) -> None:
    load(checkpoint)
    (path,) = files(checkpoint)
    good = path.read_bytes()
    index = good.rindex(b"[{")
    generator = np.random.default_rng(1)
    places = [
        generator.integers(first, end, 40).tolist() for first, end in ((0, 600), (panel_file.HEADER_BYTES, index), (index, len(good)))
    ]
    for place in itertools.chain.from_iterable(places):
        path.write_bytes(good[:place] + bytes([good[place] ^ (1 << int(generator.integers(8)))]) + good[place + 1 :])
        assert_right(load(checkpoint)[0])


@pytest.mark.parametrize("change", ["time", "size", "layout", "header"])
def test_another_state_of_the_checkpoint_or_the_layout_gets_a_file_of_its_own(
    checkpoint: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(checkpoint)
    (before,) = files(checkpoint)
    status = checkpoint.stat()
    if change == "time":
        os.utime(checkpoint, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    elif change == "size":
        os.truncate(checkpoint, status.st_size + 1)
    elif change == "header":
        checkpoint.write_bytes(b"!" + checkpoint.read_bytes()[1:])
        os.utime(checkpoint, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        monkeypatch.setattr(panel_file, "LAYOUT", 999)
    found, packed = load(checkpoint)
    assert packed == len(ROWS)
    assert_right(found)
    assert before not in files(checkpoint) or change == "header", "what is out of date is removed"


def test_code_that_asks_for_other_rows_packs_them(checkpoint: Path) -> None:
    load(checkpoint)
    other = [ROWS[0], ROWS[2], ROWS[3]]
    found, packed = load(checkpoint, other)
    assert packed == 2
    assert_right(found, other)
    assert files(checkpoint) == [], "the next start writes it anew"
    assert load(checkpoint, other)[1] == 3
    assert load(checkpoint, other)[1] == 0


def test_a_load_that_fails_leaves_nothing(checkpoint: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        load(checkpoint, [ROWS[0], 1 / 0])  # type: ignore[list-item]

    def pack(rows: EncodedRows, place: object) -> Panels:
        raise ValueError("damaged")

    folder = checkpoint.with_name("packed")
    with (
        pytest.raises(ValueError, match="damaged"),
        panel_file.panel_file(folder, str(checkpoint), HEADER, pack, panels.packed_bytes) as pack_rows,
    ):
        pack_rows(ROWS[0])
    assert files(checkpoint) == []


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_weights_that_are_no_numbers_are_not_kept(checkpoint: Path, kind: str, number: str) -> None:
    rows = random_rows(kind, 17, 32, 2)
    rows.data[16, :2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)
    found, _ = load(checkpoint, [ROWS[0], rows])
    assert [got.finite for got in found] == [True, False]
    assert_right(found, [ROWS[0], rows])
    assert files(checkpoint) == []


def test_no_room_or_no_rights_means_private_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for function in ("posix_fallocate", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, full)
            assert_right(load(checkpoint)[0])
            assert files(checkpoint) == []
    checkpoint.with_name("packed").rmdir()
    checkpoint.with_name("packed").write_text("a file where the folder should be")
    assert_right(load(checkpoint)[0])


def test_small_checkpoints_and_more_room_than_thought(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels that do not fit into the file's room stay private; a checkpoint that packs in no time gets no file."""
    checkpoint.write_bytes(bytes(HEADER + 1000))
    found, packed = load(checkpoint)
    assert packed == len(ROWS)
    assert_right(found)
    assert_right(load(checkpoint)[0])
    monkeypatch.setattr(panel_file, "MIN_BYTES", 10_000)
    for path in files(checkpoint):
        path.unlink()
    assert_right(load(checkpoint)[0])
    assert files(checkpoint) == []
