"""Places in a JSON schema: paths, and where a JSON pointer leads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Path = tuple[str | int, ...]

_INDEX_DIGITS = 12


def index_of(part: str) -> int:
    """The place in a list that a step of a JSON pointer names; beyond the end of any list if it is none."""
    return int(part) if part.isdecimal() and len(part) < _INDEX_DIGITS else 10**_INDEX_DIGITS


def followed(path: Path, node: Any, fragment: str) -> tuple[Path, Any] | None:
    """What a JSON pointer ("/$defs/a") leads to from the part at `path`; None if it is not there."""
    for part in (unquote(step).replace("~1", "/").replace("~0", "~") for step in fragment.split("/")[1:]):
        if isinstance(node, list) and (at := index_of(part)) < len(node):
            path, node = (*path, at), node[at]
        elif isinstance(node, dict) and part in node:
            path, node = (*path, part), node[part]
        else:
            return None
    return path, node


def objects_in(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value, itself among them, whether they are schemas or not."""
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            yield node
            todo += node.values()
        elif isinstance(node, list):
            todo += node


def pointer(path: Path) -> str:
    """A path as people write it: $.properties.age.items[0]."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
