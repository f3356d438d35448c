"""Weights in PyTorch's own format (pytorch_model.bin), read by the unpickler of torch that knows tensors and nothing else.

Such a file is a program for the unpickler. `weights_only` refuses every instruction that would call anything but the rebuilding of
a tensor: a file that asks for more is refused, and nothing of it has been run.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from octavo.checkpoint.files import is_there, read_json_object, require_file
from octavo.checkpoint.stand_in import stand_in
from octavo.errors import CheckpointError, plain_text
from octavo.weights.stored import StoredTensor

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"
_ASKED_FOR: Final = re.compile(r"GLOBAL ([\w.]+)")
_ADVICE: Final = re.compile(
    r"\s*\(?(?:This is an internal|If you are seeing|Could this error|Please |please (?:file|report|use))|; corrupt file"
)
_PLACE: Final = re.compile(r"^\[enforce fail at [^\]]*\][ .]*")
_NESTED: Final = ("state_dict", "model", "model_state_dict", "module")
"""Where training tools put the tensors."""


def pickled_files(folder: str) -> list[str]:
    """The files that make up the model in `folder`, sorted; empty when it has none in this format.

    Raises:
        CheckpointError: the index is malformed or names files that are not there.
    """
    index = Path(folder) / INDEX
    if not is_there(index):
        single = os.path.join(folder, SINGLE)
        return [single] if is_there(single) else []
    stored = read_json_object(index)
    try:
        names = sorted(set(stored["weight_map"].values()))
        inside = [name for name in names if os.path.basename(name) == name]
    except (KeyError, AttributeError, TypeError) as e:
        raise CheckpointError(f'{index} has no "weight_map" from tensor names to files ({type(e).__name__}).') from None
    missing = [name for name in names if name not in inside or not is_there(os.path.join(folder, name))]
    if missing or not names:
        raise CheckpointError(f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:3])}.")
    return [os.path.join(folder, name) for name in names]


def open_pickled(path: str) -> Iterator[StoredTensor]:
    """The tensors of one file, mapped into memory and read when they are copied.

    Raises:
        CheckpointError: damaged, or it holds more than tensors (and nothing of it was run).
    """
    require_file(path)
    try:
        with open(path, "rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, whose authors are not the reader of our messages
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as e:
        asked = _ASKED_FOR.search(plain_text(str(e)))  # the rest is advice of torch's to run it all the same
        held = "holds more than tensors, or is damaged" if asked is None else f"holds more than tensors: it asks for {asked[1]}"
        what = stand_in(path) or f"{path} {held}; nothing of it was run. Take a safetensors version of the model."
        raise CheckpointError(what) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as e:
        what = stand_in(path) or f"{path}: not a sound PyTorch file: {_finding(e)}. Download it again."
        raise CheckpointError(what) from None
    for name, tensor in _state_dict(tensors, path).items():
        if isinstance(tensor, torch.Tensor):
            yield StoredTensor(
                name, tuple(tensor.shape), tensor.nbytes, path, _copier(tensor, name, path), raw=tensor.to, dtype=tensor.dtype
            )


def _finding(error: Exception) -> str:
    """What torch found, without what it advises: that is for who writes such files, or for torch's own developers."""
    first = plain_text(str(error)).strip().partition("\n")[0]
    return _ADVICE.split(_PLACE.sub("", first), maxsplit=1)[0].rstrip(" .?") or type(error).__name__


def _state_dict(stored: Any, path: str) -> dict[str, Any]:
    """The tensors by name: all that is stored, or what training tools put one level down beside other things.

    Raises:
        CheckpointError: there are none.
    """
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} must hold a dict from names to tensors, not a {type(stored).__name__}.")
    if any(isinstance(value, torch.Tensor) for value in stored.values()) and all(isinstance(name, str) for name in stored):
        return stored
    for key in _NESTED:
        inner = stored.get(key)
        if isinstance(inner, dict) and inner and all(isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in inner.items()):
            return inner
    names = ", ".join(str(name) for name in list(stored)[:4]) or "nothing"
    raise CheckpointError(
        f"{path} must hold tensors by name, at the top or under {', '.join(_NESTED)}; it holds {names}{', ...' if len(stored) > 4 else ''}."
    )


def _copier(tensor: torch.Tensor, name: str, path: str) -> Callable[[torch.Tensor], None]:
    def copy_into(destination: torch.Tensor) -> None:
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: tensor {name} has dtype {tensor.dtype}; weights must be floating point.")
        destination.copy_(tensor)

    return copy_into
