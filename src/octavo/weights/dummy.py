"""Random weights with the statistics of a fresh initialisation, so that a config alone makes a model that runs."""

from __future__ import annotations

import zlib

import torch


def dummy_generator(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Where the random numbers of a parameter come from."""
    return torch.Generator(device=device).manual_seed((seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**63)


def fill_dummy(name: str, kind: str, tensor: torch.Tensor, seed: int) -> None:
    """Fill a parameter in place: matrices normal with variance 1 / inputs (LeCun et al. 1998), norms 1, biases small.

    The values depend on the seed, the name and the kind of device, not on the order of filling.

    Args:
        kind: of `models.spec.Parameter`.
    """
    if kind == "norm":
        tensor.fill_(1.0)
        return
    generator = dummy_generator(name, seed, tensor.device)
    std = 0.02 if kind in ("bias", "exact") else tensor.shape[-1] ** -0.5
    tensor.normal_(0.0, std, generator=generator)
