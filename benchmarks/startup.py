"""What starting costs: `octavo --help`, `import octavo`, a server from process start to ready and to its first token, and its memory.

Memory is that of both processes after the first token, in MiB: resident (all that is mapped and present, libraries included), shared out
(PSS: what several processes map counts in equal parts) and anonymous (what no file backs: nobody else's, and not to be taken back). The
second server runs beside the first, with the same model.

python benchmarks/startup.py [--rounds 3] [-- flags of octavo serve]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from octavo.cli.bench.results import environment, print_table, write_json
from octavo.cli.http_client import HttpClient, HttpError

READY_LIMIT = 300.0


def best_of(rounds: int, run: Callable[[], float]) -> float:
    return min(run() for _ in range(rounds))


def time_command(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def memory_of(pid: int) -> dict[str, dict[str, float]]:
    """Of a server's front and of its engine, in MiB."""
    names = {"Rss:": "resident", "Pss:": "shared_out", "Anonymous:": "anonymous"}
    front = psutil.Process(pid)
    found = {}
    for role, process in (("front", front), *(("engine", child) for child in front.children(recursive=True))):
        lines = (line.split() for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines())
        found[role] = {names[line[0]]: round(int(line[1]) / 1024, 1) for line in lines if line[0] in names}
    return found


def memory_of_two(flags: list[str]) -> list[dict[str, dict[str, float]]]:
    """Of a server alone, and of a second one beside it."""
    servers, found = [], []
    try:
        for _ in range(2):
            port, start = free_port(), time.perf_counter()
            servers.append(start_server(port, flags))
            asyncio.run(_probe(port, servers[-1], start))
            found.append(memory_of(servers[-1].pid))
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        for server in servers:
            server.wait(timeout=60)
    return found


def start_server(port: int, flags: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "octavo", "serve", "--port", str(port), *flags], stderr=subprocess.DEVNULL)


def time_server(flags: list[str]) -> dict[str, float]:
    """Seconds from starting the process until /health answers, and until a request has its first token."""
    port = free_port()
    start = time.perf_counter()
    server = start_server(port, flags)
    try:
        return asyncio.run(_probe(port, server, start))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


async def _probe(port: int, server: subprocess.Popen[bytes], start: float) -> dict[str, float]:
    client = HttpClient(f"http://127.0.0.1:{port}")
    try:
        while True:
            # The port is bound first and connections wait in its queue: the first answer means ready.
            with contextlib.suppress(HttpError):
                if (await client.get("/health"))[0] == 200:
                    ready = time.perf_counter() - start
                    break
            if server.poll() is not None or time.perf_counter() - start > READY_LIMIT:
                raise SystemExit("The server did not start; run `octavo serve` to see why.")
            await asyncio.sleep(0.01)
        body = {"model": await client.model_name(), "prompt": "The capital of France is", "max_tokens": 1, "stream": True}
        async for _ in client.stream("/v1/completions", body):
            break
        return {"ready_s": ready, "first_token_s": time.perf_counter() - start}
    finally:
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up times.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "startup.json")
    parser.add_argument("flags", nargs="*", help="More flags of `octavo serve`, after --.")
    options = parser.parse_args()
    servers = [time_server(options.flags) for _ in range(options.rounds)]
    result: dict[str, Any] = {
        "help_s": best_of(5, lambda: time_command(sys.executable, "-m", "octavo", "--help")),
        "serve_help_s": best_of(5, lambda: time_command(sys.executable, "-m", "octavo", "serve", "--help")),
        "import_s": best_of(5, lambda: time_command(sys.executable, "-c", "import octavo")),
        "python_s": best_of(5, lambda: time_command(sys.executable, "-c", "")),
        "server_ready_s": min(s["ready_s"] for s in servers),
        "server_first_token_s": min(s["first_token_s"] for s in servers),
    }
    result = {key: round(value, 3) for key, value in result.items()}
    labels = {
        "python_s": "python alone",
        "import_s": "import octavo",
        "help_s": "octavo --help",
        "serve_help_s": "octavo serve --help",
        "server_ready_s": "server ready",
        "server_first_token_s": "first token",
    }
    print_table("Start-up, seconds from process start", [(label, f"{result[key]:.2f} s") for key, label in labels.items()])
    if Path("/proc/self/smaps_rollup").exists():
        alone, second = memory_of_two(options.flags)
        result["memory_mib"] = {"alone": alone, "second_beside_it": second}
        for label, server in (("one server", alone), ("a second beside it", second)):
            for role, sizes in server.items():
                print(
                    f"{label + ', ' + role:<28}" + "".join(f"{name.replace('_', ' ')} {size:7.1f} MiB   " for name, size in sizes.items())
                )
    write_json(
        options.output,
        {"bench": "startup", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **result, "environment": environment()},
    )
    print(f"Written to {options.output}.")


if __name__ == "__main__":
    main()
