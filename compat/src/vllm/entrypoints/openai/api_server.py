"""`python -m vllm.entrypoints.openai.api_server --model ...`: `octavo serve` under its older name."""

from __future__ import annotations

import sys

from octavo.cli import main as octavo


def main() -> int:
    return octavo(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
