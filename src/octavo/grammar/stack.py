"""Where the grammar engine may recurse: in a thread with a large stack.

The engine compiles a reference inside of what refers to it, several KiB of stack a level, and a stack that overflows ends the process: no
error can be caught. `depth` bounds the levels; this gives what it lets through many times the stack that it needs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from octavo.config import address_space

T = TypeVar("T")

_LIMITED = address_space.limit() is not None
"""Addresses are scarce: they were when this process began."""
STACK_BYTES = (64 if _LIMITED else 256) << 20
"""Address space only: pages that nobody touches cost nothing. The deepest that gets here takes less than 32 MiB."""
WORK_BYTES = 16 << 20
"""What the grammar engine may take for one of most grammars. It ends the process where it is refused memory."""
_TURN: AbstractContextManager[object] = threading.Lock() if _LIMITED else contextlib.nullcontext()
"""Where addresses are scarce, there is one such stack at a time."""

_SIZE = threading.Lock()
"""The size of new stacks is a setting of the process: held while ours is in force."""


class _Call(threading.Thread):
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(name="octavo-deep", daemon=True)
        self._function = function
        self._args = args
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._function(*self._args)
        except BaseException as error:  # raised again by the caller
            self.error = error


def on_deep_stack(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, run where it may recurse. Blocks the calling thread.

    Raises:
        MemoryError: the system gives no such stack, or would give hardly more than that.
    """
    if isinstance(threading.current_thread(), _Call):
        return function(*args)
    call = _Call(function, args)
    with _TURN:
        if _LIMITED and address_space.lacks(STACK_BYTES + WORK_BYTES):
            raise MemoryError("The system gives no stack for the grammar engine.")
        with _SIZE:
            before = threading.stack_size(STACK_BYTES)
            try:
                call.start()
            except RuntimeError as error:
                raise MemoryError("The system gives no stack for the grammar engine.") from error
            finally:
                threading.stack_size(before)
        call.join()
    if call.error is not None:
        raise call.error
    result: T = call.result
    return result
