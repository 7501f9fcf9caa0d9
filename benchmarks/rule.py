"""Check the verdicts over a hundred models: correct results must pass, and results with a planted fault must fail.

    python benchmarks/rule.py --json build/rule.json --markdown build/rule.md

The models are the architectures of transformers in small configurations, with weights and BatchNorm statistics that
make comparisons meaningful. In each round, every model gets other weights, is optimized with the preset and exported.
The results are judged as `optimize`, `export` and `verify_bundle` judge: on the inputs of the export, and on others.
Then faults are planted in copies of the files, and in the model by a pass. Every finished model is written to the JSON
file at once. The same command resumes an interrupted run. Several processes can share the work with `--part 1/2`,
`--part 2/2` and one JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import gc
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from faulty import BY_A_PASS, IN_TORCHSCRIPT, Fault, by_a_pass, in_onnx, in_torchscript
from measure import caption, command, environment, positive, refuse_unknown
from planted import KINDS
from reach import NAMES, made
from table import Table, publish
from torch import nn

from exporters import ExporterError
from exporters.base import Adapter
from optimize_export.errors import ParityError
from optimize_export.manifest import plain
from optimize_export.structure import rebuild
from optimizer import export, optimize, verify_bundle
from optimizer.model.inputs import Call, Samples
from optimizer.parity import FACTOR, OutputNoise, ParityReport, Reference, judge, measure_reference

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from real_models import lively

FORMATS = ("torchscript", "onnx")
# The formats for the first weights of a model.
FIRST_FORMATS = (*FORMATS, "pt2")
PRESET = "passes"
LABELS = {"torchscript": "TorchScript file", "onnx": "ONNX file", "pt2": "PT2 file", PRESET: "result of the preset"}

CAUGHT, PASSED, SAME = "caught", "passed", "same"
# Outcomes of faults that pass: the effect is at most the model's noise, or at most the allowed multiple of it.
BELOW, ALLOWED = "below rounding", "allowed"
# The outcomes of faults with an effect beyond rounding.
_REAL = (CAUGHT, ALLOWED, PASSED)
# The maximum number of places to try for each kind of fault, until one has an effect.
_PLACES = 6
_SHOWN = 160
_NEXT_TO_NOTHING = 0.01

Answers = list[tuple[torch.Tensor, ...]]
Flatten = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Settings:
    """How the models are judged.

    Attributes:
        inputs: the number of further inputs for each draw of weights, in addition to those of the export.
        faults: the number of draws of weights in which faults are planted, one of each kind.
    """

    inputs: int
    faults: int
    seed: int


@dataclass
class Unit:
    """The results of one model with one draw of weights, as plain data.

    Attributes:
        files: by format, the route, or why there is no file.
        runs: each judged artifact or result, with its verdict.
        faults: each planted fault, with its outcome.
        error: a defect of the program, with its traceback.
    """

    model: str
    draw: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


def measure(name: str, draw: int, settings: Settings) -> Unit:
    """Measure one model with one draw of weights."""
    unit = Unit(name, draw)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as text:
            _measure_into(unit, settings, Path(text))
    except Exception:  # noqa: BLE001 - any error is a result of this model, and makes the whole run fail in the end
        unit.error = traceback.format_exc()
    unit.seconds = round(time.perf_counter() - started, 1)
    torch._dynamo.reset()
    gc.collect()
    return unit


def _measure_into(unit: Unit, settings: Settings, folder: Path) -> None:
    model, call = drawn(unit.model, unit.draw)
    seed = settings.seed + 1000 * unit.draw
    example = {"example_inputs": call.args or None, "example_kwargs": call.kwargs or None}
    fast = optimize(model, **example, seed=seed)
    unit.runs.append(_of_optimize(fast))
    adapter = Adapter(fast, call.args, call.kwargs)
    candidates: dict[str, tuple[Any, Flatten | None]] = {PRESET: (fast, None)}
    paths: dict[str, Path] = {}
    formats = FORMATS if unit.draw else FIRST_FORMATS
    for format, bundle in _exported(unit, fast, example, formats, folder, seed):
        paths[format] = next(artifact.path for artifact in bundle.artifacts if artifact.format == format)
        candidates[format] = (bundle.load(format), adapter.flatten_inputs)
    for number in range(1, settings.inputs + 1):
        others = another(call, seed + number)
        samples = Samples(others.args, others.kwargs, seed=seed + number)
        reference = measure_reference(model, samples)
        # Copy the current noises: the comparison with a candidate may measure them again.
        noises = dict(reference.noises)
        for what, (candidate, flatten) in candidates.items():
            unit.runs.append(_figures(what, number, judge(reference.compare(candidate, flatten=flatten))))
    if unit.draw < settings.faults:
        pairs = {what: pair for what, pair in candidates.items() if what in ("torchscript", "onnx")}
        tensors = adapter.flatten_inputs(*_pair(call))
        draw = random.Random(f"{unit.model} {seed}")
        _plant(unit, _Place(reference, noises, adapter.flatten_inputs, call), model, pairs, paths, tensors, draw)


def drawn(name: str, draw: int) -> tuple[nn.Module, Call]:
    """A model in eval with its own draw of weights, and a call of it."""
    with torch.random.fork_rng():
        torch.manual_seed(draw)
        model, args, kwargs = made(name)
    if draw:
        lively(model, draw)
    _scale_up(model, draw)
    return model, Call(args, kwargs)


def _scale_up(model: nn.Module, draw: int) -> None:
    """Give tiny layer scales (they start at about 1e-5) the size that they have in a trained model.

    Otherwise the results of their layers don't reach the output, nor does any fault there.
    """
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for parameter in model.parameters():
            same = parameter.dim() == 1 and len(parameter) > 1 and len(parameter.unique()) == 1
            if same and 0 < parameter[0] < _NEXT_TO_NOTHING:
                parameter.uniform_(0.2, 1.0, generator=generator)


def another(call: Call, seed: int) -> Call:
    """A call like this one: floats are drawn anew as the product draws them, and tensors of tokens are shuffled."""
    samples = Samples(call.args, call.kwargs, seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def shuffled(tensor: torch.Tensor) -> torch.Tensor:
        # Don't shuffle a mask, which belongs to its row.
        if tensor.is_floating_point() or len(tensor.unique()) <= 2:
            return tensor
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)

    args, kwargs = rebuild(_pair(samples.at(samples.batch_size, 1)), shuffled)
    return Call(args, kwargs)


def _pair(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return call.args, call.kwargs


def _of_optimize(fast: nn.Module) -> dict[str, Any]:
    """The verdict of `optimize` on its own passes; no pass of the preset may fail or be rolled back."""
    report = fast.report
    run = _figures(PRESET, 0, report.parity)
    lost = [record for record in report.passes if record.status in ("rolled-back", "failed")]
    if lost:
        return {**run, "verdict": "failed", "reason": "; ".join(f"{each.name}: {each.reason}" for each in lost)}
    return run


def _figures(what: str, inputs: int, report: ParityReport) -> dict[str, Any]:
    """A short form of a verdict; with all measurements if it isn't "ok"."""
    slices = max((output.slice_ratio for output in report.outputs if output.judged), default=0.0)
    run = {"what": what, "inputs": inputs, "verdict": report.verdict}
    run |= {"ratio": float(f"{report.ratio:.3g}"), "slice": float(f"{slices:.3g}"), "truth": report.reference}
    return run if report.ok else {**run, "reason": report.reason, "figures": _all_figures(report)}


def _all_figures(report: ParityReport) -> dict[str, Any]:
    outputs = tuple(replace(output, calls=()) for output in report.outputs)
    return dict(plain(replace(report, outputs=outputs).to_json()))


def _exported(
    unit: Unit, fast: nn.Module, example: dict[str, Any], formats: Sequence[str], folder: Path, seed: int
) -> Iterator[tuple[str, Any]]:
    """The bundle with each format that the model can be exported to; records route, verdict and refusal in the unit."""
    try:
        whole = export(fast, **example, output=folder / "all", formats=formats, strict=True, seed=seed, bench=False)
    except (ExporterError, ParityError):
        # One failed format withholds all. Export each by itself, because only then the error has its measurements.
        for format in formats:
            yield from _exported_alone(unit, fast, example, format, folder / format, seed)
        return
    for format in formats:
        _keep(unit, format, whole)
        yield format, whole


def _exported_alone(
    unit: Unit, fast: nn.Module, example: dict[str, Any], format: str, folder: Path, seed: int
) -> Iterator[tuple[str, Any]]:
    try:
        bundle = export(fast, **example, output=folder, formats=[format], seed=seed, bench=False)
    except ExporterError as error:
        unit.files[format] = {"route": None, "reason": str(error)}
        return
    except ParityError as error:
        (entry,) = error.figures["artifacts"]
        unit.files[format] = {"route": entry["route"], "refused": entry["refused"]}
        unit.runs.append(_figures(format, 0, ParityReport.from_json(entry["parity"])))
        unit.runs[-1]["reason"] = str(error)
        return
    _keep(unit, format, bundle)
    yield format, bundle


def _keep(unit: Unit, format: str, bundle: Any) -> None:
    entry = next(entry for entry in bundle.manifest["artifacts"] if entry["format"] == format)
    unit.files[format] = {"route": entry["route"], "refused": entry["refused"]}
    run = _figures(format, 0, ParityReport.from_json(entry["parity"]))
    problems = [each.problem for each in verify_bundle(bundle.path).artifacts if each.format == format and not each.ok]
    unit.runs.append({**run, "verdict": "failed", "reason": problems[0]} if problems else run)


# -------------------------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class _Place:
    """The model and inputs on which faults are judged.

    Attributes:
        call: the call of the export.
        noises: the noises of the model's outputs, before any comparison.
    """

    reference: Reference
    noises: dict[str, OutputNoise]
    flatten: Flatten
    call: Call

    def outcome(self, right: Any, fault: Fault, flatten: Flatten | None) -> dict[str, Any]:
        """The outcome of a fault: caught or passed; or, if it has little or no effect, one of the outcomes for that.

        Args:
            right: the correct version, called with flat tensors.
            flatten: None if the fault is in a module, which is judged as `optimize` and `check_parity` judge it.
        """
        if fault.seen:
            return {"place": fault.place, "outcome": CAUGHT, "reason": fault.seen[:_SHOWN]}
        report = judge(self.reference.compare(fault.candidate, flatten=flatten))
        if not report.ok:
            return {"place": fault.place, "outcome": CAUGHT, "reason": report.reason[:_SHOWN]}
        spoilt = _flat(fault.candidate, self.call) if flatten is None else fault.candidate
        effect = self._effect(right, spoilt)
        outcome = SAME if effect == 0 else BELOW if effect <= 1 else ALLOWED if effect <= FACTOR else PASSED
        found = {"place": fault.place, "outcome": outcome, "effect": float(f"{min(effect, 1e30):.3g}")}
        return found if outcome == SAME else {**found, "figures": _all_figures(report)}

    def _effect(self, right: Any, spoilt: Any) -> float:
        """How far the fault moves an output, in units of the model's own noise there; 0 if no output differs by a bit.

        The largest difference and the root mean square are each compared with their noise, and the larger ratio counts.
        """
        names = self.reference.output_names
        pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in names}
        for _, call in self.reference.calls():
            tensors = self.flatten(*_pair(call))
            for name, one, other in zip(names, right(*tensors), spoilt(*tensors), strict=True):
                pairs[name].append((one, other))
        return max(_moved(each, self.noises[name]) for name, each in pairs.items())


def _moved(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], noise: OutputNoise) -> float:
    if all(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) for one, other in pairs):
        return 0.0
    if not pairs[0][0].is_floating_point():
        return float("inf")
    errors = torch.cat([(one.double() - other.double()).abs().flatten() for one, other in pairs])
    errors = errors[errors.isfinite()]
    if not errors.numel():
        return float("inf")
    largest, rms = errors.max().item(), errors.square().mean().sqrt().item()
    return max(value / own if own else float("inf") for value, own in ((largest, noise.noise), (rms, noise.noise_rms)))


def _plant(
    unit: Unit,
    place: _Place,
    model: nn.Module,
    files: dict[str, tuple[Any, Flatten | None]],
    paths: dict[str, Path],
    tensors: tuple[torch.Tensor, ...],
    draw: random.Random,
) -> None:
    """Plant one fault of each kind in each file, and one by a pass; try random places until one has an effect."""
    if "onnx" in files:
        right, flatten = files["onnx"]
        for kind in KINDS:
            faults = in_onnx(paths["onnx"], kind, tensors, draw)
            unit.faults += _until_seen("onnx", kind, (place.outcome(right, fault, flatten) for fault in faults))
    if "torchscript" in files:
        right, flatten = files["torchscript"]
        faults = in_torchscript(paths["torchscript"], draw)
        outcomes = (place.outcome(right, fault, flatten) for fault in faults)
        unit.faults += _until_seen("torchscript", IN_TORCHSCRIPT, outcomes)
    own = _flat(model, place.call)
    faults = by_a_pass(model, place.call, draw)
    outcomes = (place.outcome(own, fault, None) for fault in faults)
    unit.faults += _until_seen(PRESET, BY_A_PASS, outcomes)


def _until_seen(what: str, kind: str, outcomes: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for outcome in outcomes:
        found.append({"what": what, "kind": kind, **outcome})
        if outcome["outcome"] in _REAL or len(found) == _PLACES:
            break
    return found


def _flat(module: nn.Module, call: Call) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Wrap a module, so that it is called like a file."""
    adapter = Adapter(module, call.args, call.kwargs)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return adapter.run(tensors)

    return run


# ------------------------------------------------------------------------------------------------------------- results


class Results:
    """The finished units, by model and draw. Each is written to disk as soon as it is finished.

    Several processes may write to one file: each adds its own unit to those in the file.
    """

    def __init__(self, path: Path | None, settings: Settings, where: dict[str, Any]) -> None:
        self._path = path
        self._begun = {"benchmark": "rule", "environment": where, "settings": vars(settings), "units": []}
        self.data = self._begun
        with self._alone():
            self.data = self._read()
        if self.data["settings"] != self._begun["settings"]:
            raise ValueError(f"{path} holds figures of other settings, {self.data['settings']}: name another file")

    @property
    def units(self) -> list[dict[str, Any]]:
        return self.data["units"]

    def has(self, name: str, draw: int) -> bool:
        return any((unit["model"], unit["draw"]) == (name, draw) and not unit["error"] for unit in self.units)

    def add(self, unit: Unit) -> None:
        with self._alone():
            self.data = self._read()
            others = [each for each in self.units if (each["model"], each["draw"]) != (unit.model, unit.draw)]
            self.data["units"] = [*others, plain(vars(unit))]
            self.data["environment"]["until"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            if self._path is not None:
                beside = self._path.with_suffix(".new")
                beside.write_text(_text(self.data), encoding="utf-8")
                beside.replace(self._path)

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return self.data
        return json.loads(self._path.read_text(encoding="utf-8"))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._path is None:
            yield
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _text(data: dict[str, Any]) -> str:
    """Format the data as JSON, with one line for each unit."""
    head = {**data, "total": totals(data["units"])}
    del head["units"]
    units = sorted(data["units"], key=lambda unit: (unit["draw"], NAMES.index(unit["model"])))
    lines = ",\n".join(json.dumps(unit, allow_nan=False) for unit in units)
    return f'{json.dumps(head, indent=1)[:-2]},\n "units": [\n{lines}\n]}}\n'


def totals(units: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts for the goals, over all units."""
    runs = [run for unit in units for run in unit["runs"]]
    faults = [fault for unit in units for fault in unit["faults"]]
    outcomes = Counter(fault["outcome"] for fault in faults)
    return {
        "runs": len(runs),
        "failed": sum(run["verdict"] != "ok" for run in runs),
        "faults": sum(outcomes[outcome] for outcome in _REAL),
        "allowed": outcomes[ALLOWED],
        "missed": outcomes[PASSED],
        "same": outcomes[SAME],
        "below": outcomes[BELOW],
        "errors": sum(bool(unit["error"]) for unit in units),
    }


def right_table(units: Sequence[dict[str, Any]]) -> Table:
    headings = ["what is right", "models", "draws of weights", "judged", "not passed", "median", "99 %", "largest"]
    table = Table("What is right, and the verdict on it", headings)
    for what, label in LABELS.items():
        judged = [(unit, run) for unit in units for run in unit["runs"] if run["what"] == what]
        if not judged:
            continue
        ratios = sorted(float(run["ratio"]) for _, run in judged)
        table.add(
            label,
            str(len({unit["model"] for unit, _ in judged})),
            str(len({(unit["model"], unit["draw"]) for unit, _ in judged})),
            str(len(judged)),
            str(sum(run["verdict"] != "ok" for _, run in judged)),
            *(f"{ratios[round(share * (len(ratios) - 1))]:.2g}" for share in (0.5, 0.99, 1.0)),
        )
    table.caption.append(f"The last columns: the largest error, in units of the noise; {FACTOR:g} are allowed.")
    for unit in units:
        table.caption += [
            f"{unit['model']}, weights {unit['draw']}, inputs {run['inputs']}: {LABELS[run['what']]}: {run['reason']}"
            for run in unit["runs"]
            if run["verdict"] != "ok"
        ]
    return table


def fault_table(units: Sequence[dict[str, Any]]) -> Table:
    headings = [
        "fault",
        "in",
        "models",
        "planted",
        "caught",
        f"passed, by {FACTOR:g} times the noise at most",
        "passed",
    ]
    table = Table("Faults, and the verdict on them", headings, left=2)
    faults = [(unit, fault) for unit in units for fault in unit["faults"]]
    for what, kind in dict.fromkeys((fault["what"], fault["kind"]) for _, fault in faults):
        own = [(unit, fault) for unit, fault in faults if (fault["what"], fault["kind"]) == (what, kind)]
        real = [(unit, fault) for unit, fault in own if fault["outcome"] in _REAL]
        counts = Counter(fault["outcome"] for _, fault in real)
        table.add(
            kind, LABELS[what], str(len({unit["model"] for unit, _ in real})), str(len(real)),
            str(counts[CAUGHT]), str(counts[ALLOWED]), str(counts[PASSED]),
        )  # fmt: skip
    for unit, fault in faults:
        if fault["outcome"] in (ALLOWED, PASSED):
            where = f"{unit['model']}, weights {unit['draw']}: {fault['kind']} at {fault['place']}"
            judged = ParityReport.from_json(fault["figures"]).ratio
            table.caption.append(
                f"{where} passes, and moves an output by {fault['effect']} times its noise; the verdict, which may have"
                f" taken the noise at more samples, says {judged:.2g} times."
            )
    return table


def harmless_table(units: Sequence[dict[str, Any]]) -> Table:
    """The faults with no effect beyond rounding."""
    headings = ["fault", "in", "why it is none", "planted", "for example"]
    table = Table("Faults that change nothing, which aren't counted", headings, left=3)
    faults = [(unit, fault) for unit in units for fault in unit["faults"]]
    for what, kind in dict.fromkeys((fault["what"], fault["kind"]) for _, fault in faults):
        for outcome, why in ((SAME, "no output differs by a bit"), (BELOW, "no more than the model's own rounding")):
            found = [
                (unit, fault)
                for unit, fault in faults
                if (fault["what"], fault["kind"], fault["outcome"]) == (what, kind, outcome)
            ]
            if found:
                examples = dict.fromkeys(f"{unit['model']} ({fault['place']})" for unit, fault in found)
                table.add(kind, LABELS[what], why, str(len(found)), ", ".join(list(examples)[:3]))
    return table


def file_table(units: Sequence[dict[str, Any]]) -> Table:
    table = Table("Models that can be exported", ["format", "models", "exported", "share", "by the routes"])
    for format in FIRST_FORMATS:
        found: dict[str, list[str | None]] = {}
        for unit in units:
            if format in unit["files"]:
                found.setdefault(unit["model"], []).append(unit["files"][format]["route"])
        if not found:
            continue
        exported = [routes for routes in found.values() if all(routes)]
        ways = Counter(" or ".join(sorted({str(route) for route in routes})) for routes in exported)
        share = f"{100 * len(exported) / len(found):.0f} %"
        routes = ", ".join(f"{route} {count}" for route, count in ways.most_common())
        table.add(format, str(len(found)), str(len(exported)), share, routes)
    return table


def refusal_table(units: Sequence[dict[str, Any]]) -> Table:
    table = Table("Models that can't be exported", ["model", "format", "why"], left=3)
    rows = dict.fromkeys(
        (unit["model"], format, file["reason"])
        for unit in units
        for format, file in unit["files"].items()
        if file["route"] is None
    )
    for row in sorted(rows):
        table.add(*row)
    return table


def tables_of(data: dict[str, Any]) -> list[Table]:
    units = data["units"]
    more = [fault_table(units), harmless_table(units), file_table(units), refusal_table(units)]
    tables = [right_table(units), *(table for table in more if table.rows)]
    total = totals(units)
    tables[-1].caption += [
        f"{unit['model']}, weights {unit['draw']}: {unit['error'].strip().splitlines()[-1]}"
        for unit in units
        if unit["error"]
    ]
    tables[-1].caption += [
        f"Of {total['runs']} correct files and results, {total['failed']} fail. Of {total['faults']} faults,"
        f" {total['missed']} pass although they move an output by more than the allowed {FACTOR:g} times its noise, and"
        f" {total['allowed']} pass because they move it by less. The goal, no failure in 2,000 and no larger fault that"
        f" passes, is {'met' if is_met(total) else 'missed'}. {total['same']} more faults change nothing, and"
        f" {total['below']} no more than rounding does.",
        caption(data["environment"]),
    ]
    return tables


def is_met(total: dict[str, Any]) -> bool:
    return not (total["failed"] or total["missed"] or total["errors"])


def part(text: str) -> tuple[int, int]:
    """Parse an option such as `1/2`."""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 1/2")
    return int(number), int(of)


def run(names: Sequence[str], results: Results, settings: Settings, runs: int) -> None:
    """Measure models round by round, each time with other weights, until there are `runs` runs."""
    for draw in range(runs):
        for name in names:
            if totals(results.units)["runs"] >= runs:
                return
            if results.has(name, draw):
                continue
            unit = measure(name, draw, settings)
            results.add(unit)
            print(_line(unit, results), file=sys.stderr, flush=True)


def _line(unit: Unit, results: Results) -> str:
    wrong = [f"{run['what']}: {run['reason']}" for run in unit.runs if run["verdict"] != "ok"]
    wrong += [
        f"passed: {fault['what']}, {fault['kind']}, {fault['place']}, {fault['effect']} times the noise"
        for fault in unit.faults
        if fault["outcome"] in (ALLOWED, PASSED)
    ]
    wrong += [unit.error] if unit.error else []
    text = f"{unit.model}, weights {unit.draw}: {len(unit.runs)} runs, {len(unit.faults)} faults, {unit.seconds} s"
    return "\n    ".join([f"{text}; {totals(results.units)}", *wrong])


def main() -> int:
    # Small models would run as written, where their graphs are slower.
    os.environ["OPTIMIZE_EXPORT_NO_BENCH"] = "1"
    parser = command(__doc__, check=True)
    parser.add_argument("--models", help="names separated by commas (default: all)")
    parser.add_argument(
        "--runs", type=positive, default=2000, help="stop when so many are judged (default: %(default)s)"
    )
    parser.add_argument(
        "--inputs", type=positive, default=2, help="other inputs for each weights (default: %(default)s)"
    )
    parser.add_argument(
        "--faults", type=int, default=1, help="draws of weights to plant faults in (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of inputs and places (default: %(default)s)")
    parser.add_argument("--part", type=part, default=(1, 1), help="1/2 is every second model, from the first on")
    arguments = parser.parse_args()
    names = arguments.models.split(",") if arguments.models else list(NAMES)
    refuse_unknown(parser, "model", names, NAMES)
    torch.set_num_threads(arguments.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # Hide onnxruntime's messages about faulty files; the verdict has the error.
    ort.set_default_logger_severity(4)
    settings = Settings(arguments.inputs, arguments.faults, arguments.seed)
    try:
        results = Results(arguments.json, settings, environment(arguments.threads))
    except ValueError as error:
        parser.error(str(error))
    number, of = arguments.part
    run(names[number - 1 :: of], results, settings, arguments.runs)
    # The JSON file has already been written.
    publish(tables_of(results.data), {}, None, arguments.markdown)
    return 1 if arguments.check and not is_met(totals(results.units)) else 0


if __name__ == "__main__":
    sys.exit(main())
