"""Judge the stored measurements of a bundle again, without loading or running an artifact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from optimize_export.errors import BundleError, UsageError
from optimize_export.manifest import sums_problem
from optimizer.bundle.bundle import open_bundle
from optimizer.bundle.golden import stored_tolerances
from optimizer.bundle.verify import ArtifactFigures, VerifyReport, factor_between
from optimizer.options import AccuracyBudget
from optimizer.parity import FACTOR, Accuracy, Measurement, Tolerance, judge


class RejudgeReport(VerifyReport):
    """The outcome of `rejudge_bundle`, with the fields and JSON of `VerifyReport`.

    Attributes:
        device: the type of the device where the artifacts were measured.
    """

    said: ClassVar[str] = "correct by its stored measurements"


def rejudge_bundle(
    path: str | Path, *, atol: Tolerance = None, rtol: Tolerance = None, factor: float | None = None
) -> RejudgeReport:
    """Judge the stored measurements of a bundle again. This runs, loads and changes nothing.

    Without arguments, this repeats the judgement of the export with the tolerances of the export. Any argument discards
    those tolerances.

    Args:
        atol, rtol: tolerances that replace the noise: a number, or a dict by output name. The names are those in the
            files, or those in the model if they differ.
        factor: the allowed error of an output in units of its noise. The default is 4, or more if the original ran on
            another device.

    Returns:
        A report with the fields of `verify_bundle`'s report.

    Raises:
        BundleError: there is no readable manifest, or the program version that wrote the bundle kept no measurements.
        UsageError: a tolerance is negative or names an unknown output, or the factor isn't a number above 0.
    """
    bundle = open_bundle(path)
    folder, manifest = bundle.path, bundle.manifest
    if factor is not None and not 0 < factor < math.inf:
        raise UsageError(f"factor must be a number above 0, not {factor!r}.")
    device = manifest["device"]["type"]
    if problem := sums_problem(folder, manifest):
        # The measurements in a changed manifest can't be trusted.
        return RejudgeReport(folder, device, (problem,), ())
    if lacking := [artifact["path"] for artifact in manifest["artifacts"] if not _can_be_judged(artifact)]:
        raise BundleError(
            f"{folder} has no measurement of {', '.join(lacking)}, because the program version that wrote it stored "
            "none: export the model again, or verify the bundle."
        )
    notes = [f"judged by the measurements on {manifest['device']['name']} ({device}); nothing was run"]
    by_user: dict[str, Any] = {"atol": atol, "rtol": rtol}
    if atol is None and rtol is None and factor is None:
        by_user = dict(stored_tolerances(manifest["golden"]))
    if factor is None:
        golden = manifest["golden"]
        dtypes = (output["dtype"] for output in golden["outputs"])
        factor = FACTOR * factor_between(golden["device"], manifest["device"], dtypes)
    figures = []
    for artifact in manifest["artifacts"]:
        if (accuracy := artifact.get("accuracy")) is not None:
            figures.append(_lossy(artifact, accuracy, device))
            continue
        measurement = Measurement.from_json(artifact["measurement"])
        own = (output.noise.name for output in measurement.outputs)
        names = dict(zip(own, (tensor["name"] for tensor in artifact["outputs"]), strict=True))
        parity = judge(measurement, **by_user, factor=factor, names=names)
        calls = max((len(output.calls) for output in measurement.outputs), default=0)
        placement = artifact.get("placement")
        figures.append(
            ArtifactFigures(artifact["format"], artifact["path"], measurement.device, calls, parity, placement)
        )
    return RejudgeReport(folder, device, (), tuple(figures), tuple(notes))


def _can_be_judged(artifact: Mapping[str, Any]) -> bool:
    return bool(artifact.get("measurement") or artifact.get("accuracy"))


def _lossy(artifact: Mapping[str, Any], stored: Mapping[str, Any], device: str) -> ArtifactFigures:
    """The figures of a lossy artifact, which its user's budget judges."""
    accuracy = Accuracy.from_json(stored)
    budget = AccuracyBudget(**stored["budget"])
    figures = ArtifactFigures(artifact["format"], artifact["path"], device, accuracy.calls, None)
    outputs = (artifact.get("parity") or {}).get("outputs", ())
    return replace(figures, accuracy=accuracy, budget=budget, outputs=outputs)
