"""Files and batches as the API shows them, and as they are stored."""

from __future__ import annotations

import uuid
from typing import Any

Record = dict[str, Any]


def file_record(file_id: str, name: str, size: int, purpose: str, created: int, seconds: int | None) -> Record:
    """A file as the API shows it; `seconds` is how long it is kept."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": created,
        "expires_at": created + seconds if seconds is not None else None,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_record(
    *, endpoint: str, input_file_id: str, window: str, window_seconds: int, metadata: Any, created: int, output_expires_after: Any = None
) -> Record:
    """A new batch as the API shows it."""
    moments = dict.fromkeys(
        f"{name}_at" for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    )
    return {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": input_file_id,
        "completion_window": window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": created,
        "expires_at": created + window_seconds,
        **moments,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
        "output_expires_after": output_expires_after,
    }
