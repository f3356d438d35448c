"""A room of `octavo.frontend.jobs` for tests: jobs that wait, work, fill memory, die or answer."""

from __future__ import annotations

import os
import time


def open_room(setup: bytes) -> object:
    if setup == b"broken":
        raise RuntimeError("no such room")

    def answer(job: bytes) -> bytes:
        what, _, number = job.partition(b" ")
        if what == b"sleep":
            time.sleep(float(number))
        elif what == b"work":
            end = time.process_time() + float(number)
            while time.process_time() < end:
                pass
        elif what == b"fill":
            return str(len(bytearray(int(number)))).encode()
        elif what == b"die":
            os._exit(1)
        elif what == b"nice":
            return str(os.nice(0)).encode()
        return setup + job

    return answer
