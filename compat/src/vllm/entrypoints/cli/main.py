"""The `vllm` command: Octavo's, whose commands have the same names."""

from __future__ import annotations

import sys

from octavo.cli import main as octavo

_RENAMED = {"collect-env": "doctor"}


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in _RENAMED:
        arguments[0] = _RENAMED[arguments[0]]
    if arguments in (["-v"], ["--version"]):
        from vllm.version import __version__

        print(__version__)
        return 0
    return octavo(arguments)


if __name__ == "__main__":
    sys.exit(main())
