"""Measure the latency of whole models: eager, optimized by this project, and by what a user would use instead.

    python benchmarks/latency.py --json build/latency.json --markdown build/latency.md

Each model, batch size and number of threads is measured in a process of its own, which may use as many CPUs as threads.
There, every contender gets the same inputs. The contenders are called in turn, so that a temporary slowdown of the
machine affects all of them. The tables also show the error of each contender, because a fast wrong answer is worth
nothing, and at the end whether this project pays, by goals. `--models torchvision` measures classifiers of torchvision.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bars import picture_of
from contenders import (
    AUTOTUNE,
    BUDGET,
    COMPILE,
    EAGER,
    EXACT,
    FREEZING,
    JIT,
    LABELS,
    ONNX,
    OPENVINO,
    OPENVINO_BF16,
    QUANTIZED,
    QUANTIZED_OPENVINO,
    Contender,
    Workshop,
    cosine_to,
    error_against,
)
from deployments import Deployments
from goals import goals_of, goals_table, summary_of, summary_table
from measure import (
    Spread,
    caption,
    command,
    environment,
    latencies_of,
    on_cpus,
    positive,
    prepared,
    ratios,
    refuse_unknown,
)
from models import ALL_SUBJECTS, CLASSIFIERS, LATENCY_SUBJECTS, subject
from table import Table, mebibytes, publish, seconds, write

from optimize_export.runtime import usable_cpus

# The other contenders are measured only if they are named.
DEFAULT = (
    EAGER, COMPILE, AUTOTUNE, FREEZING, JIT, ONNX, OPENVINO, OPENVINO_BF16, QUANTIZED, QUANTIZED_OPENVINO, EXACT, BUDGET,
)  # fmt: skip
_SECONDS_OF_A_FIGURE = 0.1
# The options that results in one table share.
_SETTINGS = ("rounds", "scale", "device", "tune_seconds")


def measure_batch(
    workshop: Workshop,
    batch: int,
    names: Sequence[str],
    rounds: int,
    device: str,
    base: str = EAGER,
    seconds: float = _SECONDS_OF_A_FIGURE,
) -> list[dict[str, Any]]:
    """Measure all contenders at one batch size, interleaved, and compare them with the one named `base`.

    Args:
        seconds: the duration of one measurement in one round; shorter calls are repeated.
    """
    truth = workshop.truth(batch)
    made = workshop.contenders(batch, names)
    runs = {contender.name: contender.run for contender in made if contender.run is not None}
    errors, cosines = {}, {}
    for name, run in runs.items():
        outputs = run()
        errors[name], cosines[name] = error_against(outputs, truth), cosine_to(outputs, truth)
    processor: dict[str, list[float]] = {}
    figures, repeats = latencies_of(runs, rounds, seconds, device, processor)
    return [_result(contender, figures, processor, errors, cosines, repeats, base) for contender in made]


def _result(
    contender: Contender,
    figures: dict[str, list[float]],
    processor: dict[str, list[float]],
    errors: dict[str, float],
    cosines: dict[str, float | None],
    repeats: dict[str, int],
    base: str,
) -> dict[str, Any]:
    name = contender.name
    result: dict[str, Any] = {"name": name, "set_up_seconds": contender.set_up_seconds}
    if contender.run is None:
        return {**result, "unavailable": contender.reason}
    return {
        **result,
        "unavailable": None,
        "choice": contender.choice,
        "tuning": contender.tuning,
        "bytes": contender.bytes,
        "calls_per_round": repeats[name],
        "seconds": {**Spread.of(figures[name]).to_json(), "values": figures[name]},
        "speed_up": ratios(figures[base], figures[name]).to_json() if base in figures else None,
        "processor_seconds": {**Spread.of(processor[name]).to_json(), "values": processor[name]},
        "processor_speed_up": ratios(processor[base], processor[name]).to_json() if base in processor else None,
        "over_onnx": ratios(figures[ONNX], figures[name]).to_json() if ONNX in figures else None,
        "error": errors[name] if math.isfinite(errors[name]) else None,
        f"error_to_{base}": _over(errors[name], errors.get(base)),
        "cosine": cosines[name],
    }


def _over(error: float, other: float | None) -> float | None:
    return error / other if other and math.isfinite(error) else None


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    headings = [
        "model", "batch", "threads", "contender", "latency", "quartiles", "speed-up", "quartiles", "by processor", "error",
        "of eager's", "over onnxruntime", "cosine", "size", "set-up",
    ]  # fmt: skip
    table = Table("Latency", headings, left=4)
    absent, choices = [], []
    for result in results:
        for contender in result["contenders"]:
            row = [result["model"], str(result["batch"]), str(result["threads"]), LABELS[contender["name"]]]
            place = f"{row[0]}, batch {row[1]}, threads {row[2]}, {row[3]}"
            if contender["unavailable"] is not None:
                table.add(*row, "–", *[""] * (len(headings) - 5))
                absent.append(f"{place}: {contender['unavailable']}")
                continue
            table.add(*row, *_cells(contender))
            if contender["choice"]:
                choices.append(f"{place}: {contender['choice']}")
    table.caption.append(
        "Speed-up is the time of eager over that of the contender, taken within each round; medians with quartiles; by"
        " processor, the same of the processor time. The"
        " same over plain torch.onnx.export in onnxruntime. The error is the largest difference from the model in float64,"
        " over the output's largest value; the cosine is the least of any output. The set-up includes the first call and,"
        " for torch.compile, the compilation; the first of all also compiles torch's headers."
    )
    if choices:
        table.caption.append("Chosen:")
        table.caption += choices
    if absent:
        table.caption.append("Not available:")
        table.caption += absent
    return table


def _cells(contender: dict[str, Any]) -> list[str]:
    ratio, gain, cosine = contender["error_to_eager"], contender["over_onnx"], contender["cosine"]
    return [
        *time_cells(contender),
        "" if ratio is None else f"{ratio:.3g}×",
        "" if gain is None else f"{gain['median']:.2f}×",
        "" if cosine is None else f"{cosine:.5f}",
        mebibytes(contender["bytes"]),
        seconds(contender["set_up_seconds"]),
    ]


def time_cells(contender: dict[str, Any]) -> list[str]:
    """The latency, speed-up and error of one contender of `measure_batch`, in six cells."""
    spread, gain, error = contender["seconds"], contender["speed_up"], contender["error"]
    busy = contender["processor_speed_up"]
    cells = [seconds(spread["median"]), f"{seconds(spread['low'])} – {seconds(spread['high'])}"]
    cells += ["", ""] if gain is None else [f"{gain['median']:.2f}×", f"{gain['low']:.2f} – {gain['high']:.2f}"]
    cells.append("" if busy is None else f"{busy['median']:.2f}×")
    cells.append("another shape, or not finite" if error is None else f"{error:.1e}")
    return cells


def main() -> int:
    parser = command(
        __doc__,
        models=",".join(LATENCY_SUBJECTS),
        batch=[1, 8],
        rounds=11,
        device=True,
        threads=sorted({1, usable_cpus()}),
        scale=True,
        check=True,
    )
    parser.add_argument("--contenders", default=",".join(DEFAULT), help="names, by commas; eager is always there")
    parser.add_argument("--tune-seconds", type=positive, default=60, help="of each tuned export (default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="write a picture of the speed-ups here (SVG)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure only what --json lacks; it must come from this machine with the same versions and options",
    )
    # Measure one configuration in this process, and write it to --json.
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = [
        name for asked in arguments.models.split(",") for name in (CLASSIFIERS if asked == "torchvision" else (asked,))
    ]
    refuse_unknown(parser, "model", models, ALL_SUBJECTS)
    names = [EAGER, *(name for name in arguments.contenders.split(",") if name != EAGER)]
    refuse_unknown(parser, "contender", names, LABELS)
    if arguments.alone:
        return _measure_alone(parser, arguments, models, names)
    if arguments.resume and (arguments.json is None or not arguments.json.is_file()):
        parser.error("--resume needs --json with the file of an earlier run")
    where = environment(max(arguments.threads), arguments.device)
    settings = {"contenders": names, **{key: getattr(arguments, key) for key in _SETTINGS}}
    results: list[dict[str, Any]] = []
    if arguments.resume:
        earlier = json.loads(arguments.json.read_text(encoding="utf-8"))
        if differs := _differences(earlier, where, settings):
            parser.error(f"{arguments.json} can't be resumed: {', '.join(differs)} differ")
        results = earlier["results"]
    return _measure_all(arguments, models, names, where, settings, results)


def _differences(earlier: dict[str, Any], where: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """What tells an earlier run from this one, other than its configurations and its date."""
    places = [
        key for key in ("cpu", "cpus", "device", "python", "versions") if earlier["environment"][key] != where[key]
    ]
    return places + [key for key in settings if earlier["settings"][key] != settings[key]]


def _measure_all(
    arguments: argparse.Namespace,
    models: Sequence[str],
    names: Sequence[str],
    where: dict[str, Any],
    settings: dict[str, Any],
    results: list[dict[str, Any]],
) -> int:
    data = {"benchmark": "latency", "environment": where, "settings": settings, "results": results}
    known = {(each["model"], each["batch"], each["threads"]) for each in results}
    tables = _tables(results, data, where) if results else []
    with tempfile.TemporaryDirectory(prefix="latency-") as folder:
        for name, batch, threads in itertools.product(models, arguments.batch, arguments.threads):
            if (name, batch, threads) in known:
                continue
            now = time.strftime("%H:%M:%S")
            print(f"{now}  {name}, batch {batch}, threads {threads} …", file=sys.stderr, flush=True)
            results.append(_measured(name, batch, threads, names, arguments, Path(folder)))
            # Write after each configuration, so that an interrupted run keeps its results.
            tables = _tables(results, data, where)
            write(tables, data, arguments.json, arguments.markdown)
            if arguments.picture is not None:
                arguments.picture.parent.mkdir(parents=True, exist_ok=True)
                arguments.picture.write_text(picture_of(results), encoding="utf-8")
    publish(tables, data, None, None)
    return int(arguments.check and not all(goal["met"] for goal in data["goals"]))


def _tables(results: Sequence[dict[str, Any]], data: dict[str, Any], where: dict[str, Any]) -> list[Table]:
    data["summary"], data["goals"] = summary_of(results), goals_of(results)
    tables = [table_of(results), summary_table(data["summary"]), goals_table(data["goals"])]
    tables[-1].caption.append(caption(where))
    return tables


def _measured(
    name: str, batch: int, threads: int, names: Sequence[str], arguments: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Measure one configuration in a process of its own, so that no other one has its memory or its threads."""
    path = folder / "result.json"
    command = [sys.executable, __file__, "--alone", f"--models={name}", f"--batch={batch}", f"--threads={threads}"]
    command += [f"--contenders={','.join(names)}", f"--rounds={arguments.rounds}", f"--device={arguments.device}"]
    command += [f"--scale={arguments.scale}", f"--tune-seconds={arguments.tune_seconds}", f"--json={path}"]
    # Of this run alone, so that everything is compiled again, and for this number of threads.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor-{threads}")}
    variables = {**os.environ, **cache, "OMP_NUM_THREADS": str(threads)}
    with on_cpus(threads if arguments.device == "cpu" else usable_cpus()):
        code = subprocess.run(command, env=variables, check=False).returncode
    if code == 0:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    reason = f"the process of this configuration ended with {code}"
    ended = [{"name": each, "set_up_seconds": 0.0, "unavailable": reason} for each in names]
    return {"model": name, "batch": batch, "threads": threads, "parameters": None, "contenders": ended}


def _measure_alone(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, models: Sequence[str], names: Sequence[str]
) -> int:
    """Measure one configuration in this process, and write the result."""
    (name,), (batch,), (threads,) = models, arguments.batch, arguments.threads
    arguments.threads = threads
    prepared(parser, arguments)
    asked = subject(name, arguments.scale)
    with tempfile.TemporaryDirectory() as folder:
        workshop = Deployments(asked, Path(folder), arguments.device, threads, arguments.tune_seconds)
        contenders = measure_batch(workshop, batch, names, arguments.rounds, arguments.device)
    result = {
        "model": asked.name,
        "batch": batch,
        "threads": threads,
        "parameters": sum(parameter.numel() for parameter in asked.model.parameters()),
        "contenders": contenders,
    }
    arguments.json.write_text(json.dumps(result, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
