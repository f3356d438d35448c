"""/v1/files and /v1/batches: uploads, every line answered once, cancel, expiry, restart in the middle."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.frontend.http.batches.records import file_record
from octavo.frontend.http.batches.store import BatchStore, claim_folder
from octavo.frontend.http.server import state_folder
from octavo.frontend.http.settings import ServerSettings
from tests.http.test_every_field import FEW, places_in, put
from tests.support.http_server import RunningServer, running_server, wait_until
from tests.support.scripts import token_ids

ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, prompt: str = "hi", url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": prompt, **body}})


def upload(server: RunningServer, content: str | bytes, headers: dict[str, str] | None = None, **fields: str) -> dict[str, Any]:
    raw = content.encode() if isinstance(content, str) else content
    reply = server.http.post("/v1/files", files={"file": ("in.jsonl", raw)}, data={"purpose": "batch", **fields}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def create(server: RunningServer, content: str | bytes, endpoint: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    reply = server.post("/v1/batches", {"input_file_id": upload(server, content)["id"], "endpoint": endpoint, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def finished(server: RunningServer, batch: dict[str, Any]) -> dict[str, Any]:
    path = f"/v1/batches/{batch['id']}"
    assert wait_until(lambda: server.http.get(path).json()["status"] in ENDED, 15)
    return server.http.get(path).json()


def rows(server: RunningServer, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    found = [json.loads(x) for x in server.http.get(f"/v1/files/{file_id}/content").text.splitlines()]
    assert len({r["custom_id"] for r in found}) == len(found)
    return {r["custom_id"]: r for r in found}


def test_files(server: RunningServer) -> None:
    file = upload(server, "a\nb\n", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    assert (file["object"], file["bytes"], file["filename"], file["purpose"]) == ("file", 4, "in.jsonl", "batch")
    assert file["expires_at"] == file["created_at"] + 3600
    path = f"/v1/files/{file['id']}"
    assert server.http.get(path).json() == file
    assert server.http.get(f"{path}/content").content == b"a\nb\n"
    assert file in server.http.get("/v1/files", params={"purpose": "batch"}).json()["data"]
    assert server.http.get("/v1/files", params={"purpose": "batch_output"}).status_code == 200
    for listed, params in (("/v1/files", {"purpose": "other"}), ("/v1/files", {"after": "file-x"}), ("/v1/batches", {"after": "batch_x"})):
        refused = server.http.get(listed, params=params)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == next(iter(params))
    assert server.http.delete(path).json() == {"id": file["id"], "object": "file", "deleted": True}
    assert [server.http.request(m, p).status_code for m, p in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path))] == [404] * 3


@pytest.mark.parametrize(
    ("given", "status", "content"),
    [
        ("bytes=1-3", 206, b"123"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=8-99", 206, b"89"),
        ("bytes=3-1", 200, b"0123456789"),
        ("bytes=-", 200, b"0123456789"),
        ("zork", 200, b"0123456789"),
        ("bytes=0-1,4-5", 200, b"0123456789"),
        ("bytes=" + "9" * 5000 + "-", 200, b"0123456789"),
        ("bytes=10-", 416, None),
    ],
)
def test_a_part_of_a_file(server: RunningServer, given: str, status: int, content: bytes | None) -> None:
    path = f"/v1/files/{upload(server, '0123456789')['id']}/content"
    reply = server.http.get(path, headers={"Range": given})
    assert reply.status_code == status
    if content is not None:
        assert reply.content == content
    else:
        assert reply.json()["error"]["code"] == 416
        assert reply.headers["content-range"] == "bytes */10"


def test_files_are_listed_in_pages(server: RunningServer) -> None:
    made = [upload(server, "x")["id"] for _ in range(3)]
    first = server.http.get("/v1/files", params={"limit": 2}).json()
    assert [f["id"] for f in first["data"]] == made[:0:-1]
    assert first["has_more"]
    second = server.http.get("/v1/files", params={"limit": 1, "after": first["last_id"]}).json()
    assert [f["id"] for f in second["data"]] == made[:1]


@pytest.mark.parametrize(
    "request_",
    [
        {"json": {"purpose": "batch"}},
        {"data": {"purpose": "batch"}},
        {"files": {"file": ("a", b"x")}},
        {"files": {"file": ("a", b"x")}, "data": {"purpose": "fine-tune"}},
        {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "9"}},
        {"content": b"--x\r\n", "headers": {"Content-Type": "multipart/form-data"}},
        {"content": b"--x\r\nbroken", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        {"content": b"", "headers": {"Content-Type": "multipart/form-data; boundary=x; charset=nope"}},
        {"files": [("file", ("a", b"x")), ("file", ("b", b"y"))], "data": {"purpose": "batch"}},
    ],
)
def test_bad_uploads(server: RunningServer, request_: dict[str, Any]) -> None:
    reply = server.http.post("/v1/files", **request_)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]


def test_uploads_are_bounded(checkpoint: Path) -> None:
    with running_server(checkpoint, ServerSettings(max_file_bytes=100_000, file_store_bytes=150_000)) as server:
        big = server.http.post("/v1/files", files={"file": ("a", b"x" * 300_000)}, data={"purpose": "batch"})
        assert big.status_code == 413
        first = upload(server, "x" * 100_000)
        full = server.http.post("/v1/files", files={"file": ("a", b"x" * 90_000)}, data={"purpose": "batch"})
        assert full.status_code == 413
        server.http.delete(f"/v1/files/{first['id']}")
        upload(server, "x" * 90_000)


def test_a_batch_with_good_and_bad_lines(server: RunningServer) -> None:
    content = "\n".join(
        [
            line("one"),
            line("short", max_tokens=1),
            line("empty", prompt=""),
            line("elsewhere", url="/v1/chat/completions"),
            "not json",
            "",
            line("one"),
            line("stream", stream=True),
        ]
    )
    batch = create(server, content, metadata={"a": "b"})
    assert (batch["object"], batch["status"]) == ("batch", "validating")
    assert batch["expires_at"] == batch["created_at"] + 24 * 3600
    done = finished(server, batch)
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 7, "completed": 2, "failed": 5}
    assert done["metadata"] == {"a": "b"}
    assert done["completed_at"] >= done["in_progress_at"] >= done["created_at"]
    good, bad = rows(server, done["output_file_id"]), rows(server, done["error_file_id"])
    assert good["one"]["response"]["body"]["choices"][0]["text"] == "hello world"
    assert good["short"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert set(good) == {"one", "short"}
    assert set(bad) == {"empty", "elsewhere", "line-5", "one#line-7", "stream"}
    assert bad["empty"]["response"]["status_code"] == 400
    assert bad["empty"]["error"]["param"] == "prompt"
    assert bad["line-5"]["response"] is None
    outputs = server.http.get("/v1/files", params={"purpose": "batch_output"}).json()["data"]
    assert {done["output_file_id"], done["error_file_id"]} <= {f["id"] for f in outputs}


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_other_endpoints(server: RunningServer, endpoint: str) -> None:
    bodies = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 20}
    body = {k: v for k, v in bodies.items() if (k == "input") == (endpoint == "/v1/responses")}
    text = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body})
    done = finished(server, create(server, text, endpoint))
    assert "hello world" in json.dumps(rows(server, done["output_file_id"])["a"])


def test_an_empty_file_fails(server: RunningServer) -> None:
    done = finished(server, create(server, "\n\n"))
    assert done["status"] == "failed"
    assert done["errors"]["data"][0]["code"] == "empty_file"


@pytest.mark.parametrize(
    "content", [bytes(range(256)) * 40, b"\x1f\x8b\x08\n\n\xff", b"a,b,c\n1,2,3\n", b"[1]\n[2]\n", "[{}]".encode("utf-16")]
)
def test_a_file_of_something_else_is_one_error(server: RunningServer, content: bytes) -> None:
    batch = finished(server, create(server, content))
    assert (batch["status"], batch["error_file_id"], batch["output_file_id"]) == ("failed", None, None)
    (error,) = batch["errors"]["data"]
    assert error["code"] == "invalid_file"
    assert "JSON lines" in error["message"]


def test_a_byte_order_mark_is_no_part_of_the_first_line(server: RunningServer) -> None:
    batch = finished(server, create(server, b"\xef\xbb\xbf" + f"{line('a')}\n{line('b')}\n".encode()))
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_cancel(server: RunningServer) -> None:
    server.script("forever", token_ids("z") * 400, delay=0.02)
    batch = create(server, "\n".join([line("quick"), *(line(f"slow{i}", "forever", max_tokens=400) for i in range(3))]))
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 3)
    assert server.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    done = finished(server, batch)
    assert done["status"] == "cancelled"
    assert set(rows(server, done["output_file_id"])) == {"quick"}
    # Every line is in one of the files.
    bad = rows(server, done["error_file_id"])
    assert set(bad) == {f"slow{i}" for i in range(3)}
    assert {row["error"]["code"] for row in bad.values()} == {"batch_cancelled"}
    assert done["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelled"
    completed = finished(server, create(server, line("a")))
    assert server.post(f"/v1/batches/{completed['id']}/cancel").status_code == 400


def test_a_batch_that_is_cancelled_before_its_turn(server: RunningServer) -> None:
    server.script("forever", token_ids("z") * 400, delay=0.02)
    first = create(server, line("slow", "forever", max_tokens=400))
    second = create(server, "\n".join(line(f"b{i}") for i in range(5)))
    assert server.post(f"/v1/batches/{second['id']}/cancel").status_code == 200
    server.post(f"/v1/batches/{first['id']}/cancel")
    done = finished(server, second)
    assert (done["status"], done["request_counts"]) == ("cancelled", {"total": 5, "completed": 0, "failed": 5})
    assert set(rows(server, done["error_file_id"])) == {f"b{i}" for i in range(5)}
    assert finished(server, first)["status"] == "cancelled"


def test_an_empty_file_is_refused(server: RunningServer) -> None:
    reply = server.http.post("/v1/files", files={"file": ("a.jsonl", b"")}, data={"purpose": "batch"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "file")
    assert "empty" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_file_id": "file-nope"}, "input_file_id"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after"),
    ],
)
def test_bad_batches(server: RunningServer, body: dict[str, Any], param: str) -> None:
    file = upload(server, line("a"))
    reply = server.post("/v1/batches", {"input_file_id": file["id"], "endpoint": "/v1/completions", **body})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert server.http.get("/v1/batches/batch_nope").status_code == 404
    assert server.post("/v1/batches/batch_nope/cancel").status_code == 404


def test_batches_are_listed_in_pages(server: RunningServer) -> None:
    made = [create(server, line("a"))["id"] for _ in range(3)]
    page = server.http.get("/v1/batches", params={"limit": 2}).json()
    assert [b["id"] for b in page["data"]] == made[:0:-1]
    assert server.http.get("/v1/batches", params={"limit": 1, "after": page["last_id"]}).json()["data"][0]["id"] == made[0]


def test_keys_see_their_own_files_and_batches_only(checkpoint: Path) -> None:
    with running_server(checkpoint, ServerSettings(api_key=["one", "two"])) as server:
        one, two = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
        file = upload(server, line("a"), headers=one)
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        assert server.post("/v1/batches", body, headers=two).status_code == 400
        batch = server.post("/v1/batches", body, headers=one).json()
        path = f"/v1/batches/{batch['id']}"
        assert server.http.get(path, headers=two).status_code == 404
        assert server.http.get("/v1/files", headers=two).json()["data"] == []
        assert wait_until(lambda: server.http.get(path, headers=one).json()["status"] == "completed")
        assert server.http.get(path, headers=one).json()["request_counts"]["completed"] == 1


@contextlib.contextmanager
def stateful(checkpoint: Path, folder: Path) -> Iterator[RunningServer]:
    with running_server(checkpoint, ServerSettings(state_dir=str(folder), batch_concurrency=2)) as server:
        server.script("", "hello world")
        yield server


def test_a_batch_goes_on_after_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    with stateful(checkpoint, tmp_path) as server:
        server.script("slow", token_ids("z") * 400, delay=0.05)
        batch = create(server, "\n".join([line("a"), line("b"), line("c", "slow", max_tokens=400), line("d"), line("e")]))
        assert wait_until(lambda: len(server.fake.seen) >= 3)
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
    with stateful(checkpoint, tmp_path) as server:
        done = finished(server, batch)
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        assert set(rows(server, done["output_file_id"])) == set("abcde")
        assert len(server.fake.seen) < 5  # what was answered before is not asked again


def test_a_reply_cut_short_by_a_crash_is_made_again(checkpoint: Path, tmp_path: Path) -> None:
    with stateful(checkpoint, tmp_path) as server:
        server.script("never", token_ids("z") * 400, delay=1)
        batch = create(server, "\n".join([line("a"), line("b"), line("n1", "never"), line("n2", "never")]))
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 2)
    output = tmp_path / "files" / f"file-output-{batch['id'].removeprefix('batch_')}"
    content = output.read_bytes()
    assert content.count(b"\n") == 2
    output.write_bytes(content[:-20])
    (tmp_path / "files" / "file-leftover").write_bytes(b"of an upload that a crash cut short")
    with stateful(checkpoint, tmp_path) as server:
        done = finished(server, batch)
        assert done["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        assert set(rows(server, done["output_file_id"])) == {"a", "b", "n1", "n2"}
        assert not (tmp_path / "files" / "file-leftover").exists()


def died(folder: Path, batch: dict[str, Any], *lines: str) -> None:
    """Leave the state of a server that died with `lines` in work."""
    store = BatchStore(folder, max_bytes=1 << 20)
    record = store.batch(batch["id"], "")
    assert record is not None
    assert record["status"] not in ENDED
    for name in lines:
        store.begin_line(batch["id"], name)
    store.close()


def interrupted(checkpoint: Path, folder: Path) -> dict[str, Any]:
    with stateful(checkpoint, folder) as server:
        server.script("never", token_ids("z") * 400, delay=1)
        batch = create(server, "\n".join([line("n1", "never"), line("n2", "never"), line("c"), line("d")]))
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 2)
        assert set(server.app.state.context.batches.store.attempts(batch["id"])) == {"n1", "n2"}
    return batch


def test_a_line_that_killed_the_server_three_times_is_given_up(checkpoint: Path, tmp_path: Path) -> None:
    batch = interrupted(checkpoint, tmp_path)
    died(tmp_path, batch, "n1", "n2")
    died(tmp_path, batch, "n1")
    died(tmp_path, batch, "n2")
    died(tmp_path, batch, "n2")
    with stateful(checkpoint, tmp_path) as server:
        done = finished(server, batch)
        assert done["status"] == "completed"
        assert set(rows(server, done["output_file_id"])) == {"n1", "c", "d"}
        bad = rows(server, done["error_file_id"])
        assert {name: reply["error"]["code"] for name, reply in bad.items()} == {"n2": "server_died"}
        assert server.app.state.context.batches.store.attempts(batch["id"]) == {}


def test_lines_in_work_at_a_crash_are_tried_first(checkpoint: Path, tmp_path: Path) -> None:
    batch = interrupted(checkpoint, tmp_path)
    died(tmp_path, batch, "n1", "n2")
    with stateful(checkpoint, tmp_path) as server:
        server.script("never", token_ids("z") * 5, delay=0.2)
        store = server.app.state.context.batches.store
        assert wait_until(lambda: store.attempts(batch["id"]) == {"n1": 2, "n2": 2})
        assert finished(server, batch)["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    # Stopping a server in good order blames no line, however often.
    for _ in range(3):
        other = interrupted(checkpoint, tmp_path)
        store = BatchStore(tmp_path, max_bytes=1 << 20)
        assert store.attempts(other["id"]) == {}
        store.begin_line(other["id"], "\ud800")
        assert store.attempts(other["id"]) == {"\ud800": 1}
        record = store.batch(other["id"], "")
        assert record is not None
        store.put_batch(record | {"status": "cancelled"}, "")
        store.close()


def test_other_batches_go_on_beside_lines_that_are_tried_again(checkpoint: Path, tmp_path: Path) -> None:
    batch = interrupted(checkpoint, tmp_path)
    died(tmp_path, batch, "n1", "n2")
    with stateful(checkpoint, tmp_path) as server:
        server.script("never", token_ids("z") * 400, delay=1)
        store = server.app.state.context.batches.store
        assert wait_until(lambda: store.attempts(batch["id"]) == {"n1": 2, "n2": 2})
        for _ in range(2):
            other = finished(server, create(server, "\n".join(line(f"x{i}") for i in range(5))))
            assert other["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        assert store.attempts(batch["id"]) == {"n1": 2, "n2": 2}, "still at it, and the rest of its batch waits"
        assert server.http.get(f"/v1/batches/{batch['id']}").json()["status"] == "in_progress"
        # It can be cancelled there too.
        assert server.post(f"/v1/batches/{batch['id']}/cancel").status_code == 200
        assert finished(server, batch)["status"] == "cancelled"
        assert wait_until(lambda: not server.llm.live_requests())
        assert finished(server, create(server, line("y")))["status"] == "completed"


def test_the_last_try_of_a_line_is_made_while_no_other_is_in_work(checkpoint: Path, tmp_path: Path) -> None:
    batch = interrupted(checkpoint, tmp_path)
    died(tmp_path, batch, "n1")
    died(tmp_path, batch, "n1")
    with stateful(checkpoint, tmp_path) as server:
        server.script("never", token_ids("z") * 400, delay=1)
        store = server.app.state.context.batches.store
        assert wait_until(lambda: store.attempts(batch["id"]) == {"n1": 3})
        assert wait_until(lambda: len(server.fake.seen) == 1)
        other = create(server, line("x"))
        assert wait_until(lambda: server.http.get(f"/v1/batches/{other['id']}").json()["status"] == "in_progress")
        time.sleep(0.3)
        assert len(server.fake.seen) == 1, "the other batch has begun, and waits with its first line"
        assert server.post(f"/v1/batches/{batch['id']}/cancel").status_code == 200
        assert finished(server, other)["status"] == "completed"
        assert finished(server, batch)["status"] == "cancelled"


def test_the_input_of_a_batch_that_is_not_done_stays(checkpoint: Path, tmp_path: Path) -> None:
    with stateful(checkpoint, tmp_path) as server:
        server.script("never", token_ids("z") * 400, delay=1)
        batch = create(server, "\n".join([line("a"), line("n", "never")]))
        path = f"/v1/files/{batch['input_file_id']}"
        reply = server.http.delete(path)
        assert reply.status_code == 409
        assert (reply.json()["error"]["type"], reply.json()["error"]["param"]) == ("ConflictError", "file_id")
        assert batch["id"] in reply.json()["error"]["message"]
        assert server.http.get(f"{path}/content").status_code == 200
        # Nor does it expire.
        store = server.app.state.context.batches.store
        clock = store.clock
        store.insert_file(server.http.get(path).json() | {"expires_at": int(clock()) - 1}, "")
        assert server.http.get(path).status_code == 200
        assert server.post(f"/v1/batches/{batch['id']}/cancel").status_code == 200
        assert finished(server, batch)["status"] == "cancelled"
        assert server.http.get(path).status_code == 404, "it has expired meanwhile"
        other = create(server, line("a"))
        assert finished(server, other)["status"] == "completed"
        assert server.http.delete(f"/v1/files/{other['input_file_id']}").json()["deleted"] is True
        again = {"input_file_id": other["input_file_id"], "endpoint": "/v1/completions"}
        assert server.post("/v1/batches", again).json()["error"]["param"] == "input_file_id"


def test_a_batch_expires(checkpoint: Path, tmp_path: Path) -> None:
    with stateful(checkpoint, tmp_path) as server:
        server.script("never", token_ids("z") * 400, delay=1)
        batch = create(server, "\n".join([line("a"), *(line(f"n{i}", "never") for i in range(4))]), completion_window="1m")
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 2)
        stored = server.app.state.context.batches.store
        clock = stored.clock
        stored.clock = lambda: clock() + 61
        done = finished(server, batch)
        assert done["status"] == "expired"
        assert set(rows(server, done["output_file_id"])) == {"a"}
        bad = rows(server, done["error_file_id"])
        assert {r["error"]["code"] for r in bad.values()} == {"batch_expired"}
        assert set(bad) == {"n0", "n1", "n2", "n3"}
        assert done["request_counts"] == {"total": 5, "completed": 1, "failed": 4}


def test_a_lost_engine_interrupts_a_batch_instead_of_failing_its_lines(checkpoint: Path, tmp_path: Path) -> None:
    with stateful(checkpoint, tmp_path) as server:
        server.fake.state = "dead"
        batch = create(server, line("a"))
        assert wait_until(lambda: server.http.get(f"/v1/batches/{batch['id']}").json()["status"] == "in_progress")
    with stateful(checkpoint, tmp_path) as server:
        assert finished(server, batch)["request_counts"]["completed"] == 1


def test_live_requests_go_first(server: RunningServer) -> None:
    server.script("slow", token_ids("z") * 60, delay=0.01)
    server.fake.counters.waiting = 3
    try:
        batch = create(server, "\n".join(line(f"s{i}", "slow", max_tokens=60) for i in range(3)))
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
        server.fake.max_live = 0
        assert finished(server, batch)["request_counts"]["completed"] == 3
        assert server.fake.max_live == 1  # one at a time while others wait
    finally:
        server.fake.counters.waiting = 0


def test_expired_files_are_gone(tmp_path: Path) -> None:
    now = [1000.0]
    store = BatchStore(tmp_path, max_bytes=100, clock=lambda: now[0])
    (tmp_path / "files" / "file-a").write_bytes(b"12345")
    store.insert_file(file_record("file-a", "a", 5, "batch", 1000, 3600), "")
    assert store.used_bytes() == 5
    now[0] += 3601
    assert store.file("file-a", "") is None
    assert store.used_bytes() == 0
    assert not store.path("file-a").exists()
    store.close()


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "state"
    with claim_folder(folder), pytest.raises(ConfigError, match="Another server uses"), claim_folder(folder):
        pass
    with claim_folder(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"), claim_folder(tmp_path / "file"):
        pass


def test_the_default_folder_is_left_when_it_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    settings = ServerSettings(port=8765)
    with state_folder(settings) as first, state_folder(settings) as second:
        assert first.state_dir == str(tmp_path / "octavo" / "server-8765")
        assert second.state_dir is None
    with state_folder(ServerSettings(port=0)) as free:
        assert free.state_dir is None
    with claim_folder(tmp_path / "mine"), pytest.raises(ConfigError), state_folder(ServerSettings(state_dir=str(tmp_path / "mine"))):
        pass


def test_what_is_no_text_fails_its_line_only(server: RunningServer) -> None:
    batch = finished(server, create(server, "\n".join([line("bad\ud800"), line("good"), line("prompt", prompt="\udc00")])))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    assert list(rows(server, batch["output_file_id"])) == ["good"]
    assert set(rows(server, batch["error_file_id"])) == {"line-1", "prompt"}


def test_every_part_of_a_line_with_every_kind_of_value(server: RunningServer) -> None:
    """Each line gets one reply, whatever is in it, and none a 5xx."""
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": ["hi"], "max_tokens": 1, "stop": None}}
    lines = [put(good, place, value) for place in places_in(good) for value in FEW]
    content = "\n".join(json.dumps(one | ({"custom_id": f"l{i}"} if one["custom_id"] == "a" else {})) for i, one in enumerate(lines))
    batch = create(server, content + "\n\n[]\n5\n{\n\x00\n")
    assert wait_until(lambda: server.http.get(f"/v1/batches/{batch['id']}").json()["status"] in ENDED, 30)
    done = finished(server, batch)
    assert done["status"] == "completed"
    replies = rows(server, done["output_file_id"]) | rows(server, done["error_file_id"])
    assert len(replies) == done["request_counts"]["total"] == len(lines) + 4
    assert {r["response"]["status_code"] for r in replies.values() if r["response"]} <= {200, 400, 404}
    assert "internal_error" not in json.dumps(list(replies.values()))
