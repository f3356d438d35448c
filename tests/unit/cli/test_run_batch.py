"""`octavo run-batch`: every line gets an answer or its own error, and nothing is done twice."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.cli.files import claim_output
from octavo.cli.jobs import run_jobs
from octavo.cli.parser import CommandParser
from octavo.cli.run_batch import BatchLine, configure, finished_ids, read_batch, reading, reply_to
from octavo.errors import ConfigError
from octavo.frontend.http.batches import lines
from octavo.frontend.http.batches.lines import batch_lines
from tests.support.openai_stub import StubServer
from tests.unit.cli.conftest import ANSWER


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "x"}})


def replies(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(x) for x in path.read_text().splitlines()]
    assert len({r["custom_id"] for r in found}) == len(found)
    return {r["custom_id"]: r for r in found}


def test_a_batch_with_good_and_bad_lines(tmp_path: Path, engine_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]),
        line("text", prompt="hi", max_tokens=1),
        line("empty-prompt", prompt=""),
        line("wrong-model", prompt="hi", model="another"),
        line("embed", "/v1/embeddings", input="x"),
        line("unknown-url", "/v1/images"),
        line("stream", prompt="x", stream=True),
        "not json",
        "",
        line("chat"),
    ]
    source.write_text("\n".join(rows))
    command = ["run-batch", "-i", str(source), "-o", str(target), *engine_flags]
    assert main(command) == 0
    got = replies(target)
    assert got["chat"]["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
    assert got["chat"]["error"] is None
    assert got["chat"]["response"]["status_code"] == 200
    assert got["text"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert got["empty-prompt"]["response"]["status_code"] == 400
    assert got["empty-prompt"]["error"]["param"] == "prompt"
    assert got["wrong-model"]["response"]["status_code"] == 404
    assert got["embed"]["response"]["status_code"] == 400, "a model that generates does not embed"
    assert "url must be one of" in got["unknown-url"]["error"]["message"]
    assert "stream has no meaning" in got["stream"]["error"]["message"]
    assert "line 8 is not JSON" in got["line-8"]["error"]["message"]
    assert "used by an earlier line" in got["chat#line-10"]["error"]["message"]
    assert len(got) == 9

    before = target.read_bytes()
    assert main(command) == 0  # nothing is left to do, and no engine is started for it
    assert target.read_bytes() == before
    assert "9 of 9 requests are done already" in capsys.readouterr().out


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """The first run dies in the middle of a line; the second does only what is missing."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"r{i}", prompt=f"p{i}") for i in range(6)))
    whole = [
        json.dumps({"id": "x", "custom_id": f"r{i}", "response": {"status_code": 200, "body": {"ok": i}}, "error": None}) for i in (0, 3)
    ]
    target.write_text("\n".join(whole) + '\n{"id": "batch_req_y", "custom_id": "r1", "resp')
    with StubServer(lambda path, body: (200, {"echo": body["prompt"]})) as server:
        assert main(["run-batch", "-i", str(source), "-o", str(target), "--url", server.url, "--concurrency", "2"]) == 0
    assert sorted(b["prompt"] for b in server.bodies) == ["p1", "p2", "p4", "p5"]
    assert server.most_open <= 2
    got = replies(target)
    assert got["r0"]["response"]["body"] == {"ok": 0}
    assert got["r1"]["response"]["body"] == {"echo": "p1"}
    assert len(got) == 6


def test_an_output_file_that_is_something_else_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "letter.txt"
    source.write_text(line("a"))
    target.write_text("Dear Sir,\nhello\n")
    assert main(["run-batch", "-i", str(source), "-o", str(target)]) == 1
    assert "line 1 is not a batch reply" in capsys.readouterr().err
    assert target.read_text() == "Dear Sir,\nhello\n"


def test_text_without_an_end_of_line_is_not_cut_from_a_foreign_file(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    for content in ("Dear Sir,\nunfinished", "unfinished", '{"id": "something else"'):
        target.write_text(content)
        with pytest.raises(ConfigError):
            finished_ids(target)
        assert target.read_text() == content


async def test_a_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_wait(seconds: float) -> None:
        pass

    monkeypatch.setattr("asyncio.sleep", no_wait)
    answers = [(429, {}), (429, {}), (200, {"ok": True})]

    async def post(path: str, body: Any) -> tuple[int, Any]:
        return answers.pop(0)

    reply = await reply_to(BatchLine(1, "a", "/v1/completions", {}), post)
    assert (reply["response"]["status_code"], reply["error"]) == (200, None)


def test_missing_and_empty_inputs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_batch(tmp_path / "none")
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ConfigError, match="no request"):
        read_batch(tmp_path / "empty")


def test_an_input_of_something_else_is_one_error(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    for content in (bytes(range(256)) * 40, b"a,b\n1,2\n", b"3\n"):
        source.write_bytes(content)
        with pytest.raises(ConfigError, match="JSON lines"):
            read_batch(source)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + line("a", prompt="x").encode())
    (only,) = read_batch(source)
    assert (only.custom_id, only.error) == ("a", "")


def test_how_replies_are_read_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser("run-batch", "")
    configure(parser)
    options = parser.parse_args(["-i", "a", "-o", "b", "--tool-call-parser", "pythonic", "--reasoning-parser", "granite"])
    settings = reading(options)
    assert (settings.tool_call_parser, settings.reasoning_parser) == ("pythonic", "granite")
    assert reading(parser.parse_args(["-i", "a", "-o", "b", "--api-key", "k"])).api_key is None
    assert main(["run-batch", "-i", "a", "-o", "b", "--tool-call-parser", "telepathy"]) != 0
    assert "telepathy" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run-batch", "generate"])
def test_two_commands_do_not_write_the_same_output(
    tmp_path: Path, command: str, engine_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("r") if command == "run-batch" else '"hi"')
    with claim_output(target):
        assert main([command, "-i", str(source), "-o", str(target), *engine_flags]) != 0
        assert "Another octavo command is writing" in capsys.readouterr().err
        assert target.read_bytes() == b""
    assert not target.exists(), "nothing was written"
    assert main([command, "-i", str(source), "-o", str(target), *engine_flags]) == 0
    assert len(target.read_text().splitlines()) == 1


def test_outputs_that_are_no_files_are_anybodys() -> None:
    with claim_output(Path("/dev/null")), claim_output(Path("/dev/null")):
        pass


def test_what_is_no_text_fails_its_line_only(tmp_path: Path) -> None:
    """Half of a surrogate pair can be anywhere in JSON: in what is asked, and in what a server answers."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [line("a\ud800"), line("good"), line("echo", prompt="\udfff"), line("url", url="/\ud800"), line("last")]
    source.write_text("\n".join(rows))
    with StubServer(lambda path, body: (200, {"echo": body["prompt"]})) as server:
        assert main(["run-batch", "-i", str(source), "-o", str(target), "--url", server.url]) == 0
        got = replies(target)
        assert len(server.bodies) == 3
        assert main(["run-batch", "-i", str(source), "-o", str(target), "--url", server.url]) == 0
        assert len(server.bodies) == 3, "all are done"
    assert "half of a surrogate pair" in got["line-1"]["error"]["message"]
    assert got["echo"]["response"]["body"] == {"echo": "\udfff"}
    assert "url must be one of" in got["url"]["error"]["message"]
    assert got["good"]["error"] is got["last"]["error"] is None
    assert len(got) == 5


def test_a_response_in_the_background_is_refused() -> None:
    parsed = list(batch_lines([line("a", "/v1/responses", input="x", background=True), line("b", "/v1/responses", input="x")]))
    assert "background has no meaning" in parsed[0].error
    assert not parsed[1].error


def test_a_line_that_holds_more_than_a_request_may_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = line("lists", metadata={"a": [[]] * 60_000})
    monkeypatch.setattr(lines, "MAX_LINE_CHARS", 300_000)
    parsed = list(batch_lines([lists, line("long", prompt="x" * 300_000), line("good")]))
    assert "objects and lists; at most 50000" in parsed[0].error
    assert "at most 300000 are read" in parsed[1].error
    assert not parsed[2].error


async def test_of_many_failures_only_the_first_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def work(_job: int) -> int:
        raise ConfigError("no server")

    with pytest.raises(ConfigError):
        async for _ in run_jobs(range(50), work, 20):
            pass
    gc.collect()
    assert not caplog.records, "exceptions that nobody looked at are logged when their task goes"
