"""The ring between an executor and its ranks: whatever is sent arrives, at every reader, in order, however small the ring is."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.executor.ring import RingReader, RingWriter, make_memory

SIZE = 1024


def ring(readers: int) -> tuple[RingWriter, list[RingReader]]:
    memory = make_memory(SIZE)
    pipes = [os.pipe() for _ in range(readers)]
    writer = RingWriter(memory, [write for _, write in pipes], SIZE)
    return writer, [RingReader(memory, i, read, SIZE) for i, (read, _) in enumerate(pipes)]


@pytest.mark.parametrize("readers", [1, 3])
def test_every_reader_gets_every_message(readers: int) -> None:
    rng = random.Random(1)
    sizes = [0, 1, SIZE // 2, SIZE // 2 + 1, SIZE - 1, SIZE, SIZE + 1, 5 * SIZE, *(rng.randrange(3 * SIZE) for _ in range(200))]
    messages = [rng.randbytes(size) for size in sizes]
    writer, ends = ring(readers)

    def read(end: RingReader) -> list[bytes | None]:
        got = []
        for _ in messages:
            got.append(end.receive())
            end.finished()
        return got

    with ThreadPoolExecutor(readers) as pool:
        results = [pool.submit(read, end) for end in ends]
        for message in messages:
            writer.send(message)
        assert all(result.result(30) == messages for result in results)
    assert [writer.taken(i) for i in range(readers)] == [len(messages)] * readers
    assert [writer.done(i) for i in range(readers)] == [len(messages)] * readers
    writer.close()
    assert ends[0].receive() is None


def test_a_full_ring_waits_for_the_slowest_reader() -> None:
    writer, (quick, slow) = ring(2)
    for _ in range(2):
        writer.send(b"x" * (SIZE // 2))
    sent = threading.Event()
    thread = threading.Thread(target=lambda: (writer.send(b"last"), sent.set()))
    thread.start()
    assert quick.receive() is not None
    assert not sent.wait(0.1)
    assert slow.receive() is not None
    assert sent.wait(5)
    thread.join()
    assert [slow.receive(), slow.receive()] == [b"x" * (SIZE // 2), b"last"]


def test_waiting_ends_when_there_is_a_reason() -> None:
    def gone() -> None:
        raise LookupError("rank 1 is gone")

    writer, _ = ring(1)
    writer.send(b"x" * (SIZE // 2))
    with pytest.raises(LookupError):
        writer.send(b"x" * SIZE, gone)
