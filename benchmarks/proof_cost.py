"""Measure what the proof costs: how many forwards `optimize` and `export` run, and how much memory they take.

    python benchmarks/proof_cost.py --json build/proof_cost.json --markdown build/proof_cost.md

The results are counts of calls, which are the same on every machine. A forward of the original, of a candidate or of a
file counts by its rows, as a share of the rows in the example inputs. A forward in float64 counts twice. The runs in
which torch records a program belong to the exporter and aren't counted. The checks of single rewrites run only a layer
or two; for them, the runs of these layers per rewrite are counted. The memory is the peak of a process that loads,
optimizes and exports the model. It is divided by the peak of a process that only calls `torch.onnx.export`, and by that
of one that also loads the file in onnxruntime and runs it once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from measure import caption, command, prepared, refuse_unknown
from models import PROOF_SUBJECTS, Plain, Subject, subject
from table import Table, publish, seconds
from torch import nn

from exporters import proof
from optimizer import export, optimize, report_of
from optimizer.exporting.artifact_parity import ArtifactParity
from optimizer.pipeline import transactions
from optimizer.tuning.benchmark import PeakMemory
from passes.torch_capture import _FrontEnd

# Goals: the maximum number of forwards of the example inputs, and the maximum ratio of memory to a plain export's.
GOALS = {"optimize": 12, "optimize, nothing changed": 3, "export": 25, "further format": 10, "memory": 1.5}
# The timed forwards.
_FORWARDS = 7
OURS, PLAIN, BY_HAND = "ours", "plain", "by hand"
FORMATS = FORMAT, FURTHER = "onnx", "pt2"
# The number of rows that went through the model, by kind of run; also the runs of the layers of rewrites, and the
# rewrites.
ROWS: Counter[str] = Counter()


class Counted(Plain):
    """A model that counts its forwards by rows, including those of its copies."""

    def forward(self, *inputs: torch.Tensor) -> Any:
        output = super().forward(*inputs)
        first = output if isinstance(output, torch.Tensor) else output[0]
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            ROWS["float64" if first.dtype == torch.float64 else "forwards"] += len(inputs[0])
        return output


def count_files() -> None:
    """In this process, count the runs of files, too, and of the programs that files are written from."""
    compare, measure_loaded = proof._compare, ArtifactParity.measure_loaded

    def counted_compare(evidence: Any, loaded: Any, inputs: Any, *others: Any) -> Any:
        return compare(evidence, CountedFile(loaded), inputs, *others)

    proof._compare = counted_compare
    ArtifactParity.measure_loaded = lambda self, loaded, rows: measure_loaded(self, CountedFile(loaded), rows)  # type: ignore[method-assign]


def count_regions() -> None:
    """In this process, count the rewrites, and the runs of the layers that they change."""
    check = transactions.check_change

    def counted(region: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            ROWS["region runs"] += 1
            return region(*values)

        return run

    def counted_check(old: Callable[..., Any], new: Callable[..., Any], *values: Any, **options: Any) -> Any:
        ROWS["regions"] += 1
        return check(counted(old), counted(new), *values, **options)

    transactions.check_change = counted_check


class CountedFile:
    """A loaded file that counts its runs."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        ROWS["files"] += len(tensors[0])
        return self.file(*tensors)


def counted(call: Callable[[], Any], rows: int) -> tuple[Any, dict[str, float]]:
    """The result of the call, and the number of forwards that it ran, by kind and in total.

    Args:
        rows: the number of rows of one forward.
    """
    ROWS.clear()
    result = call()
    regions, runs = ROWS.pop("regions", 0), ROWS.pop("region runs", 0)
    forwards = {kind: count / rows for kind, count in sorted(ROWS.items())}
    forwards["all"] = sum(forwards.values()) + forwards.get("float64", 0.0)
    return result, forwards | ({"runs of a rewrite": runs / regions} if regions else {})


class Captures:
    """Measures the processor time of torch.compile's front end."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False
        capture = _FrontEnd.__call__

        def timed(front_end: Any, *args: Any) -> Any:
            if self._inside:
                return capture(front_end, *args)
            self._inside, started = True, time.process_time()
            try:
                return capture(front_end, *args)
            finally:
                self._inside = False
                self.seconds += time.process_time() - started

        _FrontEnd.__call__ = timed  # type: ignore[method-assign]


def clocked(model: nn.Module, inputs: tuple[torch.Tensor, ...], optimize_it: Callable[[], Any]) -> dict[str, float]:
    """The processor seconds of `optimize`, of the captures in it, and of one forward of the model."""
    captures, started = Captures(), time.process_time()
    optimize_it()
    taken, forwards = time.process_time() - started, []
    for _ in range(_FORWARDS):
        started = time.process_time()
        with torch.no_grad():
            model(*inputs)
        forwards.append(time.process_time() - started)
    return {"seconds": taken, "capture": captures.seconds, "forward": statistics.median(forwards)}


def ours(asked: Subject, batch: int) -> dict[str, Any]:
    """Optimize and export, and count the forwards of each and the peak memory; run this in a new process."""
    count_files()
    count_regions()
    model, inputs = Counted(asked.model).eval(), asked.inputs(batch)
    peak = PeakMemory()
    with tempfile.TemporaryDirectory() as folder, peak:
        fast, optimized = counted(lambda: optimize(model, example_inputs=inputs), batch)
        first = Path(folder, "first")
        _, one = counted(
            lambda: export(fast, example_inputs=inputs, output=first, formats=(FORMAT,), bench=False), batch
        )
    clock = clocked(asked.model.eval(), inputs, lambda: optimize(asked.model, example_inputs=inputs))
    with tempfile.TemporaryDirectory() as folder:
        _, two = counted(
            lambda: export(fast, example_inputs=inputs, output=Path(folder, "two"), formats=FORMATS, bench=False), batch
        )
    return {
        "changes": sum(len(record.changes) for record in report_of(fast).passes if record.status == "applied"),
        "optimize": optimized,
        "clock": clock,
        "forwards by the clock": (clock["seconds"] - clock["capture"]) / clock["forward"],
        "export": one,
        "further format": two["all"] - one["all"],
        "peak_bytes": peak.before + peak.bytes,
    }


def plain(asked: Subject, batch: int, *, run: bool) -> dict[str, Any]:
    """Export by torch alone, and run the file if requested; return the peak memory. Run this in a new process."""
    model, inputs = Counted(asked.model).eval(), asked.inputs(batch)
    shapes = ({0: torch.export.Dim.DYNAMIC},) * len(inputs)
    peak = PeakMemory()
    with tempfile.TemporaryDirectory() as folder, peak:
        file = str(Path(folder, "model.onnx"))
        # With gradients, torch can't export the attention of a Swin.
        with torch.no_grad():
            torch.onnx.export(model, inputs, file, dynamo=True, dynamic_shapes=(shapes,), verbose=False)
        if run:
            session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
            names = (value.name for value in session.get_inputs())
            session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
    return {"peak_bytes": peak.before + peak.bytes}


def figures_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one model in a process for each way, and combine their results."""
    found: dict[str, Any] = {"model": name}
    for way in (OURS, PLAIN, BY_HAND):
        options = [f"--scale={arguments.scale}", f"--batch={arguments.batch}", f"--threads={arguments.threads}"]
        command = [sys.executable, __file__, f"--only={way}", f"--models={name}", *options]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[way] = json.loads(process.stdout.splitlines()[-1])
    mine = found[OURS]
    mine["memory"] = mine["peak_bytes"] / found[PLAIN]["peak_bytes"]
    mine["memory with a run"] = mine["peak_bytes"] / found[BY_HAND]["peak_bytes"]
    goal = "optimize" if mine["changes"] else "optimize, nothing changed"
    mine["met"] = (
        mine["optimize"]["all"] <= GOALS[goal]
        and mine["export"]["all"] <= GOALS["export"]
        and mine["further format"] <= GOALS["further format"]
        and mine["memory"] <= GOALS["memory"]
    )
    return found


def table_of(results: list[dict[str, Any]], environment: dict[str, Any], batch: int) -> Table:
    """The table, with one row for each model."""
    headings = ["model", "changes", "optimize", "by the clock", "capture", "of them in float64", "runs of a rewrite"]
    headings += ["export"]
    headings += ["of them in float64", "of the file", "further format", "memory", "compared with export and run"]
    table = Table("What the proof costs, in forwards of the example inputs", headings)
    for result in results:
        mine = result[OURS]
        table.add(
            result["model"],
            str(mine["changes"]),
            f"{mine['optimize']['all']:.1f}",
            f"{mine['forwards by the clock']:.1f}",
            seconds(mine["clock"]["capture"]),
            f"{mine['optimize'].get('float64', 0.0):.1f}",
            f"{mine['optimize'].get('runs of a rewrite', 0.0):.1f}",
            f"{mine['export']['all']:.1f}",
            f"{mine['export'].get('float64', 0.0):.1f}",
            f"{mine['export'].get('files', 0.0):.1f}",
            f"{mine['further format']:.1f}",
            f"{mine['memory']:.2f}×",
            f"{mine['memory with a run']:.2f}×",
        )
    met = sum(result[OURS]["met"] for result in results)
    goals = ", ".join(f"{name} {goal}" for name, goal in GOALS.items())
    table.caption.append(
        f"Example inputs of {batch} rows; a forward in float64 counts twice in the sums. By the clock, it is"
        f" the processor time of a second run of optimize without that of the capture, over that of a forward. The export is to {FORMAT}, the further"
        f" format is {FURTHER}; memory is the peak of the process, compared with torch.onnx.export alone and with one run of the file. The goals are"
        f" at most: {goals}. {met} of {len(results)} models meet them all."
    )
    table.caption.append(caption(environment))
    return table


def main() -> int:
    """Run the program and return its exit code."""
    parser = command(__doc__, models=",".join(PROOF_SUBJECTS), batch=2, scale=True, check=True)
    parser.add_argument("--only", choices=(OURS, PLAIN, BY_HAND), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    refuse_unknown(parser, "model", names, PROOF_SUBJECTS)
    environment = prepared(parser, arguments)
    if arguments.only is not None:
        # Hide torch's deprecation warnings.
        warnings.simplefilter("ignore")
        asked, batch = subject(names[0], arguments.scale), arguments.batch
        measured = ours(asked, batch) if arguments.only == OURS else plain(asked, batch, run=arguments.only == BY_HAND)
        print(json.dumps(measured))
        return 0
    results = []
    for name in names:
        results.append(figures_of(name, arguments))
        print(f"{name}: {json.dumps(results[-1][OURS])}", file=sys.stderr, flush=True)
    data = {"environment": environment, "batch": arguments.batch, "scale": arguments.scale, "results": results}
    publish([table_of(results, environment, arguments.batch)], data, arguments.json, arguments.markdown)
    return 1 if arguments.check and not all(result[OURS]["met"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
