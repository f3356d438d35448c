"""Typed reading of a checkpoint's `quantization_config`: a bad value is named by its key."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.config.typed_json import MAX_SIZE, TypedJson
from octavo.errors import UnsupportedModel


class Settings(TypedJson):
    """One level of a quantization_config."""

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first of the keys that is there: the same thing under the names of different tools."""
        key = next((k for k in keys if self.has(k)), keys[0])
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, "a whole number")
        return value

    def bits(self, *keys: str, allowed: Sequence[int]) -> int:
        """
        Raises:
            UnsupportedModel: a width that this format is not read with.
        """
        value = self.integer(*keys)
        if value not in allowed:
            key = next(k for k in keys if self.has(k))
            raise UnsupportedModel(f"{self.where}: {key} {value} is not supported. Supported: {', '.join(map(str, allowed))}.")
        return value

    def group_size(self, *keys: str) -> int:
        """Columns that share a scale; -1: all of a row."""
        value = self.integer(*keys, default=-1)
        if value != -1 and not 0 < value <= MAX_SIZE:
            raise self.fail(next(k for k in keys if self.has(k)), "a number greater than 0, or -1 for one group a row")
        return value

    def text(self, key: str, default: str) -> str:
        """In lower case: tools differ in how they write names."""
        return super().text(key, default).lower()

    def block_size(self, key: str) -> tuple[int, int] | None:
        """Rows and columns of a block that shares a scale; None: there are no blocks."""
        value = self.values.get(key)
        if value is None:
            return None
        sound = isinstance(value, (list, tuple)) and len(value) == 2
        if not sound or not all(isinstance(v, int) and not isinstance(v, bool) and 0 < v <= MAX_SIZE for v in value):
            raise self.fail(key, "two numbers greater than 0: rows and columns of a block")
        return value[0], value[1]

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise self.fail(key, "a list of strings")
        return tuple(value)
