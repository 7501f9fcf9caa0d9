"""How long it takes until a compiled transformer answers, and how fast it answers then: by its blocks, and as a whole.

    python benchmarks/cold_start.py --json build/cold_start.json --markdown build/cold_start.md

Each way starts several times in a process of its own, with an empty cache, in turn with the others. The latencies are taken
in one process, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import Run, calling
from latency import cpus
from measure import Spread, caption, latencies_of, positive, prepared, ratios, synchronize
from models import PASS_SUBJECTS, Plain, subject
from table import Table, publish, seconds
from torch import nn

from optimizer import optimize

BLOCKS, WHOLE, EAGER = "torch-compile, by blocks", "torch.compile", "eager"
# What the project aims at: so much of the whole's time until the first answer, and so much of its latency.
GOALS = {"cold_start": 0.5, "latency": 1.05}
_SECONDS_OF_A_FIGURE = 0.1


def run_of(way: str, name: str, scale: float, batch: int, device: str) -> Run:
    """The model by one way; nothing is compiled yet."""
    asked = subject(name, scale)
    model = asked.model.to(device)
    inputs = tuple(tensor.to(device) for tensor in asked.inputs(batch))
    return calling(Plain(_module(way, model)), inputs)


def _module(way: str, model: nn.Module) -> nn.Module:
    if way == BLOCKS:
        # Without example inputs nothing runs before the first call, as with torch.compile.
        return optimize(model, ["torch-compile:regions=blocks"])
    return torch.compile(model) if way == WHOLE else model  # type: ignore[return-value]


def start(arguments: argparse.Namespace) -> int:
    """In a process of its own: print the seconds of the first call, the import of the compiler included."""
    run = run_of(arguments.start, arguments.models, arguments.scale, arguments.batch, arguments.device)
    synchronize(arguments.device)
    started = time.perf_counter()
    run()
    synchronize(arguments.device)
    print(json.dumps({"seconds": time.perf_counter() - started}))
    return 0


def _started(way: str, name: str, arguments: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        options = [f"--scale={arguments.scale}", f"--batch={arguments.batch}", f"--device={arguments.device}"]
        command = [
            sys.executable,
            __file__,
            f"--start={way}",
            f"--models={name}",
            *options,
            f"--threads={arguments.threads}",
        ]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both figures of all ways."""
    starts: dict[str, list[float]] = {BLOCKS: [], WHOLE: []}
    for number in range(arguments.starts):
        for way in random.Random(number).sample(list(starts), len(starts)):
            starts[way].append(_started(way, name, arguments))
    runs = {
        way: run_of(way, name, arguments.scale, arguments.batch, arguments.device) for way in (BLOCKS, WHOLE, EAGER)
    }
    for run in runs.values():
        run()
        run()
    latencies, _ = latencies_of(runs, arguments.rounds, _SECONDS_OF_A_FIGURE, arguments.device)
    return {
        "model": name,
        "starts": {way: {**Spread.of(values).to_json(), "values": values} for way, values in starts.items()},
        "latencies": {way: {**Spread.of(values).to_json(), "values": values} for way, values in latencies.items()},
        "cold_start": ratios(starts[BLOCKS], starts[WHOLE]).to_json(),
        "latency": ratios(latencies[BLOCKS], latencies[WHOLE]).to_json(),
    }


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    headings = ["model", "way", "first answer", "to the whole", "latency", "to the whole", "quartiles"]
    table = Table("Cold start", headings, left=2)
    for result in results:
        for way, spread in result["latencies"].items():
            first = seconds(result["starts"][way]["median"]) if way in result["starts"] else ""
            blocks, latency = way == BLOCKS, result["latency"]
            table.add(
                result["model"],
                way,
                first,
                f"{result['cold_start']['median']:.2f}×" if blocks else "",
                seconds(spread["median"]),
                f"{latency['median']:.3f}×" if blocks else "",
                f"{latency['low']:.3f} – {latency['high']:.3f}" if blocks else "",
            )
    table.caption.append("Each ratio is taken within a round; medians with quartiles.")
    return table


def misses(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each goal that isn't reached."""
    return [
        f"{result['model']}: {figure} is {result[figure]['median']:.2f} times that of the whole; the goal is {goal:g}"
        for result in results
        for figure, goal in GOALS.items()
        if result[figure]["median"] > goal
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vit_small,gpt2", help="names, by commas (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--starts", type=positive, default=3, help="processes per way (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=15, help="latencies per way (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=positive, default=cpus())
    parser.add_argument("--scale", type=float, default=1.0, help="of image sides and text lengths, to try things out")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal isn't reached")
    parser.add_argument("--start", choices=(BLOCKS, WHOLE), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    if unknown := [name for name in names if name not in PASS_SUBJECTS]:
        parser.error(f"there is no model {unknown[0]!r}: use {', '.join(PASS_SUBJECTS)}")
    where = prepared(parser, arguments)
    if arguments.start is not None:
        return start(arguments)
    results = [measure(name, arguments) for name in names]
    table = table_of(results)
    table.caption.append(caption(where))
    missed = misses(results)
    settings = {key: getattr(arguments, key) for key in ("batch", "starts", "rounds", "device", "scale")}
    data = {"benchmark": "cold_start", "environment": where, "settings": settings, "results": results, "missed": missed}
    publish([table], data, arguments.json, arguments.markdown)
    for sentence in missed:
        print(sentence, file=sys.stderr)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        sys.exit(main())
