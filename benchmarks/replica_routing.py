"""What routing by prefix keeps of a cache that is split over replicas: the real scheduler and prefix tree, no model.

    PYTHONPATH=src python benchmarks/replica_routing.py

Requests with 50 shared beginnings go to 4 replicas, by the router and in turns, and to a single engine with four times the cache: its
hit rate is what can be reached. A fleet routes by the bytes of the prompt's text, in one process or in two that know nothing of each other.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from pathlib import Path
from typing import Any

from octavo.core.loop import EngineCore
from octavo.core.simulate import InstantExecutor, simulation_config
from octavo.fleet.call import KEY_CHUNK, make_call
from octavo.frontend.routing import CHUNK, PrefixRouter
from octavo.protocol.engine import NewRequest
from octavo.protocol.params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "replica_routing.json"
PREFIXES, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 50, 1024, 128, 64
CACHE_TOKENS, BLOCK = 24_576, 16
"""Of a replica: about half of all shared beginnings, if nothing else were there."""


def workload(requests: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    prefixes = [[source.randrange(1 << 16) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    return [source.choice(prefixes) + [source.randrange(1 << 16) for _ in range(OWN_TOKENS)] for _ in range(requests)]


def body_of(prompt: list[int]) -> bytes:
    """A request with this prompt as text: four letters a token."""
    return json.dumps({"model": "m", "prompt": "".join(f"{token:04x}" for token in prompt)}).encode()


def play(prompts: list[list[int]], replicas: int, cache_tokens: int, routing: str, at_once: int, routers: int = 1) -> dict[str, Any]:
    """All prompts, `at_once` of them live at any time.

    Args:
        routing: prefix (tokens, as one server does), text (as a fleet does), in turns, or none.
        routers: processes that route, in turns; each sees its own requests only.
    """
    bodies = [body_of(prompt) for prompt in prompts] if routing == "text" else []
    config = simulation_config(max_num_seqs=256, max_model_len=PREFIX_TOKENS + OWN_TOKENS + OUTPUT_TOKENS, block_size=BLOCK)
    cores = [EngineCore(config, InstantExecutor(config, cache_tokens // BLOCK + 1)) for _ in range(replicas)]
    chunk, names = KEY_CHUNK if routing == "text" else CHUNK, [f"replica-{i}" for i in range(replicas)] if routers > 1 else None
    all_routers = [PrefixRouter(replicas, chunk=chunk, names=names) for _ in range(routers)]
    homes: dict[str, int] = {}
    sent, live, most, choosing = 0, 0, 0, 0.0
    while sent < len(prompts) or live:
        while sent < len(prompts) and live < at_once:
            router = all_routers[sent % routers]
            began = time.perf_counter()
            if routing == "text":
                home = router.choose(make_call("POST", "/v1/completions", b"", [], bodies[sent], None).key)
            else:
                home = router.choose(prompts[sent]) if routing == "prefix" else sent % replicas
            choosing += time.perf_counter() - began
            router.began(home, str(sent), 1)
            params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=0)
            cores[home].add(NewRequest(str(sent), prompts[sent], params, arrival_time=float(sent)))
            homes[str(sent)] = home
            sent, live = sent + 1, live + 1
        most = max(most, *(sum(router.loads[i].sequences for router in all_routers) for i in range(replicas)))
        for home, core in enumerate(cores):
            for delta in core.step().deltas if core.has_work() else ():
                if delta.finish_reason is not None:
                    all_routers[int(delta.request_id) % routers].ended(home, delta.request_id)
                    live -= 1
    stats = [core.stats() for core in cores]
    hits, queries = sum(s.prefix_hits for s in stats), sum(s.prefix_queries for s in stats)
    shares = [list(homes.values()).count(i) for i in range(replicas)]
    return {
        "replicas": replicas,
        "routing": routing,
        "routers": routers,
        "hit_rate": round(hits / queries, 4),
        "fewest_and_most_requests": [min(shares), max(shares)],
        "most_live_on_one": most,
        "choosing_us": round(choosing / len(prompts) * 1e6, 1),
    }


def compare(requests: int, at_once: int, seed: int = 0) -> dict[str, Any]:
    """The runs, and the router's hit rate as a part of the single engine's."""
    prompts = workload(requests, seed)
    single = play(prompts, 1, 4 * CACHE_TOKENS, "none", at_once)
    routed = play(prompts, 4, CACHE_TOKENS, "prefix", at_once)
    turns = play(prompts, 4, CACHE_TOKENS, "in turns", at_once)
    fleet = play(prompts, 4, CACHE_TOKENS, "text", at_once)
    two = play(prompts, 4, CACHE_TOKENS, "text", at_once, routers=2)
    runs = {"single": single, "routed": routed, "in_turns": turns, "fleet": fleet, "fleet_two_routers": two}
    ratios = {
        f"{name}_over_single": round(runs[name]["hit_rate"] / single["hit_rate"], 4) for name in ("routed", "fleet", "fleet_two_routers")
    }
    return {**runs, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 48])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = {str(n): compare(args.requests, n) for n in args.at_once}
    print(f"{'live':>5} {'':<22} {'hit rate':>9} {'requests of each':>17} {'most live':>10}")
    for live, result in results.items():
        for label, key in (
            ("one, 4 times the cache", "single"),
            ("4, by prefix", "routed"),
            ("4, in turns", "in_turns"),
            ("4, a fleet", "fleet"),
            ("4, a fleet, 2 routers", "fleet_two_routers"),
        ):
            run = result[key]
            low, high = run["fewest_and_most_requests"]
            print(f"{live:>5} {label:<22} {run['hit_rate']:>9.1%} {f'{low}-{high}':>17} {run['most_live_on_one']:>10}")
        print(
            f"{live:>5} by prefix / one: {result['routed_over_single']:.1%}; choosing takes {result['routed']['choosing_us']} us a request, "
            f"in a fleet {result['fleet']['choosing_us']}"
        )
    report = {"benchmark": "replica_routing", "python": platform.python_version(), "requests": args.requests, "live": results}
    args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
