"""Weights in PyTorch's own format (pytorch_model.bin), read by the unpickler of torch that knows tensors and nothing else.

Such a file is a program for the unpickler. `weights_only` refuses every instruction that would call anything but the rebuilding of
a tensor: a file that asks for more is refused, and nothing of it has been run.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from octavo.errors import CheckpointError
from octavo.weights.stored import StoredTensor

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"


def pickled_files(folder: str) -> list[str]:
    """The files that make up the model in `folder`, sorted; empty when it has none in this format.

    Raises:
        CheckpointError: the index is malformed or names files that are not there.
    """
    index = Path(folder) / INDEX
    if not index.is_file():
        single = os.path.join(folder, SINGLE)
        return [single] if os.path.isfile(single) else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        inside = [name for name in names if os.path.basename(name) == name]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise CheckpointError(f'{index} has no "weight_map" from tensor names to files ({type(e).__name__}).') from None
    missing = [name for name in names if name not in inside or not os.path.isfile(os.path.join(folder, name))]
    if missing or not names:
        raise CheckpointError(f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:3])}.")
    return [os.path.join(folder, name) for name in names]


def open_pickled(path: str) -> Iterator[StoredTensor]:
    """The tensors of one file, mapped into memory and read when they are copied.

    Raises:
        CheckpointError: damaged, or it holds more than tensors (and nothing of it was run).
    """
    try:
        with open(path, "rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as e:
        first = str(e).strip().splitlines()[0] if str(e).strip() else "not a pickle"
        raise CheckpointError(
            f"{path} holds more than tensors, or is damaged; nothing of it was run. Take a safetensors version of the model. ({first})"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as e:
        raise CheckpointError(f"{path}: not a sound PyTorch file: {e}. Download it again.") from None
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise CheckpointError(f"{path} must hold a dict from names to tensors, not a {type(tensors).__name__}.")
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            yield StoredTensor(
                name, tuple(tensor.shape), tensor.nbytes, path, _copier(tensor, name, path), raw=tensor.to, dtype=tensor.dtype
            )


def _copier(tensor: torch.Tensor, name: str, path: str) -> Callable[[torch.Tensor], None]:
    def copy_into(destination: torch.Tensor) -> None:
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: tensor {name} has dtype {tensor.dtype}; weights must be floating point.")
        destination.copy_(tensor)

    return copy_into
