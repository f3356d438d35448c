"""`TypedJson`: values of a JSON object of somebody else's, checked where they are read, so that a bad one is named by its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from octavo.errors import CheckpointError

MAX_SIZE = 2**31 - 1
"""No dimension of a real model comes near; a larger one is damage."""


class TypedJson:
    """One level of an object. A key that is absent or null takes the default.

    Args:
        where: what to call it in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def fail(self, key: str, rule: str) -> CheckpointError:
        given = repr(self.values[key]) if key in self.values else "nothing"
        return CheckpointError(f"{self.where}: {key} must be {rule}, got {given}.")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def section(self, key: str) -> Self:
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return type(self)(value, f"{self.where}: {key}")
