"""`python -m tests.support.serve_main '{"engine": {...}, "server": {...}}'`: what the command line does, without it."""

from __future__ import annotations

import json
import sys

from octavo.config.args import EngineArgs
from octavo.errors import OctavoError
from octavo.frontend.http.server import serve
from octavo.frontend.http.settings import ServerSettings


def main() -> int:
    given = json.loads(sys.argv[1])
    try:
        serve(EngineArgs(**given["engine"]), ServerSettings(**given["server"]))
    except OctavoError as e:
        print(f"octavo: error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
