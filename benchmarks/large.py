"""Measure the memory that an export takes beyond the model, for weights larger than one ONNX file can hold.

    python benchmarks/large.py --json build/large.json --markdown build/large.md

Each way runs in a separate process, which makes the model and then writes it to a file. The result is the peak of the
resident memory above its level with the model, as a multiple of the weights. `export()` is the complete procedure: the
original's outputs in float64 and its noise, the file with its proof, the comparison at all batch sizes, and the bundle
with its hashes. The exporter alone writes the file and proves it. For comparison, torch writes the same formats as a
user would, without any proof.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import caption, command, environment, positive
from table import Table, publish
from torch import nn
from torch.nn import functional

from exporters import ExportRequest, exporter_named
from optimizer import export
from optimizer.model.inputs import Samples
from optimizer.parity import measure_reference
from optimizer.tuning.benchmark import PeakMemory

# The goal for the peak beyond the model, as a multiple of the weights.
GOAL = 1.3

_BATCH_SIZES = (2, 1, 3, 5, 8)
_LARGE_MEBIBYTES = 512
_OUTPUTS = 16


class Layers(nn.Module):
    """Linear layers of three sizes: 128, 64 and 32 MiB each if the model is large."""

    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.width = 2048 if mebibytes >= _LARGE_MEBIBYTES else 256
        widths = (2 * self.width, 4 * self.width, self.width)
        cycles = max(1, round(mebibytes * 2**20 / (4 * 14 * self.width**2)))
        sizes = [*widths * cycles, widths[0]]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.head = nn.Linear(widths[0], _OUTPUTS)
        for layer in self.layers:
            # With the default initialization, the signal would vanish after dozens of layers.
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.relu(layer(x))
        return self.head(x)

    def example(self, rows: int = 2) -> torch.Tensor:
        return torch.randn(rows, 2 * self.width, generator=torch.Generator().manual_seed(rows))


Way = Callable[[Layers, Path], object]


def _whole(format: str) -> Way:
    return lambda model, folder: export(
        model, example_inputs=(model.example(),), output=folder / "bundle", formats=(format,), bench=False
    )


def _exporter(format: str) -> Way:
    def run(model: Layers, folder: Path) -> object:
        calls = tuple(((model.example(rows),), {}) for rows in (2, 3, 1))
        return exporter_named(format).export(ExportRequest(model, calls), folder)

    return run


def _onnx(model: Layers, folder: Path) -> object:
    path, shapes = str(folder / "model.onnx"), ({0: "batch"},)
    return torch.onnx.export(
        model, (model.example(),), path, dynamo=True, external_data=True, dynamic_shapes=shapes, verbose=False
    )


def _torchscript(model: Layers, folder: Path) -> object:
    return torch.jit.trace(model, model.example()).save(str(folder / "model.pt"))


def _pt2(model: Layers, folder: Path) -> object:
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(model, (model.example(),), dynamic_shapes=shapes)
    return torch.export.save(program, folder / "model.pt2")


def _reference(model: Layers, folder: Path) -> object:
    return measure_reference(model, Samples((model.example(),)), batch_sizes=_BATCH_SIZES)


TORCH: dict[str, tuple[str, Way]] = {
    "onnx": ("torch.onnx.export(dynamo=True, external_data=True)", _onnx),
    "torchscript": ("torch.jit.trace(…).save", _torchscript),
    "pt2": ("torch.export.save", _pt2),
}
REFERENCE = "the original alone, in float64 too"
WAYS: dict[tuple[str, str], Way] = {
    ("-", REFERENCE): _reference,
    **{
        key: way
        for format, (plain, run) in TORCH.items()
        for key, way in (
            ((format, "export()"), _whole(format)),
            ((format, "exporter alone"), _exporter(format)),
            ((format, plain), run),
        )
    },
}


def measure(mebibytes: int, way: Way) -> dict[str, Any]:
    """Measure one way; call this in a process that has done nothing else."""
    # Run once on a model of a few layers first: imports and set-up at the first use don't belong to the model.
    with tempfile.TemporaryDirectory() as folder:
        way(Layers(1).eval(), Path(folder))
    model = Layers(mebibytes).eval()
    peak, in_children = PeakMemory(), _peak_of_children()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with peak:
            # Keep the result to the end, as a user's variable does.
            result = way(model, Path(folder))
        seconds = time.perf_counter() - started
        written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        del result
    return {
        "weights_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        # An ONNX file is proven in a child process, next to the model in this one.
        "peak_bytes": peak.bytes + _peak_of_children() - in_children,
        "peak_exact": peak.exact,
        "written_bytes": written,
        "seconds": seconds,
    }


def _peak_of_children() -> int:
    """The sum of the peaks of the child processes that live, in bytes; 0 where the system doesn't tell."""
    children = [number for file in Path("/proc/self/task").glob("*/children") for number in file.read_text().split()]
    texts = [Path("/proc", number, "status").read_text() for number in children]
    return sum(1024 * int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("VmHWM"))


def measured(mebibytes: int, format: str, name: str, threads: int) -> dict[str, Any]:
    # Use a process for each way, because the peak is that of a process.
    number = list(WAYS).index((format, name))
    command = [sys.executable, __file__, f"--mebibytes={mebibytes}", f"--threads={threads}", f"--only={number}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return {"format": format, "way": name, **figures, "ratio": figures["peak_bytes"] / figures["weights_bytes"]}


def result_table(results: Sequence[dict[str, Any]]) -> Table:
    weights = results[0]["weights_bytes"]
    headings = ["format", "written by", "peak beyond the model", "of the weights", "files", "time"]
    table = Table(f"Memory of an export of {weights / 1e9:.2f} GB of weights", headings, left=2)
    for each in results:
        table.add(
            each["format"],
            each["way"],
            f"{each['peak_bytes'] / 1e9:.2f} GB",
            f"{each['ratio']:.2f}",
            f"{each['written_bytes'] / 1e9:.2f} GB" if each["written_bytes"] else "-",
            f"{each['seconds']:.0f} s",
        )
    return table


def is_ours(result: dict[str, Any]) -> bool:
    """Whether the goal applies to this result. The results of torch alone are only for comparison."""
    return result["way"] in ("export()", "exporter alone", REFERENCE)


def main() -> int:
    parser = command(__doc__, check=True)
    parser.add_argument("--mebibytes", type=positive, default=2500, help="of weights")
    parser.add_argument("--formats", help=f"of {', '.join(TORCH)} (default: all)")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.only is not None:
        # Hide torch's deprecation warnings.
        warnings.simplefilter("ignore")
        print(json.dumps(measure(arguments.mebibytes, list(WAYS.values())[arguments.only])))
        return 0
    formats = arguments.formats.split(",") if arguments.formats else list(TORCH)
    if unknown := [name for name in formats if name not in TORCH]:
        parser.error(f"there is no {unknown[0]!r}: use {', '.join(TORCH)}")
    where = environment(arguments.threads)
    results = []
    for format, name in WAYS:
        if format in ("-", *formats):
            print(f"{format} {name} …", file=sys.stderr)
            results.append(measured(arguments.mebibytes, format, name, arguments.threads))
    met = all(each["ratio"] <= GOAL for each in results if is_ours(each))
    table = result_table(results)
    table.caption.append(f"The goal is at most {GOAL} of the weights, which is {'met' if met else 'missed'}.")
    table.caption.append(caption(where))
    data = {"benchmark": "large", "environment": where, "goal": GOAL, "met": met, "results": results}
    publish([table], data, arguments.json, arguments.markdown)
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
