"""Measure how many calls a second a bundle answers with batching, next to a program that calls it one by one.

    python benchmarks/service.py --json build/service.json --markdown build/service.md

`bench --throughput` finds the setting of the most calls back to back, on all processors that the process may use. Both are
measured in the same minute, each in a process of its own. Another program on the machine changes the ratio, because the one
that calls one by one has other threads.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import caption, command, positive, prepared, refuse_unknown
from models import ALL_SUBJECTS, subject
from table import Table, publish, seconds

from optimizer import export
from optimizer.tuning import bench_throughput

# Goal: at least this many times the calls of one by one, on two processors.
GOAL = 1.5


def measure(name: str, scale: float, limit: float) -> dict[str, Any]:
    """Export a model to ONNX, and find its best setting."""
    made = subject(name, scale)
    with tempfile.TemporaryDirectory() as folder:
        bundle = export(
            made.model,
            example_inputs=made.inputs(4),
            output=Path(folder, name),
            formats=("onnx",),
            row_independence=True,
            bench=False,
        )
        found, _ = bench_throughput(bundle.path, seconds=limit)
    service = found.to_json()
    alone = service["figures"][0]
    chosen = next(each for each in service["figures"] if each["setting"] == service["chosen"])
    rates = {"alone": alone["back_to_back"], "chosen": chosen["back_to_back"]}
    return {"model": name, "setting": chosen["name"], **rates, "service": service}


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    headings = ["model", "setting", "one by one", "with batching", "times", "processor, one by one", "with batching"]
    table = Table("Calls a second of a bundle", headings, left=2)
    for result in results:
        alone, chosen = result["alone"], result["chosen"]
        rates = [f"{each['rate']:.3g}" for each in (alone, chosen)]
        used = [seconds(each["processor"]) for each in (alone, chosen)]
        table.add(result["model"], result["setting"], *rates, f"{chosen['rate'] / alone['rate']:.2f}", *used)
    table.caption.append("Calls of one row, back to back. Processor seconds are those of a call, with the caller's.")
    return table


def misses(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each goal that is missed."""
    return [
        f"{result['model']}: {gain:.2f} times the calls of one by one; the goal is {GOAL}"
        for result in results
        if (gain := result["chosen"]["rate"] / result["alone"]["rate"]) < GOAL
    ]


def main() -> int:
    parser = command(__doc__, models="resnet18,bert_small", scale=True, check=True)
    parser.add_argument("--seconds", type=positive, default=60, help="for each model (default: %(default)s)")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    refuse_unknown(parser, "model", names, ALL_SUBJECTS)
    where = prepared(parser, arguments)
    results = [measure(name, arguments.scale, arguments.seconds) for name in names]
    table = table_of(results)
    table.caption.append(caption(where))
    missed = misses(results)
    settings = {"scale": arguments.scale, "seconds": arguments.seconds}
    data = {"benchmark": "service", "environment": where, "settings": settings, "results": results, "missed": missed}
    publish([table], data, arguments.json, arguments.markdown)
    for sentence in missed:
        print(sentence, file=sys.stderr)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
