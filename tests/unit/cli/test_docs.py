"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

from octavo.cli.docs import configuration_page
from octavo.cli.flags import flag_names
from octavo.cli.foreign_flags import FOREIGN_FLAGS, SERVER_ONLY
from octavo.config.args import EngineArgs
from octavo.frontend.http.batches.lines import URLS
from octavo.frontend.http.settings import ServerSettings
from octavo.frontend.http.structured import FORMATS

ROOT = Path(__file__).parents[3]


def test_the_configuration_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == configuration_page(), "run `make docs`"


def settings_flags(settings: type) -> set[str]:
    return {name for field in dataclasses.fields(settings) for name in flag_names(field)}


def test_a_flag_is_a_setting_or_is_not() -> None:
    """A setting that is also in the table of flags without one would be documented twice, and differently."""
    foreign = [flag.name for flag in FOREIGN_FLAGS]
    engine, server = settings_flags(EngineArgs), settings_flags(ServerSettings)
    assert set(foreign) & (engine | server) == set()
    assert len(set(foreign)) == len(foreign)
    only = {flag.name for flag in SERVER_ONLY}
    assert only <= server, "what is no setting of the server cannot be said to be one"
    assert only & (engine | set(foreign)) == set()
    named = re.findall(r"`(--[a-z0-9-]+)`", configuration_page().partition("## Engine")[2])
    assert sorted({name for name in named if named.count(name) > 1}) == []


def test_the_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z]+)` \|", page, re.MULTILINE)) == set(extras)


def test_the_endpoints_and_formats_are_those_of_the_server() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    batches = page.partition("### Files and batches")[2].partition("###")[0]
    assert set(re.findall(r"`(/v1/[a-z/]+)`", batches)) == set(URLS)
    formats = page.partition("### Structured output")[2].partition("###")[0]
    assert [name for name in FORMATS if name != "text" and name not in formats] == []
