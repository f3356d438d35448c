"""`octavo quantize` and `octavo eval` at the door, and evaluation against what transformers computes."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from octavo.cli import main
from octavo.cli.quantize import METHODS, PROGRAMS
from octavo.cli.tool_output import ToolProgress, lines_of
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_models import save_tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama with weights and a tokenizer."""
    folder = tmp_path / "model"
    write_tiny_checkpoint(folder, max_model_len=128)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    save_tiny(folder, "llama", hidden_size=64, intermediate_size=128, vocab_size=vocab, max_position_embeddings=128)
    return folder


def test_perplexity_is_that_of_transformers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    text, result = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("hello world, the hello of the world. " * 4)
    flags = ["--device", "cpu", "--num-gpu-blocks-override", "64", "--window", "50", "--output-json", str(result)]
    assert main(["eval", str(model), "--text", str(text), "--against", str(model), *flags]) == 0
    found = json.loads(result.read_text())
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(model)(text.read_text(), add_special_tokens=False)["input_ids"]
    losses = []
    for start in range(0, len(tokens), 50):
        window = torch.tensor([tokens[start : start + 50]])
        if window.shape[1] > 1:
            with torch.inference_mode():
                logits = reference(window).logits[0, :-1]
            losses += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none").tolist()
    assert found["tokens"] == len(losses)
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)
    assert found["agreement"] == 1.0
    assert found["mean_logprob_difference"] == pytest.approx(0.0, abs=1e-6)
    assert "same likeliest token" in capsys.readouterr().out


def test_rounding_while_loading_costs_little(model: Path, tmp_path: Path) -> None:
    text, result = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("hello world, the hello of the world. " * 4)
    flags = ["--device", "cpu", "--num-gpu-blocks-override", "64", "--output-json", str(result)]
    assert main(["eval", str(model), "--quantization", "int8", "--text", str(text), "--against", str(model), *flags]) == 0
    found = json.loads(result.read_text())
    assert found["agreement"] > 0.8  # inputs are rounded too, and random weights make near ties
    assert 0 < found["mean_logprob_difference"] < 0.1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["eval"], 2, "--text FILE"),
        (["eval", "--text", "/nowhere.txt"], 1, "/nowhere.txt: No such file"),
        (["eval", "--window", "1", "--text", "x"], 2, "at least 2 tokens"),
        (["quantize"], 2, "--method fp8 --out FOLDER"),
        (["quantize", "--method", "quip", "--out", "x"], 2, "quip"),
        (["quantize", "--method", "gptq", "--out", "/nowhere/x"], 2, "--text FILE"),
        (["quantize", "--method", "fp8", "--out", "/"], 1, "is there already"),
        (["quantize", "--method", "awq", "--out", "/nowhere/x"], 1, "auto-round is not installed for .*--python"),
        (["quantize", "--method", "fp8", "--out", "/nowhere/x", "--python", "/no/python"], 1, "--python /no/python: No such file"),
        (
            ["quantize", "--method", "fp8", "--out", "/nowhere/x", "--python", "/bin/ls"],
            1,
            "--python /bin/ls is no working Python interpreter",
        ),
        (
            ["quantize", "--method", "fp8", "--out", "/nowhere/x", "--python", "/bin/true"],
            1,
            "/bin/true is no working Python interpreter[.]",
        ),
        (["quantize", "--method", "gptq", "--out", "/nowhere/x", "--text", "/no.txt"], 1, "there is no such file"),
    ],
)
def test_bad_usage(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert main(arguments) == code
    assert re.search(message, capsys.readouterr().err)


def test_what_is_no_python_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Its own complaint is part of the sentence, and not a line of its own."""
    assert main(["quantize", "--method", "fp8", "--out", "/nowhere/x", "--python", "/bin/ls"]) == 1
    out, err = capfd.readouterr()
    assert not out and len(err.splitlines()) == 1


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter that has the tool's name, and runs its program's job instead of the program."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "llmcompressor.py").write_text("")
    (packages / "transformers.py").write_text("import json, sys; json.dump(json.loads(sys.argv[1]), sys.stderr); sys.exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    return sys.executable


def test_the_tool_is_given_the_job_and_its_failure_is_told(
    model: Path, tmp_path: Path, stand_in: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(model), "--method", "int8", "--out", str(tmp_path / "out"), "--python", stand_in]) == 1
    said = capfd.readouterr().err
    assert '"method": "int8"' in said
    assert '"group": 64' in said
    assert "llmcompressor did not finish (exit code 3)" in said


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter whose tool draws bars as the real one does, writes a file, and ends as the file `code` says."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "llmcompressor.py").write_text("")
    (packages / "transformers.py").write_text(
        "import json, pathlib, sys\n"
        "print('a warning of the tool')\n"
        "for stage in (1, 2):\n"
        "    for i in (0, 1, 2):\n"
        "        sys.stderr.write(f'\\r({stage}/2): Calibrating:  {50 * i}%|## | {i}/2 [00:01<00:00, 4.96it/s]')\n"
        "sys.stderr.write('\\n')\n"
        "out = pathlib.Path(json.loads(sys.argv[1])['out'])\n"
        "out.mkdir()\n"
        "(out / 'config.json').write_text('{}')\n"
        "(out / 'model.safetensors').touch(0o600)\n"
        "(out / 'more').mkdir(0o700)\n"
        f"sys.exit(int(pathlib.Path({str(tmp_path / 'code')!r}).read_text()))\n"
    )
    (tmp_path / "code").write_text("0")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    return sys.executable


def test_a_folder_appears_when_it_is_whole(model: Path, tmp_path: Path, tool: str, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    command = ["quantize", str(model), "--method", "int8", "--out", str(out), "--python", tool]
    (tmp_path / "code").write_text("5")
    assert main(command) == 1
    said = capfd.readouterr().err
    assert "a warning of the tool" in said and "exit code 5" in said
    assert list(out.parent.iterdir()) == []
    (tmp_path / "code").write_text("0")
    assert main(command) == 0
    said = capfd.readouterr().err
    assert "Calibrating: 0 of 2" in said and "%|" not in said and "a warning" not in said
    assert f"--against {model}" in said
    assert [p.name for p in out.parent.iterdir()] == ["out"] and (out / "config.json").exists()
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == 0o666 & ~mask  # for a server of another user
    assert stat.S_IMODE((out / "more").stat().st_mode) == 0o777 & ~mask


def test_a_place_that_cannot_be_written_is_known_before(model: Path, tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(model), "--method", "int8", "--out", "/proc/out", "--python", tool]) == 1
    assert "--out /proc/out cannot be written" in capsys.readouterr().err


def test_bars_are_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int, int, str]] = []
    monkeypatch.setattr(ToolProgress, "_draw", lambda _, *bar: drawn.append(bar))
    progress = ToolProgress()
    for line in (
        "(3/31): Calibrating:   0%|          | 0/32 [00:00<?, ?it/s]",
        "(3/31): Propagating:  94%|█████████▍| 30/32 [00:04<00:00,  6.31it/s]",
        "Compressing model: 100%|██████████| 210/210 [00:28<00:00,  7.45it/s]",
        "quantizing model.layers.4:  13%|█▎        | 4/30 [00:12<01:15,  2.92s/it]",
        " 50%|#####     | 1/2 [00:00<?, ?it/s]",
        "",
        "2026-11-30T08:18:12 | GPTQ | METRIC - time 1.29s",
    ):
        progress.take(line)
    assert drawn == [
        ("Calibrating", 2, 31, "0 of 32"),
        ("Propagating", 2, 31, "30 of 32"),
        ("Compressing model", 210, 210, ""),
        ("quantizing model.layers.4", 4, 30, ""),
        ("", 1, 2, ""),
    ]
    assert list(progress.said) == ["2026-11-30T08:18:12 | GPTQ | METRIC - time 1.29s"]


def test_lines_come_whole_however_they_are_cut() -> None:
    import io

    class Pieces(io.BytesIO):
        def read1(self, size: int = -1) -> bytes:
            return super().read1(3)

    assert list(lines_of(io.BufferedReader(Pieces("a bär\rcd\n\nlast".encode())))) == ["a bär", "cd", "", "last"]
    assert list(lines_of(Pieces("a bär\rcd\n\nlast".encode()))) == ["a bär", "cd", "", "last"]


def test_group_size_that_does_not_divide(model: Path, tmp_path: Path, stand_in: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(model), "--method", "int8", "--out", str(tmp_path / "out"), "--python", stand_in, "--group-size", "48"]
    assert main(arguments) == 1
    assert "--group-size 48 does not divide 64" in capsys.readouterr().err


def test_programs_are_python() -> None:
    for tool in METHODS.values():
        compile(PROGRAMS[tool.package], tool.package, "exec")
