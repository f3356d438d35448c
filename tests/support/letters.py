"""A core whose tokens are letters, and requests held to grammars over them."""

from __future__ import annotations

from typing import Any

from octavo.protocol.engine import Vocabulary
from tests.support.core_engine import EOS, Engine
from tests.support.fake_worker import FakeWorker

LETTERS = [b"", b"", *(bytes([ord("a") + i]) for i in range(26)), *(b"" for _ in range(22))]
VOCABULARY = Vocabulary(LETTERS, [EOS], [EOS])


def run(requests: dict[str, dict[str, Any]], *, num_blocks: int = 64, tries: bool = False, forces: bool = True, **options: Any) -> Engine:
    """An engine that has answered `requests`, and has nothing left to do.

    Args:
        tries: tokens are drawn first and judged then.
        forces: tokens that a grammar decides on its own are not drawn.
    """
    engine = Engine(FakeWorker(num_blocks=num_blocks, tries=tries), **options)
    engine.core.settler.forces = forces
    engine.worker.obeys = True
    engine.core.set_vocabulary(VOCABULARY)
    for name, params in requests.items():
        engine.add(name, params.pop("prompt", [3, 4, 5]), **params)
    engine.run()
    engine.check_idle()
    assert not engine.worker.violations
    return engine


def assert_same_sequences(expected: Engine, found: Engine) -> None:
    """Tokens, ends and errors; and each ended once."""
    assert expected.seen.keys() == found.seen.keys()
    for key, one in expected.seen.items():
        other = found.seen[key]
        assert (one.tokens, one.reason, one.stop_reason, one.error) == (other.tokens, other.reason, other.stop_reason, other.error)
        assert other.ends == 1
