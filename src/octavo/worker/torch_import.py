"""Importing torch beside steps that go on: in a thread, and without keeping the interpreter's lock while its libraries are loaded."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import threading
from concurrent.futures import Future
from pathlib import Path

logger = logging.getLogger(__name__)

_LARGEST = "libtorch_cpu.so"
"""Takes most of an import: an import statement would keep the lock for all of that time, half a second and more."""


class TorchMissing(Exception):
    """torch cannot be imported. Its text is for the user whose request needs it."""

    def __init__(self, cause: BaseException) -> None:
        why = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        super().__init__(
            "Requests with logprobs, penalties, biases, min_tokens or lists of tokens are computed by torch, which cannot be imported "
            f"({why}). Reinstall torch (pip install --force-reinstall torch; octavo doctor checks it) and start again; other requests are "
            "served without it."
        )


def import_beside(module: str) -> Future[None]:
    """Import a module that needs torch.

    Returns:
        Done when the module is there; fails with `TorchMissing` where it cannot be had.
    """
    done: Future[None] = Future()
    threading.Thread(target=_import, args=(module, done), name="import torch", daemon=True).start()
    return done


def _import(module: str, done: Future[None]) -> None:
    try:
        _load_library()
        importlib.import_module(module)
    except BaseException as error:  # whatever torch does while it is imported: those who wait must hear of it
        logger.exception("torch cannot be imported: requests that want logprobs, penalties or biases fail.")
        done.set_exception(TorchMissing(error))
    else:
        done.set_result(None)


def _load_library() -> None:
    """Have the system load torch's library, so that the import finds it loaded. A foreign call does not keep the lock."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return
        load = ctypes.CDLL(None).dlopen
        load.argtypes, load.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
        load(os.fsencode(Path(spec.origin).parent / "lib" / _LARGEST), os.RTLD_NOW)
