"""Judge again what was measured when a bundle was written, by other tolerances: nothing is run and no artifact is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from optimizer.errors import BundleError, UsageError
from optimizer.golden import stored_tolerances
from optimizer.parity import FACTOR, Measurement, Tolerance, judge
from optimizer.verify import ArtifactFigures, VerifyReport, factor_between, sums_problem


class RejudgeReport(VerifyReport):
    """The outcome of `rejudge_bundle`; its fields and JSON are those of `VerifyReport`."""

    said: ClassVar[str] = "right by what was measured"


def rejudge_contents(
    folder: Path, manifest: Mapping[str, Any], *, atol: Tolerance, rtol: Tolerance, factor: float | None
) -> RejudgeReport:
    """Judge the measurement of each artifact in a manifest.

    Raises:
        BundleError: the bundle is of a version that kept no measurements.
        UsageError: a tolerance or the factor makes no sense.
    """
    if factor is not None and not 0 < factor < math.inf:
        raise UsageError(f"factor must be a number above 0, not {factor!r}.")
    device = manifest["device"]["type"]
    if problem := sums_problem(folder, manifest):
        # What was measured can't be told from what was changed.
        return RejudgeReport(folder, device, (problem,), ())
    if lacking := [artifact["path"] for artifact in manifest["artifacts"] if not artifact.get("measurement")]:
        raise BundleError(
            f"{folder} holds no measurement of {', '.join(lacking)}, as its version of the program kept none: export the"
            " model again, or verify the bundle."
        )
    notes = [f"judged by what was measured on {manifest['device']['name']} ({device}); nothing was run"]
    by_user: dict[str, Any] = {"atol": atol, "rtol": rtol}
    if atol is None and rtol is None and factor is None:
        by_user = dict(stored_tolerances(manifest["golden"]))
    if factor is None:
        golden = manifest["golden"]
        dtypes = (output["dtype"] for output in golden["outputs"])
        factor = FACTOR * factor_between(golden["device"], manifest["device"], dtypes)
    figures = []
    for artifact in manifest["artifacts"]:
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
