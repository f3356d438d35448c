"""The layers, held: who may import whom, what stays light, what is public, how long a file may be."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo

SRC = Path(octavo.__file__).parent
MAX_LINES = 800

LEAVES = {"config", "errors", "protocol", "_version"}
LAYERS: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "config": {"errors"},
    "protocol": {"config", "errors"},
    "checkpoint": LEAVES,
    "observe": LEAVES,
    "grammar": LEAVES,
    "frontend": LEAVES | {"checkpoint", "grammar", "observe"},
    "core": LEAVES | {"executor", "grammar"},
    "executor": LEAVES,
    "ops": LEAVES | {"layers"},
    "quantization": LEAVES | {"ops"},
    "layers": LEAVES | {"ops", "quantization", "parallel"},
    "attention": LEAVES | {"layers", "ops"},
    "sampling": LEAVES | {"layers", "ops"},
    "weights": LEAVES | {"checkpoint", "layers", "ops", "quantization", "parallel"},
    "parallel": LEAVES | {"ops"},
    "models": LEAVES | {"attention", "checkpoint", "layers", "ops", "weights", "quantization", "parallel"},
    "worker": LEAVES | {"attention", "checkpoint", "layers", "models", "ops", "parallel", "quantization", "sampling", "weights"},
    "fleet": LEAVES | {"executor", "frontend", "observe"},
    # The composition roots know everything.
    "engine": {"*"},
    "cli": {"*"},
}
"""What each package may import besides itself."""

TORCH_FREE = ("checkpoint", "config", "core", "errors", "executor", "fleet", "frontend", "grammar", "observe", "protocol")


def modules() -> Iterator[tuple[Path, str]]:
    """(file, package under octavo) of every module in a package."""
    for path in sorted(SRC.rglob("*.py")):
        relative = path.relative_to(SRC)
        package = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        if package not in ("__init__", "__main__"):
            yield path, package


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Every module that a file names in an import statement, wherever it stands."""
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module, node
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node


def run(program: str) -> list[str]:
    """The JSON list that a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(SRC.parent)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    answer: list[str] = json.loads(result.stdout.splitlines()[-1])
    return answer


def test_every_package_has_its_place() -> None:
    assert {package for _, package in modules()} <= LAYERS.keys()


@pytest.mark.parametrize("package", sorted(LAYERS))
def test_imports_point_down(package: str) -> None:
    allowed = LAYERS[package] | {package}
    wrong = []
    for path, owner in modules():
        if owner != package or "*" in allowed:
            continue
        for name, node in imports(path):
            parts = name.split(".")
            if parts[0] == "octavo" and len(parts) > 1 and parts[1] in LAYERS and parts[1] not in allowed:
                wrong.append(f"{path.relative_to(SRC)}:{node.lineno} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long() -> None:
    long = {str(path.relative_to(SRC)): n for path in SRC.rglob("*.py") if (n := len(path.read_text().splitlines())) >= MAX_LINES}
    assert not long


def test_no_catch_all_modules() -> None:
    assert not [path for path in SRC.rglob("*.py") if path.stem in ("utils", "util", "helpers", "common", "misc")]


def test_every_module_says_what_it_owns() -> None:
    silent = [path for path in SRC.rglob("*.py") if path.stem != "_version" and not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


PUBLIC = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineDead",
    "InvalidRequest",
    "LLM",
    "Logprob",
    "ModelNotFound",
    "NotYet",
    "OctavoError",
    "Overloaded",
    "PoolingParams",
    "RequestFailed",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedModel",
    "__version__",
]


def test_the_public_names_are_pinned() -> None:
    assert sorted(octavo.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(octavo))
    for name in PUBLIC:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_that"):
        _ = octavo.nothing_like_that


def test_every_public_error_is_one() -> None:
    for name in PUBLIC:
        value = getattr(octavo, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, octavo.OctavoError)


HEAVY = ("torch", "transformers", "fastapi", "pydantic", "uvicorn", "numpy", "rich", "tokenizers", "zmq", "huggingface_hub")


def test_importing_octavo_imports_next_to_nothing() -> None:
    program = f"import octavo, sys, json; print(json.dumps([m for m in {(*HEAVY, 'msgspec', 'asyncio')!r} if m in sys.modules]))"
    assert run(program) == []


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, json, io, contextlib\n"
        "from octavo.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main(['--help'])\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    if not any(path.name != "__init__.py" for path in (SRC / "cli").glob("*.py")):
        pytest.skip("there is no command line in this tree")
    assert run(program) == []


def test_everything_outside_the_worker_runs_without_torch() -> None:
    names = [
        ".".join(["octavo", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")
        for path, package in modules()
        if package in TORCH_FREE
    ]
    assert len(names) > 20
    program = (
        "import importlib, sys, json\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    assert run(program) == []
