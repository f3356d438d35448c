"""Conversations: lists of items that responses go on with and add to. Kept beside responses, in the same bounded store."""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidRequest
from octavo.frontend.http.errors import NotFound, short_repr
from octavo.frontend.http.limits import MAX_MESSAGES
from octavo.frontend.http.responses.items import Item, new_id
from octavo.frontend.http.responses.store import ResponseStore, StoredResponse

MAX_ITEMS = MAX_MESSAGES


def new_conversation(created: int, metadata: dict[str, Any], items: list[Item], owner: str) -> StoredResponse:
    record = {"id": new_id("conv"), "object": "conversation", "created_at": created, "metadata": metadata}
    return StoredResponse(record, _unique([], items), owner)


def is_conversation(stored: StoredResponse) -> bool:
    return bool(stored.response["object"] == "conversation")


def conversation_id(given: Any) -> str | None:
    """The `conversation` of a request: an id, or an object with one.

    Raises:
        InvalidRequest: it is neither.
    """
    found = given.get("id") if isinstance(given, dict) else given
    if (found is not None and not isinstance(found, str)) or (isinstance(given, dict) and found is None):
        raise InvalidRequest(f"conversation must be an id or an object with one, got {short_repr(given)}.", param="conversation")
    return found


def find_conversation(store: ResponseStore, conversation: str, owner: str, *, param: str = "conversation_id") -> StoredResponse:
    """Raises NotFound if it is not there, or not its owner's; `param` named it."""
    stored = store.get(conversation, owner)
    if stored is None or not is_conversation(stored):
        raise not_found(conversation, param)
    return stored


def append_items(store: ResponseStore, conversation: str, owner: str, items: list[Item]) -> list[Item] | None:
    """Add to the end of a conversation. Returns the items as they are kept; None if it is not there any more.

    Raises:
        InvalidRequest: it has too many.
    """
    with store.changing(conversation, owner) as stored:
        if stored is None or not is_conversation(stored):
            return None
        added = _unique(stored.items, items)
        if len(stored.items) + len(added) > MAX_ITEMS:
            raise InvalidRequest(f"A conversation has at most {MAX_ITEMS} items; begin a new one.", param="items")
        stored.items.extend(added)
    return added


def not_found(conversation: str, param: str = "conversation_id") -> NotFound:
    return NotFound(f"There is no conversation {short_repr(conversation)} here; they are kept for a limited time.", param=param)


def _unique(before: list[Item], items: list[Item]) -> list[Item]:
    """`items` under ids that nothing else in the conversation has: a client may send back what is there already."""
    taken = {item["id"] for item in before}
    result = []
    for item in items:
        kept = item if item["id"] not in taken else {**item, "id": new_id(item["id"].split("_", 1)[0][:8] or "item")}
        taken.add(kept["id"])
        result.append(kept)
    return result
