"""Measure the latency of whole models: eager, optimized by this project, and by what a user would use instead.

    python benchmarks/latency.py --json build/latency.json --markdown build/latency.md

Every contender gets the same inputs and the same number of threads. The contenders are called in turn, so that a
temporary slowdown of the machine affects all of them. The table also shows the error of each contender, because a fast
wrong answer is worth nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders import EAGER, LABELS, Contender, Workshop, error_against
from measure import Spread, caption, latencies_of, numbers, positive, prepared, ratios, refuse_unknown
from models import CLASSIFIERS, SUBJECTS, subject
from table import Table, seconds, write

# The duration of one measurement in one round; shorter calls are repeated.
_SECONDS_OF_A_FIGURE = 0.1


def measure_batch(
    workshop: Workshop, batch: int, names: Sequence[str], rounds: int, device: str, base: str = EAGER
) -> list[dict[str, Any]]:
    """Measure all contenders at one batch size, interleaved, and compare them with the one named `base`."""
    truth = workshop.truth(batch)
    made = workshop.contenders(batch, names)
    runs = {contender.name: contender.run for contender in made if contender.run is not None}
    errors = {name: error_against(run(), truth) for name, run in runs.items()}
    figures, repeats = latencies_of(runs, rounds, _SECONDS_OF_A_FIGURE, device)
    return [_result(contender, figures, errors, repeats, base) for contender in made]


def _result(
    contender: Contender, figures: dict[str, list[float]], errors: dict[str, float], repeats: dict[str, int], base: str
) -> dict[str, Any]:
    name = contender.name
    result: dict[str, Any] = {"name": name, "set_up_seconds": contender.set_up_seconds}
    if contender.run is None:
        return {**result, "unavailable": contender.reason}
    return {
        **result,
        "unavailable": None,
        "calls_per_round": repeats[name],
        "seconds": {**Spread.of(figures[name]).to_json(), "values": figures[name]},
        "speed_up": ratios(figures[base], figures[name]).to_json() if base in figures else None,
        "error": errors[name] if math.isfinite(errors[name]) else None,
        f"error_to_{base}": _over(errors[name], errors.get(base)),
    }


def _over(error: float, other: float | None) -> float | None:
    return error / other if other and math.isfinite(error) else None


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    headings = ["model", "batch", "contender", "latency", "quartiles", "speed-up", "quartiles", "error", "of eager's"]
    table = Table("Latency", headings, left=3)
    absent = []
    for result in results:
        for contender in result["contenders"]:
            row = [result["model"], str(result["batch"]), LABELS[contender["name"]]]
            if contender["unavailable"] is not None:
                table.add(*row, "–", "", "", "", "", "")
                absent.append(f"{row[0]}, batch {row[1]}, {row[2]}: {contender['unavailable']}")
            else:
                table.add(*row, *_cells(contender))
    table.caption.append(
        "Speed-up is the time of eager over that of the contender, taken within each round; medians with quartiles. The"
        " error is the largest difference from the model in float64, over the output's largest value."
    )
    table.caption += absent
    return table


def _cells(contender: dict[str, Any]) -> list[str]:
    ratio = contender["error_to_eager"]
    return [*time_cells(contender), "" if ratio is None else f"{ratio:.3g}×"]


def time_cells(contender: dict[str, Any]) -> list[str]:
    """The latency, speed-up and error of one contender of `measure_batch`, in five cells."""
    spread, gain, error = contender["seconds"], contender["speed_up"], contender["error"]
    cells = [seconds(spread["median"]), f"{seconds(spread['low'])} – {seconds(spread['high'])}"]
    cells += ["", ""] if gain is None else [f"{gain['median']:.2f}×", f"{gain['low']:.2f} – {gain['high']:.2f}"]
    cells.append("another shape, or not finite" if error is None else f"{error:.1e}")
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        default=",".join(SUBJECTS),
        help="names, by commas (default: %(default)s; also classifiers of torchvision, all of them as torchvision)",
    )
    parser.add_argument("--batch", type=numbers, default=[1, 8], help="batch sizes (default: 1,8)")
    parser.add_argument("--rounds", type=positive, default=11, help="figures per contender (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=positive, default=cpus(), help="of torch and of onnxruntime alike")
    parser.add_argument("--contenders", default=",".join(LABELS), help="names, by commas; eager is always there")
    parser.add_argument("--scale", type=float, default=1.0, help="of image sides and text lengths, to try things out")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    models = [
        name for asked in arguments.models.split(",") for name in (CLASSIFIERS if asked == "torchvision" else (asked,))
    ]
    refuse_unknown(parser, "model", models, {**SUBJECTS, **CLASSIFIERS})
    names = [EAGER, *(name for name in arguments.contenders.split(",") if name != EAGER)]
    refuse_unknown(parser, "contender", names, LABELS)
    where = prepared(parser, arguments)

    settings = {
        "models": models,
        "contenders": names,
        "batch": arguments.batch,
        "rounds": arguments.rounds,
        "scale": arguments.scale,
        "device": arguments.device,
    }
    results: list[dict[str, Any]] = []
    data = {"benchmark": "latency", "environment": where, "settings": settings, "results": results}
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            results += _measure_model(name, names, arguments, Path(folder))
        # Write after each model, so that an interrupted run keeps its results.
        table = table_of(results)
        table.caption.append(caption(where))
        write([table], data, arguments.json, arguments.markdown)
    table.show()
    return 0


def _measure_model(
    name: str, names: Sequence[str], arguments: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    asked = subject(name, arguments.scale)
    workshop = Workshop(asked, folder, arguments.device, arguments.threads)
    results = []
    for batch in arguments.batch:
        print(f"{time.strftime('%H:%M:%S')}  {name}, batch {batch} …", file=sys.stderr)
        contenders = measure_batch(workshop, batch, names, arguments.rounds, arguments.device)
        parameters = sum(parameter.numel() for parameter in asked.model.parameters())
        results.append({"model": name, "batch": batch, "parameters": parameters, "contenders": contenders})
    return results


def cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    # Use a separate cache, so that a second run compiles everything again.
    with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        sys.exit(main())
