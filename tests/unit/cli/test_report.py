"""The start-up report's arithmetic, and the doctor's and the planner's verdicts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import doctor, main
from octavo.cli.doctor import Check
from octavo.cli.plan import model_needs
from octavo.cli.report import capacity, report_rows, server_url, startup_report
from octavo.config.types import NodesConfig, ParallelConfig
from octavo.errors import UnsupportedModel
from octavo.frontend.http.settings import ServerSettings
from octavo.protocol.engine import EngineReady, Phase
from tests.support.engine_config import tiny_config

GIB = 2**30


def ready(**changes: Any) -> EngineReady:
    values: dict[str, Any] = {
        "pid": 1,
        "num_blocks": 1001,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_model_len": 512,
        "vocab_size": 1000,
        "weights_bytes": 2 * GIB,
        "cache_bytes": 3 * GIB,
        "activation_bytes": GIB,
        "total_bytes": 8 * GIB,
        "other_bytes": GIB,
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "attention": "torch",
        "phases": [Phase("weights", 1.5), Phase("warm-up", 0.25)],
        "warnings": ["Something small."],
    }
    return EngineReady(**{**values, **changes})


def test_the_report_adds_up() -> None:
    rows = dict(report_rows(ready(), tiny_config()))
    assert rows["Weights"] == "2.0 GiB"
    assert rows["Left free"] == "1.0 GiB of 8.0 GiB host memory"
    assert rows["Fits"].startswith("16,000 tokens: 31 x 512 (the longest request) or 15 x 1,000; at most 64")
    assert rows["Started in"] == "1.8 s, weights 1.5, warm-up 0.2"


def test_ranks_of_a_host_share_its_memory() -> None:
    config = tiny_config()
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tensor=2))
    assert dict(report_rows(ready(total_bytes=16 * GIB), config))["Left free"] == "3.0 GiB of 16.0 GiB host memory"
    gpu = dataclasses.replace(config, device=dataclasses.replace(config.device, kind="cuda"))
    assert dict(report_rows(ready(total_bytes=16 * GIB), gpu))["Left free"] == "9.0 GiB of 16.0 GiB GPU memory"


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tensor": 2}, "2 (2 to a layer); the sizes below are those of the first"),
        ({"pipeline": 2}, "2 (2 stages); the sizes below are those of the first"),
        ({"tensor": 2, "pipeline": 3, "data": 2}, "6 (3 stages, 2 to a layer); the sizes below are those of the first of each replica"),
        ({"tensor": 4, "nodes": NodesConfig(count=2)}, "4 on 2 hosts (4 to a layer); the sizes below are those of the first"),
        ({"tensor": 2, "shared_gpus": 1}, "2 that share 1 GPU (2 to a layer); the sizes below are those of the first"),
        ({"tensor": 4, "executor": "ray"}, "4 placed by Ray (4 to a layer); the sizes below are those of the first"),
    ],
)
def test_the_report_says_who_computes_it_together(parallel: dict[str, Any], words: str) -> None:
    config = dataclasses.replace(tiny_config(), parallel=ParallelConfig(**parallel))
    assert dict(report_rows(ready(), config))["Ranks"] == words
    assert "Ranks" not in dict(report_rows(ready(), tiny_config()))


def test_the_report_names_what_the_weights_are_stored_as() -> None:
    config = tiny_config()

    def weights(kinds: dict[str, int], **model: Any) -> str:
        changed = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
        return dict(report_rows(ready(weights_kinds=kinds), changed))["Weights"]

    mixed = {"bfloat16": GIB // 2, "4-bit groups": GIB * 3 // 2}
    assert weights(mixed, quantization="awq") == "2.0 GiB, awq, 4-bit groups 1.5 GiB + bfloat16 512.0 MiB"
    assert weights({"bfloat16": 2 * GIB}) == "2.0 GiB, bfloat16"
    assert weights({"4-bit groups": 2 * GIB}, path="/m.gguf") == "2.0 GiB, GGUF, 4-bit groups"
    assert weights({"bfloat16": 2 * GIB}, quantization="fp8", load_format="dummy") == "2.0 GiB, made up as fp8, bfloat16"


@pytest.mark.parametrize(("blocks", "tokens", "fit"), [(1, 16, 0), (2, 16, 1), (2, 17, 0), (3, 17, 1), (11, 1, 10)])
def test_capacity_counts_whole_blocks_without_the_reserved_one(blocks: int, tokens: int, fit: int) -> None:
    assert capacity(ready(num_blocks=blocks), tokens) == fit


def test_off_a_terminal_the_report_is_plain_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    startup_report(ready(), tiny_config(), ServerSettings(port=8123))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "KV cache:        3.0 GiB = 1,001 blocks of 16 tokens, float32" in captured.err
    assert "Serving at:      http://localhost:8123" in captured.err
    assert "warning: Something small." in captured.err
    assert "\x1b" not in captured.err


def test_what_was_warned_of_before_is_not_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    """`prepare_launch` logs what the settings gave reason for."""
    config = dataclasses.replace(tiny_config(), warnings=("There are no compiled CPU kernels.",))
    startup_report(ready(warnings=["There are no compiled CPU kernels.", "Something small."]), config)
    said = capsys.readouterr().err
    assert "compiled" not in said
    assert said.count("warning: Something small.") == 1


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (ServerSettings(), "http://localhost:8000"),
        (ServerSettings(host="0.0.0.0"), "http://localhost:8000"),
        (ServerSettings(host="::1", port=1), "http://[::1]:1"),
        (ServerSettings(host="example.org"), "http://example.org:8000"),
        (ServerSettings(uds="/tmp/s"), "unix:/tmp/s"),
    ],
)
def test_the_address_is_one_that_works(settings: ServerSettings, url: str) -> None:
    assert server_url(settings) == url


def test_the_doctor_is_content_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_port", lambda port: Check("Port", "ok", f"{port} is free"))
    monkeypatch.setattr(doctor, "check_memory", lambda: Check("Memory", "ok", "enough"))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("Python", "torch", "GPU", "Memory", "Model cache", "Port"):
        assert name in out
    assert "Everything Octavo needs is here." in out


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without importing torch in a process of its own, which takes seconds."""
    monkeypatch.setattr(doctor, "check_torch", lambda: Check("torch", "ok", "x"))


@pytest.mark.usefixtures("quick")
def test_the_doctor_names_a_missing_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "required_packages", lambda: {"no-such-package": "1", "numpy": "999"})
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  Packages" in out
    assert "missing: no-such-package; too old: numpy" in out
    assert "pip install --upgrade octavo" in out
    assert "1 problem to solve." in out


def test_the_doctor_reads_requirements_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.9", "uvloop>=0.21; sys_platform != 'win32'", "pytest>=8; extra == 'test'", "rich"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert doctor.required_packages() == {"torch": "2.9", "uvloop": "0.21", "rich": "0"}


def test_the_doctor_sees_a_taken_port() -> None:
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        port = s.getsockname()[1]
        check = doctor.check_port(port)
    assert check.status == "warn"
    assert f"PORT={port + 1}" in check.advice


@pytest.mark.usefixtures("quick")
def test_a_check_that_fails_itself_is_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise RuntimeError("oh")

    monkeypatch.setattr(doctor, "check_memory", broken)
    checks = {c.name: c for c in doctor.examine(8000)}
    assert checks["Memory"] == Check("Memory", "warn", "could not be checked (RuntimeError: oh)")


def test_the_doctor_finds_a_model_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "new" / "folder"))
    assert doctor.check_model_cache().status == "ok"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    check = doctor.check_model_cache()
    assert check.status == "fail"
    assert "set OCTAVO_HOME" in check.advice


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_the_doctor_knows_a_file_system_that_keeps_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", "/proc")
    monkeypatch.setattr("os.access", lambda path, mode: True)  # as root
    check = doctor.check_model_cache()
    assert check.status == "fail"
    assert "/proc cannot be written to" in check.advice


@pytest.mark.parametrize("port", ["99999", "abc", "0", "-1", "8k", "1" * 5000])
def test_the_doctor_refuses_what_is_no_port(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["doctor", "--port", port]) != 0
    assert "is no port: give a whole number from 1 to 65535" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    assert {c["status"] for c in json.loads(capsys.readouterr().out)} <= {"ok", "warn", "fail"}


LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def test_needs_of_a_known_model() -> None:
    needs = model_needs(LLAMA_8B)
    assert needs.parameters == pytest.approx(8.03e9, rel=0.002)
    assert needs.cache_values_per_token == 2 * 32 * 8 * 128
    compressed = model_needs({**LLAMA_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert compressed.cache_values_per_token == 32 * 576
    with pytest.raises(UnsupportedModel, match="num_hidden_layers"):
        model_needs({"hidden_size": 4})


def test_plan_over_several_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**LLAMA_8B, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def rows(*flags: str) -> dict[str, str]:
        assert main(["plan", str(tmp_path), "--memory", "24G", *flags]) == 0
        return {line[:17].strip(): line[17:].strip() for line in capsys.readouterr().out.splitlines()}

    one, two, sixteen, stages = rows(), rows("-tp", "2"), rows("-tp", "16"), rows("-tp", "2", "-pp", "4")
    said = [next(v for k, v in part.items() if k.startswith("cache")) for part in (one, two, sixteen, stages)]
    assert [value.split()[-2] for value in said] == ["128.0", "64.0", "16.0", "16.0"]  # eight heads, which sixteen keep twice
    assert any("8: 4 x 2; the sizes below are those of each" in value for value in stages.values())
    for flags, words in ((["-tp", "3"], "--tensor-parallel-size 3: 32 attention heads"), (["-pp", "33"], "the model has 32 layers")):
        assert main(["plan", str(tmp_path), "--memory", "24G", *flags]) == 1
        assert words in capsys.readouterr().err


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**LLAMA_8B, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--memory", "24G"]) == 0
    out = capsys.readouterr().out
    assert "8.03 billion parameters" in out
    assert "128.0 KiB" in out
    assert main(["plan", str(tmp_path / "config.json"), "--memory", "24G"]) == 0
    assert capsys.readouterr().out == out
    assert main(["plan", str(tmp_path), "--memory", "16G", "--dtype", "float32"]) == 1
    assert "more are needed" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--memory", "18G", "--gpu-memory-utilization", "0.9"]) == 0
    assert "--max-model-len" in capsys.readouterr().out


def test_plan_takes_limits_as_serve_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**LLAMA_8B, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}

    def plan(*flags: str, **more: object) -> tuple[int, str, str]:
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        code = main(["plan", str(tmp_path), *flags])
        output = capsys.readouterr()
        return code, output.out, output.err

    for flags, words in (
        (["--memory", "24G", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: must be greater than 0 and at most 1, got 1.5"),
        (["--memory", "24G", "--gpu-memory-utilization", "nan"], "must be greater than 0 and at most 1, got nan"),
        (["--memory", "24G", "--gpu-memory-utilization", "0"], "must be greater than 0 and at most 1, got 0"),
        (["--memory", "0"], "--memory: '0' must be at least 1"),
        (["--memory=-8G"], "must be at least 1"),
        (["--memory", "24G", "--max-model-len", "1"], "--max-model-len must be at least 2, got 1"),
    ):
        code, out, err = plan(*flags)
        assert code != 0 and not out and words in err
    code, out, err = plan("--memory", "24G", "--max-model-len", "1m")
    assert code == 0 and " x 8,192" in out
    assert err == "octavo: warning: --max-model-len 1000000 is beyond what the model was made for: planning with 8192.\n"
    code, out, err = plan("--memory", "24G", "--max-model-len", "16K", rope_scaling={"type": "linear", "factor": 2.0})
    assert code == 0 and " x 16,384" in out and not err


def test_plan_heeds_how_weights_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**LLAMA_8B, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}

    def plan(quantization: object, *flags: str) -> str:
        (tmp_path / "config.json").write_text(
            json.dumps(config if quantization is None else {**config, "quantization_config": quantization})
        )
        main(["plan", str(tmp_path), "--memory", "24G", *flags])
        output = capsys.readouterr()
        return next((line[17:].strip() for line in output.out.splitlines() if line.strip().startswith("weights")), output.err)

    def gibibytes(row: str) -> float:
        assert row.split()[1] == "GiB"
        return float(row.split(maxsplit=1)[0])

    layers, rest = 6.98e9, 2 * 128256 * 4096 * 2  # weights in layers; bytes of embedding and head
    assert gibibytes(plan(None)) == pytest.approx(8.03e9 * 2 / 2**30, rel=0.01)
    assert gibibytes(plan(awq)) == pytest.approx((layers * (4 + 24 / 128) / 8 + rest) / 2**30, rel=0.02)
    assert plan(awq).endswith("(awq)")
    for row in (plan({"quant_method": "fp8"}), plan(None, "--quantization", "fp8"), plan(None, "--quantization", "int8")):
        assert gibibytes(row) == pytest.approx((layers + rest) / 2**30, rel=0.03)
    assert gibibytes(plan(awq, "--dtype", "float32")) > gibibytes(plan(awq)) + 1.5
    assert "'quip#', which Octavo does not read" in plan({"quant_method": "quip#", "bits": 2})
    assert "packed as version 'gemv' are not read" in plan({**awq, "version": "gemv"})
    assert "are quantised with awq. Leave the option out" in plan(awq, "--quantization", "fp8")
    assert "the weights of" in plan(None, "--quantization", "awq") and "is no GGUF file" in plan(None, "--quantization", "gguf")
    assert "Give one of them" in plan(None, "--quantization", "fp8", "--dtype", "int4")
