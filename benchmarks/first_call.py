"""Measure the first calls of a result in a new process, which capture the forward again, and `warm_up`.

    python benchmarks/first_call.py --json build/first_call.json --markdown build/first_call.md

The result of `optimize` is saved as a whole. Each start is a separate process that loads it, and then makes calls of each
kind: several rows, one row, and several rows under `inference_mode`. Another start calls `warm_up` before. The import of
the compiler counts, because the first call needs it. The ways start in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import Spread, caption, command, positive, prepared, refuse_unknown
from models import PASS_SUBJECTS, Plain, subject
from table import Table, publish, seconds

from optimize_export.runtime import usable_cpus
from optimizer import optimize

EAGER, RESULT, WARM = "eager", "optimize", "optimize, after warm_up"
WAYS = (EAGER, RESULT, WARM)
WARM_UP, MANY, ONE, INFERENCE = "warm_up", "several rows", "one row", "inference_mode"
CALLS = (WARM_UP, MANY, ONE, INFERENCE)


def start(arguments: argparse.Namespace) -> int:
    """Load the model in this process, and print the seconds of its first call of each kind."""
    model, inputs = torch.load(arguments.start, weights_only=False)
    rows = [tensor[:1] for tensor in inputs]
    found = {}

    def timed(name: str, run: Any) -> None:
        started = time.perf_counter()
        run()
        found[name] = time.perf_counter() - started

    if arguments.way == WARM:
        sizes, modes = (1, len(inputs[0])), ("no_grad", "inference_mode")
        timed(WARM_UP, lambda: model.warm_up(batch_sizes=sizes, modes=modes))
    with torch.no_grad():
        timed(MANY, lambda: model(*inputs))
        timed(ONE, lambda: model(*rows))
    with torch.inference_mode():
        timed(INFERENCE, lambda: model(*inputs))
    print(json.dumps(found))
    return 0


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the starts of all ways."""
    asked = subject(name, arguments.scale)
    inputs = asked.inputs(arguments.batch)
    plain = Plain(asked.model)
    fast = optimize(plain, example_inputs=inputs)
    found: dict[str, dict[str, list[float]]] = {way: {call: [] for call in CALLS} for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for way, model in ((EAGER, plain), (RESULT, fast)):
            torch.save((model, inputs), Path(folder, way))
        for number in range(arguments.starts):
            for way in random.Random(number).sample(WAYS, len(WAYS)):
                file = Path(folder, EAGER if way == EAGER else RESULT)
                command = [
                    sys.executable,
                    __file__,
                    f"--start={file}",
                    f"--way={way}",
                    f"--threads={arguments.threads}",
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                for call, value in json.loads(done.stdout.splitlines()[-1]).items():
                    found[way][call].append(value)
    calls = {
        way: {call: Spread.of(values).to_json() for call, values in calls.items() if values}
        for way, calls in found.items()
    }
    return {"model": name, "calls": calls}


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    table = Table("First calls in a new process", ["model", "way", *CALLS], left=2)
    for result in results:
        for way, calls in result["calls"].items():
            table.add(
                result["model"], way, *(seconds(calls[call]["median"]) if call in calls else "" for call in CALLS)
            )
    table.caption.append("Medians of the starts.")
    return table


def main() -> int:
    parser = command(__doc__, models="resnet50,vit_small", batch=2, threads=usable_cpus(), scale=True)
    parser.add_argument("--starts", type=positive, default=3, help="processes per way (default: %(default)s)")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    refuse_unknown(parser, "model", names, PASS_SUBJECTS)
    where = prepared(parser, arguments)
    if arguments.start is not None:
        return start(arguments)
    results = [measure(name, arguments) for name in names]
    table = table_of(results)
    table.caption.append(caption(where))
    settings = {key: getattr(arguments, key) for key in ("batch", "starts", "scale")}
    data = {"benchmark": "first_call", "environment": where, "settings": settings, "results": results}
    publish([table], data, arguments.json, arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
