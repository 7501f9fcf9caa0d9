"""Measure cold start and latency of a compiled transformer: compiled by blocks, compared with compiled as a whole.

    python benchmarks/cold_start.py --json build/cold_start.json --markdown build/cold_start.md

Each start is a separate process that already has the model and its inputs. The measured time covers the preparation of
the model, the import of the compiler, and the first call. The ways start in turn. In one series of starts, inductor's
cache is that of a machine that has compiled something else before: it holds inductor's findings about the C++ compiler.
In the other series, the cache is empty. The latencies are measured in one process, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import Run, calling
from measure import Spread, caption, command, latencies_of, positive, prepared, ratios, refuse_unknown, synchronize
from models import PASS_SUBJECTS, Plain, Subject, subject
from table import Table, publish, seconds
from torch import nn

from optimize_export.runtime import usable_cpus
from optimizer import optimize

BLOCKS, WHOLE, EAGER = "torch-compile, by blocks", "torch.compile", "eager"
# Goals: at most this share of the whole's time to the first answer, and of its latency.
GOALS = {"cold_start": 0.5, "latency": 1.05}
_SECONDS_OF_A_FIGURE = 0.1
# The start that compiles an unrelated function.
_OTHER = "another function"
USED, NEW = "starts", "starts_on_a_new_machine"


def start(arguments: argparse.Namespace) -> int:
    """Run one start in this process, and print the seconds until the first call has returned.

    The start of the unrelated function prints nothing.
    """
    if arguments.start == _OTHER:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(64))
        return 0
    asked = subject(arguments.models, arguments.scale)
    model = asked.model.to(arguments.device)
    inputs = _inputs(asked, arguments)
    synchronize(arguments.device)
    started = time.perf_counter()
    _run(arguments.start, model, inputs)()
    synchronize(arguments.device)
    print(json.dumps({"seconds": time.perf_counter() - started}))
    return 0


def _inputs(asked: Subject, arguments: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(arguments.device) for tensor in asked.inputs(arguments.batch))


def _run(way: str, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Run:
    """Prepare the model for one way. Nothing is compiled yet."""
    if way == BLOCKS:
        # Without example inputs, nothing runs before the first call. The same holds for torch.compile.
        model = optimize(model, ["torch-compile:regions=blocks"])
    return calling(Plain(torch.compile(model) if way == WHOLE else model), inputs)  # type: ignore[arg-type]


def _started(way: str, name: str, arguments: argparse.Namespace, cache: Path) -> str:
    """Run a start in a new process, and return its stdout."""
    options = [f"--scale={arguments.scale}", f"--batch={arguments.batch}", f"--device={arguments.device}"]
    command = [
        sys.executable,
        __file__,
        f"--start={way}",
        f"--models={name}",
        *options,
        f"--threads={arguments.threads}",
    ]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def _starts(name: str, arguments: argparse.Namespace, *, used: bool) -> dict[str, list[float]]:
    """The seconds of all starts, by way.

    Args:
        used: whether inductor has compiled the unrelated function on the machine before.
    """
    found: dict[str, list[float]] = {BLOCKS: [], WHOLE: []}
    with tempfile.TemporaryDirectory(prefix="inductor-") as folder:
        first = Path(folder, "first")
        first.mkdir()
        if used:
            _started(_OTHER, name, arguments, first)
        for number in range(arguments.starts):
            for way in random.Random(number).sample(list(found), len(found)):
                cache = Path(folder, f"{number}-{list(found).index(way)}")
                shutil.copytree(first, cache)
                found[way].append(float(json.loads(_started(way, name, arguments, cache).splitlines()[-1])["seconds"]))
                shutil.rmtree(cache)
    return found


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the cold starts and latencies of all ways."""
    starts = {USED: _starts(name, arguments, used=True), NEW: _starts(name, arguments, used=False)}
    asked = subject(name, arguments.scale)
    model, inputs = asked.model.to(arguments.device), _inputs(asked, arguments)
    runs = {way: _run(way, model, inputs) for way in (BLOCKS, WHOLE, EAGER)}
    for run in runs.values():
        run()
        run()
    latencies, _ = latencies_of(runs, arguments.rounds, _SECONDS_OF_A_FIGURE, arguments.device)
    return {
        "model": name,
        **{where: _spreads(values) for where, values in starts.items()},
        "latencies": _spreads(latencies),
        "cold_start": ratios(starts[USED][BLOCKS], starts[USED][WHOLE]).to_json(),
        "cold_start_on_a_new_machine": ratios(starts[NEW][BLOCKS], starts[NEW][WHOLE]).to_json(),
        "latency": ratios(latencies[BLOCKS], latencies[WHOLE]).to_json(),
    }


def _spreads(figures: dict[str, list[float]]) -> dict[str, Any]:
    return {way: {**Spread.of(values).to_json(), "values": values} for way, values in figures.items()}


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    headings = ["model", "way", "first answer", "to the whole", "on a new machine", "to the whole"]
    headings += ["latency", "to the whole", "quartiles"]
    table = Table("Cold start", headings, left=2)
    for result in results:
        for way, spread in result["latencies"].items():
            cells = []
            for where, ratio in ((USED, "cold_start"), (NEW, "cold_start_on_a_new_machine")):
                cells.append(seconds(result[where][way]["median"]) if way in result[where] else "")
                cells.append(f"{result[ratio]['median']:.2f}×" if way == BLOCKS else "")
            latency = result["latency"]
            cells.append(seconds(spread["median"]))
            cells.append(f"{latency['median']:.3f}×" if way == BLOCKS else "")
            cells.append(f"{latency['low']:.3f} – {latency['high']:.3f}" if way == BLOCKS else "")
            table.add(result["model"], way, *cells)
    table.caption.append("Each ratio is taken within a round; medians with quartiles.")
    return table


def misses(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each goal that is missed."""
    return [
        f"{result['model']}: {figure} is {result[figure]['median']:.2f} times that of the whole; the goal is {goal:g}"
        for result in results
        for figure, goal in GOALS.items()
        if result[figure]["median"] > goal
    ]


def main() -> int:
    parser = command(
        __doc__, models="vit_small,gpt2", batch=1, rounds=15, device=True, threads=usable_cpus(), scale=True, check=True
    )
    parser.add_argument("--starts", type=positive, default=3, help="processes per way (default: %(default)s)")
    parser.add_argument("--start", choices=(BLOCKS, WHOLE, _OTHER), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    refuse_unknown(parser, "model", names, PASS_SUBJECTS)
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
