"""The chat commands, and chat and complete end to end through pipes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.cli.backends import Loop, Piece
from octavo.cli.chat import Chat, Leave
from octavo.errors import InvalidRequest
from tests.support.openai_stub import MODELS, StubServer, completion_events
from tests.unit.cli.conftest import ANSWER


class Recorder:
    """A model that echoes, and remembers what it was asked."""

    name = "echo"

    def __init__(self) -> None:
        self.asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def stream(self, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> Iterator[Piece]:
        self.asked.append((messages, sampling))
        yield Piece("re: ")
        yield Piece(messages[-1]["content"], "stop", 3)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def chat(recorder: Recorder) -> Chat:
    return Chat(recorder, {}, recorder.stream)  # type: ignore[arg-type]


def roles(chat: Chat) -> str:
    return " ".join(f"{m['role'][0]}:{m['content']}" for m in chat.messages)


def test_a_conversation_grows_and_is_sent_whole(chat: Chat, recorder: Recorder) -> None:
    chat.take("/system be kind")
    chat.take("a")
    chat.take("b")
    assert roles(chat) == "s:be kind u:a a:re: a u:b a:re: b"
    assert [m["content"] for m in recorder.asked[1][0]] == ["be kind", "a", "re: a", "b"]


def test_undo_retry_clear_and_system(chat: Chat, recorder: Recorder) -> None:
    for line in ("a", "b", "/undo"):
        chat.take(line)
    assert roles(chat) == "u:a a:re: a"
    chat.take("/retry")
    assert len(recorder.asked) == 3
    assert roles(chat) == "u:a a:re: a"
    chat.take("/system s")
    chat.take("/clear")
    assert roles(chat) == "s:s"
    chat.take("/system")
    assert chat.messages == []
    with pytest.raises(InvalidRequest, match="no question"):
        chat.take("/retry")


def test_set_checks_what_it_is_given(chat: Chat, recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/set temperature 0.5")
    chat.take("/set stop=END")
    chat.take("hi")
    assert recorder.asked[0][1] == {"temperature": 0.5, "stop": "END"}
    with pytest.raises(InvalidRequest, match="temperature must be non-negative"):
        chat.take("/set temperature -1")
    with pytest.raises(InvalidRequest, match="no sampling parameter 'heat'"):
        chat.take("/set heat 3")
    chat.take("/set temperature")
    assert chat.sampling == {"stop": "END"}
    capsys.readouterr()
    chat.take("/set")
    assert capsys.readouterr().out == "stop=END\n"


def test_save_and_load(chat: Chat, tmp_path: Path) -> None:
    chat.take("a")
    path = tmp_path / "with space.json"
    chat.take(f"/save '{path}'")
    before = roles(chat)
    chat.take("/clear")
    chat.take(f"/load '{path}'")
    assert roles(chat) == before
    path.write_text("[]")
    with pytest.raises(InvalidRequest, match="not a saved conversation"):
        chat.take(f"/load '{path}'")


def test_help_stats_exit_and_nonsense(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/help")
    assert "/retry" in capsys.readouterr().out
    chat.take("hi")
    chat.take("/stats")
    assert "3 tokens" in capsys.readouterr().out
    with pytest.raises(Leave):
        chat.take("/exit")
    with pytest.raises(InvalidRequest, match="no command /nonsense"):
        chat.take("/nonsense")


def test_a_failed_turn_is_taken_back(chat: Chat) -> None:
    def fails(messages: Any, sampling: Any) -> Iterator[Piece]:
        raise InvalidRequest("too long")
        yield

    chat.take("a")
    chat.stream = fails
    with pytest.raises(InvalidRequest):
        chat.take("b")
    assert roles(chat) == "u:a a:re: a"


def test_several_lines_between_quotes_are_one_message(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('"""one\ntwo"""\n/exit\nnever\n'))
    assert chat.converse(interactive=False) == 0
    assert chat.messages[0]["content"] == "one\ntwo"
    assert len(chat.messages) == 2


def test_chat_through_a_pipe(engine_flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/bad\nagain\n"))
    assert main(["chat", *engine_flags]) == 1  # one line was no good
    captured = capsys.readouterr()
    assert captured.out == f"{ANSWER}\n{ANSWER}\n"
    assert "there is no command" in captured.err.lower()


def test_chat_with_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nmore\n"))
    with StubServer(lambda path, body: MODELS if path == "/v1/models" else completion_events("ok", chat=True)) as server:
        assert main(["chat", "--url", server.url, "--system", "S", "--temperature", "0", "--stop", "a", "--stop", "b"]) == 0
    assert capsys.readouterr().out == "ok\nok\n"
    last = server.bodies[-1]
    assert [m["content"] for m in last["messages"]] == ["S", "hi", "ok", "more"]
    assert (last["model"], last["temperature"], last["stop"], last["stream"]) == ("stub-model", 0.0, ["a", "b"], True)


def test_a_server_that_fails_within_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    events = [*completion_events("o", chat=True)[:1], {"error": {"message": "The engine died."}}]
    with StubServer(lambda path, body: MODELS if path == "/v1/models" else events) as server:
        assert main(["chat", "--url", server.url]) == 1
    assert "The engine died." in capsys.readouterr().err


def test_complete(engine_flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "Say: ", "--echo", "--max-tokens", "50", *engine_flags]) == 0
    assert capsys.readouterr().out == f"Say: {ANSWER}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["complete", *engine_flags]) == 2
    assert "is empty" in capsys.readouterr().err


def test_complete_with_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(lambda path, body: completion_events("xyz")) as server:
        assert main(["complete", "abc", "--url", server.url + "/v1", "--model", "m", "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "xyz\n"
    assert (server.bodies[0]["prompt"], server.bodies[0]["model"]) == ("abc", "m")
    assert server.headers[0]["authorization"] == "Bearer k"


def test_leaving_an_iteration_closes_the_source() -> None:
    closed = []

    async def numbers() -> Any:
        try:
            for i in range(10):
                yield i
        finally:
            closed.append(True)

    loop = Loop()
    try:
        for n in loop.iterate(numbers):
            if n == 2:
                break
        assert json.dumps(list(loop.iterate(numbers))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"
    finally:
        loop.stop()
    assert closed == [True, True]
