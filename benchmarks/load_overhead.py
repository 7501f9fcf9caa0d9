"""Measure what a call of a loaded bundle costs over a call of its runtime with the same inputs.

    python benchmarks/load_overhead.py --json build/load_overhead.json --markdown build/load_overhead.md

`load(bundle)` checks the arguments, flattens them, runs the file and rebuilds the outputs. The models are so small that
this shows. The runtime's own call does none of it: it takes flat inputs and returns flat outputs, converted to torch
where the inputs are torch tensors. All that `load` adds runs in the calling thread, so the CPU time of that thread is
measured: other work on the machine counts less than in elapsed time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from measure import Spread, caption, command, interleaved, latency_of, prepared, refuse_unknown
from table import Table, publish, seconds
from torch import nn

from exporters.isolation import torchscript_allowed
from optimize_export.onnx_runtime import ort
from optimizer import Bundle, export, load

# Goal: at most this cost of a call, in seconds, above that of the runtime's own call.
GOAL = 50e-6
WAYS = {"onnxruntime": "onnx", "openvino": "onnx", "torchscript": "torchscript", "pt2": "pt2"}
# The same number for all: it decides how warm the caches are.
_REPEATS = 20
_SIZE = 16

Call = Callable[[], Any]


class Plain(nn.Module):
    """One tensor in, one tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_SIZE, _SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Nested(nn.Module):
    """Tensors and a constant in a tuple and a dict in, a dict of a tensor and a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_SIZE, _SIZE)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], extra: Any, scale: float = 2.0) -> dict[str, Any]:
        y = self.layer(pair[0]) * scale
        return {"logits": y + extra["shift"], "hidden": (y - pair[1], y)}


MODELS: dict[str, tuple[type[nn.Module], Callable[[Sequence[Any]], tuple[Any, ...]], int]] = {
    "plain": (Plain, tuple, 1),
    "nested": (Nested, lambda flat: ((flat[0], flat[1]), {"shift": flat[2]}), 3),
}


def raw_call(way: str, path: Path, threads: int) -> Callable[..., Any]:
    """The runtime's own call as its documentation shows it, on a list of numpy arrays or torch tensors."""
    if way == "onnxruntime":
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [node.name for node in session.get_inputs()]
        return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))
    if way == "openvino":
        from optimize_export.runtime.openvino_runner import openvino_core

        config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino_core().compile_model(str(path), "CPU", config)
        return lambda arrays: list(compiled(arrays).values())
    with torchscript_allowed():
        module: Any = torch.jit.load(str(path)) if way == "torchscript" else torch.export.load(str(path)).module()

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            outputs = module(*tensors)
        return outputs if isinstance(outputs, list | tuple) else [outputs]

    return run


def raw_on(call: Callable[..., Any], way: str, inputs: Sequence[Any]) -> Call:
    """The runtime's own call, with the conversions that the kind of the inputs needs."""
    takes_torch, are_torch = WAYS[way] != "onnx", isinstance(inputs[0], torch.Tensor)
    if takes_torch == are_torch:
        return lambda: call(inputs)
    if takes_torch:
        return lambda: [output.numpy() for output in call([torch.from_numpy(array) for array in inputs])]
    return lambda: [torch.from_numpy(output) for output in call([tensor.numpy() for tensor in inputs])]


def measure(name: str, bundle: Bundle, ways: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each way to run a bundle, with each kind of inputs, interleaved."""
    _, nest, count = MODELS[name]
    tensors = [torch.randn(1, _SIZE) for _ in range(count)]
    runs: dict[tuple[str, str, str], Call] = {}
    for way in ways:
        artifact = next(each for each in bundle.artifacts if each.format == WAYS[way])
        raw = raw_call(way, artifact.path, arguments.threads)
        runtime = way if WAYS[way] == "onnx" else "torch"
        run = load(bundle, format=WAYS[way], runtime=runtime, threads=arguments.threads)
        for kind, inputs in (("numpy", [tensor.numpy() for tensor in tensors]), ("torch", tensors)):
            given = nest(inputs)
            runs[way, kind, "raw"] = raw_on(raw, way, inputs)
            runs[way, kind, "load"] = lambda run=run, given=given: run(*given)  # type: ignore[misc]
            for _ in range(5):
                runs[way, kind, "load"]()
            _require_equal(runs[way, kind, "load"](), runs[way, kind, "raw"]())
    latencies = interleaved(
        {"/".join(key): partial(_timed, "/".join(key), runs[key]) for key in runs}, arguments.rounds
    )
    results = []
    for way, kind in dict.fromkeys((way, kind) for way, kind, _ in runs):
        raw, ours = latencies[f"{way}/{kind}/raw"], latencies[f"{way}/{kind}/load"]
        over = [mine - theirs for mine, theirs in zip(ours, raw, strict=True)]
        spreads = {"raw": raw, "load": ours, "over": over}
        figures = {key: {**Spread.of(values).to_json(), "values": values} for key, values in spreads.items()}
        results.append({"model": name, "way": way, "inputs": kind, **figures})
    return results


def _timed(name: str, call: Call) -> dict[str, float]:
    return {name: latency_of(call, _REPEATS, "cpu", time.thread_time)}


def _require_equal(ours: Any, raw: Any) -> None:
    """Check that both calls compute the same, or their times couldn't be compared."""
    first = ours["logits"] if isinstance(ours, dict) else ours
    if type(first) is not type(raw[0]) or not numpy.allclose(numpy.asarray(first), numpy.asarray(raw[0]), atol=1e-5):
        raise AssertionError("the loaded bundle returns something else than its runtime")


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    headings = ["model", "run by", "inputs", "runtime's own call", "call of load(bundle)", "difference", "quartiles"]
    table = Table("A call of a loaded bundle", headings, left=3)
    for result in results:
        over = result["over"]
        quartiles = f"{over['low'] * 1e6:.1f} – {over['high'] * 1e6:.1f} µs"
        times = (seconds(result["raw"]["median"]), seconds(result["load"]["median"]), f"{over['median'] * 1e6:.1f} µs")
        table.add(result["model"], result["way"], result["inputs"], *times, quartiles)
    table.caption.append(
        "CPU time of the calling thread. The difference is taken within a round; medians over the rounds, with quartiles. "
        "Inputs have one row. The runtime's own call is that of the module in torch and of the compiled model in OpenVINO; "
        "load() calls the module's forward, after its own checks, and an inference request."
    )
    return table


def misses(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each goal that is missed."""
    return [
        f"{result['model']}, {result['way']}, {result['inputs']}: a call costs {result['over']['median'] * 1e6:.0f} µs "
        f"over the runtime's own; the goal is {GOAL * 1e6:.0f} µs"
        for result in results
        if result["over"]["median"] > GOAL
    ]


def main() -> int:
    parser = command(__doc__, models=",".join(MODELS), rounds=51, check=True)
    parser.add_argument("--ways", default=",".join(WAYS), help="names, by commas (default: %(default)s)")
    arguments = parser.parse_args()
    names, ways = arguments.models.split(","), arguments.ways.split(",")
    refuse_unknown(parser, "model", names, MODELS)
    refuse_unknown(parser, "way", ways, WAYS)
    where = prepared(parser, arguments)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            cls, nest, count = MODELS[name]
            example = nest([torch.randn(2, _SIZE) for _ in range(count)])
            formats = tuple(dict.fromkeys(WAYS[way] for way in ways))
            bundle = export(
                cls().eval(),
                example_inputs=example,
                output=Path(folder, name),
                formats=formats,
                effort="quick",
                bench=False,
            )
            results += measure(name, bundle, ways, arguments)
    table = table_of(results)
    table.caption.append(caption(where))
    missed = misses(results)
    settings = {"rounds": arguments.rounds}
    data = {
        "benchmark": "load_overhead",
        "environment": where,
        "settings": settings,
        "results": results,
        "missed": missed,
    }
    publish([table], data, arguments.json, arguments.markdown)
    for sentence in missed:
        print(sentence, file=sys.stderr)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
