"""The items of a conversation: what a request may send, the one form they are kept in, and the chat messages they mean.

Output items of earlier responses are valid input, so a client may send back what it got, and `previous_response_id` is no
more than that done by the server.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal

from octavo.errors import InvalidRequest
from octavo.frontend.http.errors import short_repr
from octavo.frontend.http.limits import check_count

Item = dict[str, Any]
"""Always with `type` and `id`; messages with `content` as a list of parts."""

ROLES = ("user", "system", "developer", "assistant")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


REFERENCE = "item_reference"
"""An item of a kept response, given by its id: `dereferenced` puts the item in its place."""


def input_items(given: Any, param: str = "input") -> list[Item]:
    """`input`, which may be a text too, or another field as items.

    Raises:
        InvalidRequest: names the item.
    """
    if isinstance(given, str) and param == "input":
        return [_user_message(given)]
    if not isinstance(given, list):
        kinds = "a string or a list of items" if param == "input" else "a list of items"
        what = "is missing" if given is None else f"must be {kinds}, got {short_repr(given)}"
        raise InvalidRequest(f"{param} {what}.", param=param)
    check_count(param, given, param)
    return [_item(item, f"{param}[{number}]") for number, item in enumerate(given)]


def dereferenced(items: list[Item], find: Callable[[str], Item | None], param: str = "input") -> list[Item]:
    """`items` with what the references among them stand for.

    Args:
        find: an item that is kept, by its id.

    Raises:
        InvalidRequest: one of them is not kept (any more).
    """
    result = []
    for number, item in enumerate(items):
        found = find(item["id"]) if item["type"] == REFERENCE else item
        if found is None:
            raise InvalidRequest(
                f"{param}[{number}]: no item {short_repr(item['id'])} is kept; send the item itself, and have responses kept that are to be "
                "referred to (store).",
                param=param,
            )
        result.append(_item(found, f"{param}[{number}]") if found is not item else item)
    return result


def _user_message(text: str) -> Item:
    content = [{"type": "input_text", "text": text}]
    return {"id": new_id("msg"), "type": "message", "role": "user", "status": "completed", "content": content}


def _field(where: str) -> str:
    """The field of a request that a place is in."""
    return where.partition("[")[0]


def _item(item: Any, where: str) -> Item:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} must be an object, got {short_repr(item)}.", param=_field(where))
    kind = item.get("type") or ("message" if "role" in item else REFERENCE if item.keys() == {"id"} else None)
    match kind:
        case "message":
            return _message(item, where)
        case "function_call":
            _need_text(item, where, "call_id", "name", "arguments")
            kept = {name: item[name] for name in ("call_id", "name", "arguments")}
            return {"id": _id(item, "fc"), "type": "function_call", "status": "completed", **kept}
        case "function_call_output":
            _need_text(item, where, "call_id")
            output = item.get("output")
            if not isinstance(output, str):
                output = _parts(output, f"{where}.output", "input_text")
            return {"id": _id(item, "fco"), "type": kind, "status": "completed", "call_id": item["call_id"], "output": output}
        case "reasoning":
            for name in ("summary", "content"):
                if not isinstance(item.get(name, []), list | None):
                    raise InvalidRequest(f"{where}.{name} must be a list of parts, got {short_repr(item[name])}.", param=_field(where))
            kept = {name: [p for p in item.get(name) or () if _is_text(p)] for name in ("summary", "content")}
            return {"id": _id(item, "rs"), "type": "reasoning", **kept}
        case "item_reference":
            _need_text(item, where, "id")
            return {"id": item["id"], "type": REFERENCE}
        case _:
            raise InvalidRequest(
                f"{where} has the type {short_repr(kind)}; known are message, function_call, function_call_output, reasoning and item_reference.",
                param=_field(where),
            )


def _message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where} has the role {short_repr(role)}; roles are {', '.join(ROLES)}.", param=_field(where))
    kind = "output_text" if role == "assistant" else "input_text"
    content = item.get("content")
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else _parts(content, f"{where}.content", kind)
    return {"id": _id(item, "msg"), "type": "message", "role": role, "status": "completed", "content": parts}


def _parts(content: Any, where: str, kind: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts, got {short_repr(content)}.", param=_field(where))
    parts = []
    for number, part in enumerate(content):
        name = part.get("type") if isinstance(part, dict) else None
        if not isinstance(name, str) or name not in _TEXT_PARTS:
            given = f"has the type {short_repr(name)}" if isinstance(part, dict) else f"is {short_repr(part)}"
            raise InvalidRequest(f"{where}[{number}] {given}. This model reads text only.", param=_field(where))
        text = part.get(_TEXT_PARTS[name])
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{number}] has no {_TEXT_PARTS[name]}.", param=_field(where))
        extra: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        parts.append({"type": kind, "text": text, **extra})
    return parts


def _need_text(item: Item, where: str, *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise InvalidRequest(f"{where} (type {item.get('type')}) needs {name}, a string.", param=_field(where))


def _id(item: Item, prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= 256 else new_id(prefix)


def item_page(items: list[Item], *, limit: int, order: Literal["asc", "desc"], after: str | None) -> dict[str, Any]:
    """A part of `items` (oldest first) as a list object.

    Raises:
        InvalidRequest: there is no item `after`.
    """
    items = items[::-1] if order == "desc" else items
    if after is not None:
        at = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise InvalidRequest(f"after: there is no item {short_repr(after)}.", param="after")
        items = items[at + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def messages(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """A conversation as chat messages: reasoning and calls belong to the assistant's message beside them."""
    result: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    reasoning = ""
    for item in items:
        last = result[-1] if result else {}
        match item["type"]:
            case "reasoning":
                reasoning = "\n".join(part["text"] for part in item.get("content") or item.get("summary") or ())
                continue
            case "message":
                result.append({"role": item["role"], "content": [{"type": "text", "text": p["text"]} for p in item["content"]]})
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                if last.get("role") != "assistant":
                    result.append({"role": "assistant", "content": ""})
                call = {"id": item["call_id"], "type": "function", "function": function}
                result[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item["output"]
                content = output if isinstance(output, str) else [{"type": "text", "text": p["text"]} for p in output]
                result.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        if reasoning and result[-1]["role"] == "assistant":
            result[-1].setdefault("reasoning", reasoning)
        reasoning = ""
    return result
