"""Where the grammar engine may recurse: in a thread with a large stack.

The engine compiles a reference inside of what refers to it, several KiB of stack a level, and a stack that overflows ends the process: no
error can be caught. `depth` bounds the levels; this gives what it lets through many times the stack that it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

STACK_BYTES = 256 << 20
"""Address space only: pages that nobody touches cost nothing."""

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
    """`function(*args)`, run where it may recurse. Blocks the calling thread."""
    if isinstance(threading.current_thread(), _Call):
        return function(*args)
    call = _Call(function, args)
    with _SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            call.start()
        finally:
            threading.stack_size(before)
    call.join()
    if call.error is not None:
        raise call.error
    result: T = call.result
    return result
