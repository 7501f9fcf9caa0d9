"""Call a bundle for a long time (`bench --soak`)."""

from __future__ import annotations

from pathlib import Path

from optimize_export.errors import BundleError, DeviceError
from optimize_export.runtime import LoadedModel, load
from optimize_export.runtime.growth import Soak, soak
from optimize_export.runtime.loading import first_inputs
from optimize_export.wording import error_summary
from optimizer.bundle import open_bundle


def soak_bundle(path: str | Path, seconds: float, device: str = "auto") -> tuple[LoadedModel, Soak]:
    """Call the file that `load` runs, on the first golden inputs.

    Raises:
        BundleError: there is no bundle, or it is damaged, or the file fails in a call.
        DeviceError: none of its files runs here; or the system doesn't tell the memory of a process.
    """
    run, bundle = load(path, device=device), open_bundle(path)
    inputs = first_inputs(bundle.path, bundle.manifest)
    if inputs is None or run._not_in_numpy is not None:
        inputs = list(bundle.golden()[0].inputs.values())
    try:
        found = soak(lambda: run._runner(*inputs), seconds)
    # Each runtime has its own errors, and some derive from Exception alone.
    except Exception as error:
        raise BundleError(f"{path}: {run.route} fails after some calls: {error_summary(error)}.") from error
    if found is None:
        raise DeviceError("This system doesn't tell the anonymous memory of a process: soak on Linux.")
    return run, found
