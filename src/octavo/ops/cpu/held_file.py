"""Bytes of a file in memory that stay what they are, whatever happens to the file: written over, cut short, on a disk that fails.

Mapped pages are shared with every process that maps the file, but they are the file's: who writes into it writes into the weights of a
running model, and who cuts it short ends every process that touches what is gone (SIGBUS). So a file is only mapped under a lease. The
kernel holds whoever would change it back until we have let go, and a thread first puts a copy of our own where the mapped pages were, at
the same addresses. A process that was stopped for longer than the kernel waits may come too late: it compares what it has copied with what
there was, and ends if that is another. Where a lease cannot be had (the file is another user's, its file system knows none, somebody is writing into it), the
bytes are read into private memory at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import logging
import mmap
import os
import signal
import stat
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

_F_SETOWN_EX: Final = 15
_F_OWNER_TID: Final = 0
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value
_MOST_READ: Final = 1 << 30
"""Bytes of one read: the system takes no more than two of these."""


@functools.cache
def _system() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = library.mremap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _map(size: int, protection: int, flags: int, handle: int, address: int | None = None) -> int:
    found: int = _system().mmap(address, size, protection, flags | (0 if address is None else _MAP_FIXED), handle, 0)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), "cannot be mapped")
    return found


class Region:
    """Pages that are given back once nobody refers to them: arrays made from it do."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self._end = weakref.finalize(self, _system().munmap, address, size)
        self._end.atexit = False

    @classmethod
    def draft(cls, handle: int, size: int) -> Region:
        """Of a file that this process is writing: what is stored into the array goes there."""
        return cls(_map(size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, handle), size)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def array(self) -> npt.NDArray[np.uint8]:
        """[bytes], which keeps the region. Storing into pages that are not a draft's ends the process."""
        return np.asarray(self)

    def freeze(self) -> None:
        """From here on nobody stores anything here."""
        _system().mprotect(self.address, self.size, mmap.PROT_READ)

    def replace(self, handle: int, size: int) -> None:
        """Put a copy of the file's first `size` bytes where the pages are. Who reads them meanwhile finds either.

        Raises:
            OSError, ValueError: no memory for them, or the file does not have them; the pages are as before.
        """
        copy = _private(handle, size)
        if _system().mremap(copy, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, self.address) == _FAILED:
            number = ctypes.get_errno()
            _system().munmap(copy, size)
            raise OSError(number, "a copy cannot take the place of the mapped file")


def _private(handle: int, size: int) -> int:
    """The address of a copy that cannot be written."""
    address = _map(size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        memory, done = memoryview((ctypes.c_uint8 * size).from_address(address)), 0
        while done < size:
            count = os.preadv(handle, [memory[done : done + _MOST_READ]], done)
            if count == 0:
                raise ValueError("the file is not as long as it should be")
            done += count
    except BaseException:
        _system().munmap(address, size)
        raise
    _system().mprotect(address, size, mmap.PROT_READ)
    return address


Sound = Callable[[npt.NDArray[np.uint8]], bool]
"""Whether the bytes of a file are what they were when it was opened."""


def open_file(path: str) -> int:
    """A handle to read a regular file through. Anything else may wait for ever for somebody to write, or do something when opened.

    Raises:
        OSError, ValueError: it is not there, or is none.
    """
    regular = stat.S_ISREG(os.stat(path).st_mode)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if regular else -1
    if regular and stat.S_ISREG(os.fstat(handle).st_mode):  # another may have taken its place
        return handle
    if handle >= 0:
        os.close(handle)
    raise ValueError("it is no regular file")


def hold(path: str, size: int, region: Region | None = None, sound: Sound | None = None) -> Region:
    """A file's bytes, that stay what they are from now on.

    Args:
        size: of the file, all of it.
        region: the draft that the file was written through, at least as large, no other handle of which is open: the bytes take its
            place, at the same addresses. None: anywhere.
        sound: asked, in some thread, if the file may have been changed before there was a copy. Where it says no, this process ends: what
            it computes would be nonsense. None: it always does.

    Raises:
        OSError, ValueError: the file is not there, has another size, or there is no memory for it.
    """
    handle = open_file(path)
    ours = True
    try:
        if region is None:
            region = Region(_map(size, mmap.PROT_READ, mmap.MAP_SHARED, handle), size)
        else:  # all of it: a page that could be written would be in the way of a lease
            _map(region.size, mmap.PROT_READ, mmap.MAP_SHARED, handle, region.address)
        try:
            _lease(region, handle, size, sound)
            ours = False  # the thread closes it, when the region is gone
        except (OSError, AttributeError) as error:
            logger.info("Packed weights in %s are read into private memory: no lease on the file (%s).", path, error)
            region.replace(handle, size)
        if os.fstat(handle).st_size != size:
            raise ValueError("the file is not as long as it should be")
        return region
    finally:
        if ours:
            os.close(handle)


def _lease(region: Region, handle: int, size: int, sound: Sound | None) -> None:
    """Take a lease on an open file, and have a thread watch over it.

    Raises:
        OSError, AttributeError: there is none to be had.
    """
    taken: Future[None] = Future()
    thread = threading.Thread(target=_watch, args=(weakref.ref(region), handle, size, sound, taken), name="packed weights", daemon=True)
    thread.start()
    taken.result()
    weakref.finalize(region, _wake, thread).atexit = False


def _watch(watched: weakref.ref[Region], handle: int, size: int, sound: Sound | None, taken: Future[None]) -> None:
    """Hold a lease until the region is gone. The kernel tells this thread, and no other, when somebody wants to change the file."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
    try:
        fcntl.fcntl(handle, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, threading.get_native_id()))
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except (OSError, AttributeError) as error:
        taken.set_exception(error)
        return
    before = _state(handle)
    taken.set_result(None)
    held = True
    while True:
        signal.sigwait({signal.SIGIO})
        if (region := watched()) is None:
            break
        if held and fcntl.fcntl(handle, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            held = False
            _let_go(region, handle, size, before, sound)
        del region
    os.close(handle)


def _state(handle: int) -> tuple[int, int]:
    """Of an open file: changes when somebody writes into it."""
    status = os.fstat(handle)
    return status.st_size, status.st_mtime_ns


def _is_listed(handle: int) -> bool:
    """Whether the kernel still has our lease, even if somebody waits for its end."""
    with open(f"/proc/self/fdinfo/{handle}") as file:
        return "LEASE" in file.read()


def _end(path: str) -> None:
    logger.critical("%s was changed while this process did not run: its weights are damaged, and the process ends.", path)
    os._exit(1)


def _let_go(region: Region, handle: int, size: int, before: tuple[int, int], sound: Sound | None) -> None:
    path = os.readlink(f"/proc/self/fd/{handle}")
    if not _is_listed(handle) and _state(handle) != before:  # at once: other threads compute with it
        _end(path)
    problem: Exception | None = None
    try:
        region.replace(handle, size)
    except (OSError, ValueError) as error:
        problem = error
    try:
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        in_time = True  # nobody could write before this
    except OSError:
        in_time = False  # the kernel has taken the lease away
    if not in_time and (problem is not None or sound is None or not sound(region.array()[:size])):
        _end(path)
    if problem is not None:
        logger.error(
            "%s is about to be changed, and there is no memory for a copy of its weights (%s): restart this process.", path, problem
        )
    else:
        logger.warning("%s is about to be changed: its weights stay in use here as a copy in private memory.", path)


def _wake(thread: threading.Thread) -> None:
    """Of a region that is gone, whose thread waits for this alone."""
    if thread.ident is not None and not sys.is_finalizing():
        signal.pthread_kill(thread.ident, signal.SIGIO)
