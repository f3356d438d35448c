"""Pages that are made from the code say what the code says."""

from __future__ import annotations

from pathlib import Path

from octavo.cli.docs import configuration_page

ROOT = Path(__file__).parents[3]


def test_the_configuration_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == configuration_page(), "run `make docs`"
