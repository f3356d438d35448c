"""What README.md tells people to type works: its curl commands run against a server, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.octavo_process import free_port, serving, write_script
from tests.support.tiny_checkpoint import write_tiny_checkpoint

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
EXPECTED = ("hello", "hello", '"object":"list"')
"""Something in the output of each block, in order."""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("readme") / "tiny")
    script = write_script(folder.parent / "script.json", folder, "hello world")
    number = free_port()
    flags = ["--served-model-name", "smollm2-135m-instruct", "--load-format", "dummy", "--debug-scripted-model", str(script)]
    with serving(["octavo", "serve", str(folder), "--device", "cpu", *flags], number, folder.parent / "log"):
        yield number


@pytest.mark.parametrize(("block", "expected"), list(zip(BLOCKS, EXPECTED, strict=True)), ids=range(len(BLOCKS)))
def test_curl_commands(block: str, expected: str, port: int) -> None:
    script = "set -e\n" + block.replace("localhost:8000", f"127.0.0.1:{port}").replace("curl ", "curl -sS --fail ")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert expected in done.stdout.replace('": "', '":"')


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_command_is_documented() -> None:
    from octavo.cli.app import COMMANDS

    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"octavo {name}" in page, name


def test_the_table_of_models_is_that_of_the_registry() -> None:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "scripts" / "models_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "Qwen3ForCausalLM" in module.table()
    assert module.updated(README) == README, "run `make docs`"
