"""Programs that are compiled once a process and device: in the background from when it is known that they will be wanted."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from octavo.ops.cuda.compiler import CompilerError, in_background
from octavo.ops.cuda.launch import Kernel
from octavo.ops.triton.launch import overlap_supported

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Program(Hashable, Protocol):
    """What a kernel is made of. Equal ones are one kernel."""

    @property
    def name(self) -> str:
        """Of the function."""

    @property
    def threads(self) -> int:
        """Of a block."""

    @property
    def shared_bytes(self) -> int:
        """Of a block."""

    @property
    def cluster(self) -> int:
        """Blocks of a cluster; 1: there are none."""

    def device_source(self) -> str: ...


@functools.cache
def _code(program: Program, device: torch.device) -> Future[bytes]:
    return in_background(program.device_source(), device)


def prepare(program: Program, device: torch.device) -> None:
    """Begin to compile what will be launched."""
    _code(program, device)


def finish_preparing(program: Program, device: torch.device) -> None:
    """Wait for `prepare`.

    Raises:
        CompilerError: with the compiler's messages.
    """
    _code(program, device).result()


@functools.cache
def kernel(program: Program, device: torch.device) -> Kernel:
    """Ready to be launched.

    Raises:
        CompilerError: with the compiler's messages.
    """
    code = _code(program, device).result()
    with torch.cuda.device(device):
        overlap = overlap_supported(device)
        return Kernel(code, program.name, program.threads, program.shared_bytes, overlap=overlap, cluster=program.cluster)


class Kind:
    """Kernels for one purpose, which are used as long as the compiler takes them. The first that it refuses is the last.

    Args:
        purpose: what they are for, as the user is told.
    """

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self.usable = True

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What `work` does with such kernels; None where slower ones have to do it."""
        if not self.usable:
            return None
        try:
            return work()
        except CompilerError as error:
            logger.warning("A CUDA kernel for %s could not be compiled, slower ones take its place: %s", self._purpose, error)
            self.usable = False
            return None

    def finish_preparing(self, programs: Iterable[Program], device: torch.device) -> bool:
        """Wait for all of them; whether they can be used."""

        def wait() -> None:
            for program in programs:
                finish_preparing(program, device)

        self.attempt(wait)
        return self.usable
