"""How large the slot tables are: 4 bytes a token of max_model_len and slot, and 4 bytes a block.

256 slots of 128k tokens are 134 MB and 8 MB. On a CPU pages are only touched as far as requests are long.
"""

from __future__ import annotations

SLACK_TOKENS = 16
"""Places past max_model_len: steps in flight may sample a token more than a request ends up keeping."""


def table_width(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`, rounded so that every row starts at a multiple of 16 bytes."""
    return -(-num_tokens // (4 * block_size)) * 4


def table_bytes(num_slots: int, max_model_len: int, block_size: int) -> int:
    width = max_model_len + SLACK_TOKENS
    return 4 * num_slots * (width + table_width(width, block_size))
