"""How fast the HTTP front streams: chunks a second from one server process, and the time it adds to a chunk.

The engine is a fake one in the server's own process that delivers a token to every live request at a fixed pace, so what is
measured is everything between the engine's message and the client's socket: detokenizing, the chunk, SSE, HTTP. Each token carries
the time at which the engine gave it; the client, in a process of its own, subtracts that from the time at which it read the chunk
(one clock, CLOCK_MONOTONIC).

    python -m benchmarks.http_stream [--streams 32] [--rate 2000] [--seconds 10] [--unpaced] [--runs 1] [--label NAME]

Every run is added to benchmarks/results/http_stream.json, with the load of the machine before it: server and client are two processes
that both want a core, so a run on a machine that does other things measures that. The server's CPU time a chunk says how much of a core
it needs, whoever else is there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "http_stream.json"
TOKENS = tuple(range(67, 93))
"""Ids that the fake engine goes through: the letters a to z of the tiny checkpoint, so that a chunk has a token a letter."""
TEXT = re.compile(rb'"content":"([a-z]*)"')


def server_main(pipe: Connection, streams: int, rate: float) -> None:
    """The server process: sends its port, serves until told to stop, then answers with its CPU seconds and what it sent when."""
    import uvicorn
    import uvloop
    from tests.support.fake_async_llm import FakeClient, fake_async_llm
    from tests.support.tiny_checkpoint import write_tiny_checkpoint

    from octavo.frontend.http.app import build_app
    from octavo.frontend.http.server import bound_socket
    from octavo.frontend.http.settings import ServerSettings
    from octavo.protocol.engine import NewRequest, TokenDelta

    sent: dict[str, deque[float]] = {}

    async def main() -> None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            llm = fake_async_llm(write_tiny_checkpoint(Path(folder), max_model_len=1 << 20))
            client: FakeClient = llm.fake  # type: ignore[attr-defined]
            live: dict[str, tuple[NewRequest, Any]] = {}

            def add(request: NewRequest, sink: Any, *, bounded: bool = True) -> None:
                live[request.request_id] = (request, sink)

            def abort(request_id: str, index: int | None = None) -> None:
                live.pop(request_id, None)

            client.add, client.abort = add, abort  # type: ignore[method-assign]

            async def beat() -> None:
                """One step of the engine after another: a token for every live request."""
                step, due = 0, time.monotonic()
                while True:
                    due = max(due + streams / rate, time.monotonic() - 0.5) if rate else time.monotonic()
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    now = time.monotonic()
                    for request, sink in list(live.values()):
                        sent.setdefault(sink.request_id, deque()).append(now)
                        sink.on_delta(TokenDelta(request.request_id, 0, [TOKENS[step % len(TOKENS)]]))
                    step += 1

            sock = stack.enter_context(bound_socket(ServerSettings(host="127.0.0.1", port=0)))
            app = build_app(llm, ServerSettings(disable_request_summary=True), served_model_names=["tiny"])
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", http="httptools", access_log=False))
            serving = asyncio.ensure_future(server.serve(sockets=[sock]))
            beating = asyncio.ensure_future(beat())
            while not server.started:
                await asyncio.sleep(0.01)
            started = time.process_time()
            pipe.send(sock.getsockname()[1])
            while not pipe.poll():
                await asyncio.sleep(0.05)
            pipe.send((time.process_time() - started, {name: list(times) for name, times in sent.items()}))
            beating.cancel()
            server.should_exit = True
            server.force_exit = True
            await serving
            await app.state.context.close()

    uvloop.run(main())


Chunk = tuple[float, int]
"""When it was read, and the tokens in it."""


async def read_stream(port: int, path: str, body: dict[str, Any], until: float) -> tuple[str, list[Chunk]]:
    """(id of the request, its chunks with text). A bare socket: the client must not be the limit."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode()
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(payload))
    )
    writer.write(payload)
    chunks: list[Chunk] = []
    request_id = ""
    try:
        while time.monotonic() < until:
            line = await reader.readline()
            if not line.startswith(b"data: {"):
                continue
            if not request_id:
                request_id = json.loads(line[6:])["id"]
            if (text := TEXT.search(line)) and text[1]:
                chunks.append((time.monotonic(), len(text[1])))
    finally:
        writer.close()
    return request_id, chunks


async def client_main(port: int, streams: int, seconds: float) -> dict[str, list[Chunk]]:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1 << 19, "ignore_eos": True}
    until = time.monotonic() + seconds
    return dict(await asyncio.gather(*(read_stream(port, "/v1/chat/completions", body, until) for _ in range(streams))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2000, help="chunks a second that the engine offers, all streams together")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--label", default="", help="what is being compared, for the results")
    parser.add_argument("--unpaced", action="store_true", help="no pause between steps: how many chunks a second there can be")
    options = parser.parse_args()
    for _ in range(options.runs):
        result = measure(options.streams, 0.0 if options.unpaced else options.rate, options.seconds)
        print("  ".join(f"{name}={value}" for name, value in result.items()))
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
        kept["runs"].append({"label": options.label} | result)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def measure(streams: int, rate: float, seconds: float) -> dict[str, Any]:
    """One run with a server of its own. rate 0: unpaced."""
    load = os.getloadavg()[0]
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server_main, args=(there, streams, rate), daemon=True)
    process.start()
    port = here.recv()
    began, client_cpu = time.monotonic(), time.process_time()
    read = asyncio.run(client_main(port, streams, seconds))
    elapsed, client_cpu = time.monotonic() - began, time.process_time() - client_cpu
    here.send("stop")
    cpu, sent = here.recv()
    process.join(10)
    process.kill()
    added = []
    for name, pieces in read.items():
        given = iter(sent[name])
        for got, tokens in pieces:
            oldest, *_ = [next(given) for _ in range(tokens)]
            if oldest > began + 1.0:  # after the start of all streams
                added.append((got - oldest) * 1e3)
    added.sort()
    chunks = sum(len(pieces) for pieces in read.values())
    return {
        "streams": streams,
        "offered_per_s": rate or None,
        "chunks_per_s": round(chunks / elapsed),
        "added_ms_p50": round(statistics.median(added), 2),
        "added_ms_p99": round(added[int(len(added) * 0.99)], 2),
        "server_cpu_us_per_chunk": round(cpu / chunks * 1e6, 1),
        "client_cpu_us_per_chunk": round(client_cpu / chunks * 1e6, 1),
        "load_before": round(load, 2),
    }


if __name__ == "__main__":
    main()
