"""Measure what a lossy file costs in top-1 and gains in time, on trained networks: this project's choice and its peers.

    python benchmarks/accuracy.py --json build/accuracy.json --markdown build/accuracy.md

The networks are those of trained.py. This project gets a budget of 0.5 points of top-1, with an `evaluate` of its own
examples; every contender is judged by others, which nothing has seen. The drop has the 95 % bound of a paired test, and
the time is that of the processor, one thread, in interleaved rounds. A file whose bound is above 0.5 points can't be
shipped, so it counts as the float32 file in the geometric mean, as does a peer that can't make its file.

NNCF is measured if it is installed. Results in the file of --json are kept, but for those of --models.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from file_runs import default_threads, quantize
from measure import caption, command, latencies_of, on_cpus, positive, prepared, ratios, refuse_unknown
from models import Plain
from table import Table, write
from trained import EXAMPLES, NETWORKS, Trained, trained

from exporters.isolation import silent
from optimize_export.onnx_runtime import ort
from optimize_export.runtime import load
from optimize_export.runtime.openvino_runner import openvino_core
from optimize_export.wording import quote
from optimizer import export, optimize
from optimizer.accuracy import PairedTest

BUDGET, CONFIDENCE = 0.005, 0.95
FLOAT, OURS, OPENVINO, STATIC = "float32", "ours", "openvino", "quantize_static"
OPENVINO_DEFAULT, NNCF, NNCF_OPENVINO = "openvino_default", "nncf", "nncf_openvino"
LABELS = {
    FLOAT: "torch.onnx.export in onnxruntime",
    OURS: "**optimize-export, drop<=0.5%**",
    OPENVINO: "torch.onnx.export in OpenVINO, float32",
    OPENVINO_DEFAULT: "torch.onnx.export in OpenVINO",
    STATIC: "onnxruntime's quantize_static",
    NNCF: "NNCF's quantize, in onnxruntime",
    NNCF_OPENVINO: "NNCF's quantize, in OpenVINO",
}
_SECONDS_OF_A_FIGURE = 0.1

Run = Callable[[torch.Tensor], torch.Tensor]


def made(network: Trained, folder: Path, batch: int, tune_seconds: float) -> Iterator[tuple[str, Run, str]]:
    """Each contender: its name, its function, and its choice, "" for those that choose nothing."""
    calibration = [part for inputs, _ in network.calibration() for part in inputs.split(batch)]
    example = calibration[0]
    plain = folder / "plain.onnx"
    shapes = ({0: torch.export.Dim("batch")},)
    with silent():
        torch.onnx.export(
            Plain(network.model).eval(), (example,), str(plain), dynamo=True, verbose=False, dynamic_shapes=(shapes,)
        )
    yield FLOAT, _in_onnxruntime(plain), ""
    yield OPENVINO, _in_openvino(plain, "f32"), ""
    yield OPENVINO_DEFAULT, _in_openvino(plain), ""
    quantized = folder / "quantized.onnx"
    # A peer's failure is a result too: onnxruntime's shape inference fails on an LSTM.
    try:
        with silent():
            quantize(plain, quantized, [(part,) for part in calibration])
        yield STATIC, _in_onnxruntime(quantized), ""
    except Exception as error:  # noqa: BLE001
        print(f"{network.name}, {STATIC} fails: {quote(error, with_type=True)}", flush=True)
    validation = list(network.validation())

    def evaluate(run: Run) -> Iterator[torch.Tensor]:
        for inputs, labels in validation:
            yield run(inputs).argmax(1) == labels

    with default_threads(1):
        bundle = export(
            optimize(network.model, example_inputs=(example,)),
            example_inputs=(example,),
            output=folder / "ours",
            formats=("onnx",),
            tune=True,
            tune_seconds=tune_seconds,
            accuracy=f"drop<={BUDGET:%}",
            evaluate=evaluate,
            calibration=calibration,
        )
        loaded = load(bundle)
    yield OURS, loaded, str(loaded.route)
    try:
        path = _by_nncf(plain, folder / "nncf.onnx", calibration, is_transformer=network.is_text)
        if path is not None:
            yield NNCF, _in_onnxruntime(path), ""
            yield NNCF_OPENVINO, _in_openvino(path), ""
    except Exception as error:  # noqa: BLE001
        print(f"{network.name}, {NNCF} fails: {quote(error, with_type=True)}", flush=True)


def _in_onnxruntime(path: Path) -> Run:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def _in_openvino(path: Path, precision: str | None = None) -> Run:
    """By itself, OpenVINO computes in bfloat16 where the processor is faster at it."""
    config: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1}
    if precision is not None:
        config["INFERENCE_PRECISION_HINT"] = precision
    compiled = openvino_core().compile_model(str(path), "CPU", config)
    return lambda x: torch.from_numpy(compiled([x.numpy()])[0])


def _by_nncf(source: Path, target: Path, calibration: list[torch.Tensor], *, is_transformer: bool) -> Path | None:
    """The file as NNCF quantizes it with its defaults; None if it isn't installed."""
    try:
        import nncf
    except ImportError:
        return None
    model = onnx.load(source)
    calls = nncf.Dataset([{model.graph.input[0].name: part.numpy()} for part in calibration])
    kind = nncf.ModelType.TRANSFORMER if is_transformer else None
    with silent():
        onnx.save(nncf.quantize(model, calls, subset_size=len(calibration), model_type=kind), target)
    return target


def measured(name: str, batch: int, rounds: int, tune_seconds: float, examples: int) -> dict[str, Any]:
    """Everything about one network."""
    network = trained(name)
    tests = list(network.test(examples))
    labels = torch.cat([each for _, each in tests])
    runs, right, choices = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder, on_cpus(1):
        for contender, run, choice in made(network, Path(folder), batch, tune_seconds):
            guesses = [run(part).argmax(1) for inputs, _ in tests for part in inputs.split(batch)]
            right[contender] = (torch.cat(guesses) == labels).double().numpy()
            runs[contender], choices[contender] = run, choice
            print(f"{name}, {contender} {choice}: top-1 {right[contender].mean():.2%}", flush=True)
        inputs = tests[0][0][:batch]
        processor: dict[str, list[float]] = {}
        calls = {each: lambda run=run: run(inputs) for each, run in runs.items()}
        latencies_of(calls, rounds, _SECONDS_OF_A_FIGURE, "cpu", processor)
    found = {}
    for contender, scores in right.items():
        test = PairedTest(BUDGET, 1 - CONFIDENCE)
        test.add(right[FLOAT], scores)
        test.finish()
        found[contender] = {
            "choice": choices[contender],
            "top1": float(scores.mean()),
            "drop": test.drop,
            "upper": test.upper,
            "seconds": statistics.median(processor[contender]),
            "speed_up": ratios(processor[FLOAT], processor[contender]).to_json(),
        }
    return {"model": name, "batch": batch, "examples": len(labels), "contenders": found}


def tables_of(results: list[dict[str, Any]], environment: Mapping[str, Any]) -> list[Table]:
    table = Table(
        "Accuracy and time",
        ["model", "contender", "top-1", "drop, points", "at most (95 %)", "speed-up", "chosen"],
        left=2,
    )
    for result in results:
        for name, each in result["contenders"].items():
            drop, upper = f"{100 * each['drop']:+.2f}", f"{100 * each['upper']:.2f}"
            row = (f"{each['top1']:.2%}", drop, upper) if name != FLOAT else (f"{each['top1']:.2%}", "", "")
            table.add(result["model"], LABELS[name], *row, f"{each['speed_up']['median']:.2f}", each["choice"])
    table.caption.append(caption(environment))
    means = Table("Geometric means", ["contender", "speed-up at a drop of at most 0.5 points", "files within"])
    for name, label in LABELS.items():
        rows = [result["contenders"].get(name) for result in results]
        # A contender without a file ships the float32 file, too.
        within = [each is not None and (each["upper"] <= BUDGET or name == FLOAT) for each in rows]
        ups = [each["speed_up"]["median"] if each and ok else 1.0 for each, ok in zip(rows, within, strict=True)]
        if any(rows):
            mean = math.exp(statistics.fmean(map(math.log, ups)))
            means.add(label, f"{mean:.2f}", f"{sum(within)} of {len(within)}")
    return [table, means]


def main() -> None:
    parser = command(__doc__, models=",".join(NETWORKS), batch=8, rounds=15)
    parser.add_argument("--examples", type=positive, default=EXAMPLES, help="for the test (default: %(default)s)")
    parser.add_argument("--tune-seconds", type=float, default=60.0, help="of this project (default: %(default)s)")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    refuse_unknown(parser, "network", names, NETWORKS)
    environment = prepared(parser, arguments)
    path, before = arguments.json, []
    if path is not None and path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))["results"]
    results = {each["model"]: each for each in before}
    for name in names:
        results[name] = measured(name, arguments.batch, arguments.rounds, arguments.tune_seconds, arguments.examples)
        ordered = [results[each] for each in NETWORKS if each in results]
        data = {"environment": environment, "results": ordered}
        write(tables_of(ordered, environment), data, path, arguments.markdown)
    for table in tables_of(ordered, environment):
        table.show()


if __name__ == "__main__":
    main()
