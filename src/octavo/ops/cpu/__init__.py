"""What a CPU does better than plain torch: linear layers with weights laid out once, at load, for oneDNN."""

from __future__ import annotations

from typing import Any

from octavo.ops.cpu import linear


def overrides() -> dict[str, Any]:
    """Operation name -> implementation. Empty where this torch has no oneDNN."""
    return {"pack_linear": linear.pack_linear, "linear": linear.linear} if linear.available() else {}
