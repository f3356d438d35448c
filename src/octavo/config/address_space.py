"""The limit that a user sets on a process's address space (`ulimit -v`), which every process that it starts inherits.

It counts what is mapped, touched or not: libraries, stacks of threads, files. So a process reaches it long before it has used so much
memory, and what fails then may be anything: a library that cannot be loaded, a thread that does not start, a list that does not grow. This
module knows the limit, what fails because of it, and how to say so. Importing it costs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable

from octavo.config.sizes import format_bytes
from octavo.errors import NO_MEMORY

_M_ARENA_MAX = -8

BYTES_A_TOKEN = 1700
"""What the grammar engine keeps for a token of a vocabulary, from above: 1,250 of 49,000 tokens, 1,650 of 150,000 longer ones."""


def limit() -> int | None:
    """Bytes; None: there is no limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def used() -> int:
    """Bytes of this process's address space; 0 where the system does not say."""
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def lacks(needed: int) -> bool:
    """Whether less than `needed` bytes of addresses are left. Never where there is no limit. Takes some 30 us where there is one.

    To be asked before anything that cannot be told of a refusal: a library that ends the process then, or a thread, which Python waits for
    forever if it finds no memory for its first step (`threading.Thread.start`).
    """
    most = limit()
    return most is not None and most - used() + _heap()() < needed


@functools.cache
def _heap() -> Callable[[], int]:
    """Bytes that were given back to the C library, which still has their addresses; none where it does not say. See mallinfo(3)."""
    import ctypes

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    shape = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return lambda: 0
    ask.restype = shape
    return lambda: int(ask().fordblks)


def be_frugal() -> None:
    """Where there is a limit: take no more addresses than needed. To be called before a process has threads, and before NumPy is imported.

    The C library gives each thread that allocates 64 MiB of addresses to begin with, and NumPy's library for matrices, which is not used,
    takes 32 MiB a core. Processes that are started later inherit what is set here.
    """
    if limit() is None:
        return
    import ctypes

    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with contextlib.suppress(OSError, AttributeError):  # of another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, int(os.environ["MALLOC_ARENA_MAX"]) if os.environ["MALLOC_ARENA_MAX"].isdigit() else 1)


_REFUSALS = ("start new thread", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What threads, the CUDA driver (Triton's and torch's words), and cuBLAS say."""


def is_refusal(error: BaseException) -> bool:
    """Whether something failed because the system gives no more memory, or no more addresses."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    words = str(error)
    if isinstance(error, ImportError | OSError):
        return "annot allocate memory" in words or "failed to map segment" in words
    if not isinstance(error, RuntimeError):
        return False
    if "could not create a primitive" in words:  # all that oneDNN says, whatever the reason
        return limit() is not None
    return any(of in words for of in _REFUSALS) or ("alloc" in words and "memory" in words)


def why_ended(error: Exception, otherwise: str) -> str:
    """What a request hears of an error that ends it."""
    return NO_MEMORY if is_refusal(error) else otherwise


def told(what: str) -> str:
    """A sentence about something for which there was not enough memory.

    Args:
        what: as in "there is not enough memory to load the model".
    """
    if (most := limit()) is None:
        return f"There is not enough memory {what}. Free some, or raise the limit of the container."
    return (
        f"There is not enough memory {what}: the address space of each process is limited to {format_bytes(most)} (ulimit -v). "
        "Raise that limit; it counts what is mapped, which is more than what is used."
    )
