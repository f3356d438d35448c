"""`octavo generate`: files in, JSON lines out, one bad line does not spoil the rest."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.cli.generate import _in_order, read_prompts
from tests.unit.cli.conftest import ANSWER


def test_a_text_file_gives_one_line_a_prompt_in_order(tmp_path: Path, engine_flags: list[str]) -> None:
    source, target = tmp_path / "p.txt", tmp_path / "o.jsonl"
    source.write_text("one\n\n  \ntwo\nthree\n")
    assert main(["generate", "-i", str(source), "-o", str(target), *engine_flags]) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(x["index"], x["prompt"], x["text"]) for x in lines] == [(0, "one", ANSWER), (3, "two", ANSWER), (4, "three", ANSWER)]
    assert {x["outputs"][0]["finish_reason"] for x in lines} == {"stop"}


def test_json_lines_have_sampling_parameters_and_errors_of_their_own(
    tmp_path: Path, engine_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "a", "max_tokens": 1},
        {"messages": [{"role": "user", "content": "b"}]},
        {"prompt": [5, 6, 7], "n": 2, "temperature": 1.0},
        {"prompt": "c", "temperature": -1},
        {"prompt": "d", "messages": []},
        {"messages": [{"role": "wizard", "content": "e"}]},
        {"prompt": "x" * 5000},
        "just text",
    ]
    source.write_text("\n".join([*map(json.dumps, rows), "{broken"]))
    assert main(["generate", "-i", str(source), *engine_flags]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [x["index"] for x in lines] == list(range(9))
    assert lines[0]["outputs"][0]["finish_reason"] == "length"
    assert lines[1]["text"] == lines[7]["text"] == ANSWER
    assert [o["index"] for o in lines[2]["outputs"]] == [0, 1]
    errors = {x["index"]: x["error"] for x in lines if "error" in x}
    assert set(errors) == {3, 4, 5, 6, 8}
    assert "line 4: temperature must be non-negative" in errors[3]
    assert "exactly one of prompt, prompt_token_ids, messages" in errors[4]
    assert "wizard" in errors[5]
    assert "not JSON" in errors[8]
    assert "9 of 9" in captured.err
    assert "5 failed" in captured.err


def test_all_bad_is_a_failure(tmp_path: Path, engine_flags: list[str]) -> None:
    source = tmp_path / "p.jsonl"
    source.write_text("{\n[1]\n")
    assert main(["generate", "-i", str(source), "-o", str(tmp_path / "o"), *engine_flags]) == 1


def test_an_empty_or_missing_file_is_named(tmp_path: Path, engine_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    assert main(["generate", "-i", str(tmp_path / "empty.txt"), *engine_flags]) == 1
    assert main(["generate", "-i", str(tmp_path / "none.txt"), *engine_flags]) == 1
    err = capsys.readouterr().err
    assert "empty.txt: there is no prompt in it" in err
    assert "none.txt: No such file or directory" in err


def test_stdin_is_told_apart_by_its_first_line(
    engine_flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "from json", "max_tokens": 1}\n'))
    assert main(["generate", *engine_flags]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "from json"


def test_odd_lines_are_kept_as_they_are() -> None:
    text = list(read_prompts(iter(["  a  \n", '{"prompt": "x"}\r\n']), json_lines=False))
    assert [p.prompt for p in text] == ["  a  ", '{"prompt": "x"}']


def test_results_are_put_in_order_as_soon_as_possible() -> None:
    async def check() -> list[int]:
        async def results() -> object:
            for i in (4, 0, 7, 2):
                yield {"index": i}

        return [r["index"] async for r in _in_order(results(), [0, 2, 4, 7])]  # type: ignore[arg-type]

    assert asyncio.run(check()) == [0, 2, 4, 7]


def test_the_input_is_never_written_over(tmp_path: Path, engine_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    source, link = tmp_path / "p.txt", tmp_path / "link.txt"
    source.write_text("one\n")
    link.symlink_to(source)
    for command, target in (("generate", source), ("generate", link), ("run-batch", source)):
        assert main([command, "-i", str(source), "-o", str(target), *engine_flags]) == 1
        assert "is the input" in capsys.readouterr().err
    assert source.read_text() == "one\n"


@pytest.mark.parametrize("command", ["generate", "run-batch"])
def test_an_output_that_cannot_be_written_is_told_before_loading(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "p.jsonl"
    source.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n')
    missing = tmp_path / "none" / "out"
    assert main([command, "-i", str(source), "-o", str(missing), "--model", "/no/such/model"]) == 1
    assert f"{missing}: No such file or directory" in capsys.readouterr().err
    assert main([command, "-i", str(source), "-o", str(tmp_path / "out"), "--model", "/no/such/model"]) == 1
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_load_leaves_the_last_results(tmp_path: Path) -> None:
    source, target = tmp_path / "p.txt", tmp_path / "out.jsonl"
    source.write_text("one\n")
    target.write_text("results\n")
    assert main(["generate", "-i", str(source), "-o", str(target), "--model", "/no/such/model"]) == 1
    assert target.read_text() == "results\n"
