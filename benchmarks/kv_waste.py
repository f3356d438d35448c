"""How much KV memory is reserved for nothing: paged, and contiguous for comparison. Prints a table, writes results/kv_waste.json.

    PYTHONPATH=src python benchmarks/kv_waste.py

256 requests with 100-1024 tokens in and 100-1024 out go through the real scheduler and block pool; there is no model. Run once with
a cache that holds everybody, once with a quarter of that, so that admission has to hold requests back.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

from octavo.core.kv.waste import measure_waste

RESULTS = Path(__file__).parent / "results" / "kv_waste.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    runs = []
    print(
        f"{'block':>5} {'cache':>9} {'running':>8} {'preempted':>9} {'paged avg':>10} {'paged peak':>11} {'max_model_len':>14} {'prompt+max_tokens':>18}"
    )
    for block_size in args.block_sizes:
        everybody = args.requests * 2048 // block_size + 1
        for label, num_blocks in (("ample", everybody), ("tight", everybody // 4)):
            report = measure_waste(requests=args.requests, block_size=block_size, num_blocks=num_blocks, max_num_seqs=args.requests)
            runs.append({"cache": label, **report.as_dict()})
            print(
                f"{block_size:>5} {label:>9} {report.peak_running:>8} {report.preemptions:>9} {report.paged_average:>10.2%} "
                f"{report.paged_peak:>11.2%} {report.contiguous_max_model_len:>14.1%} {report.contiguous_max_tokens:>18.1%}"
            )
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"benchmark": "kv_waste", "python": platform.python_version(), "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
