"""Read the route that an earlier export chose."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporters.onnx_quantization import Recipe
from exporters.registry import QUANTIZED, exported_format
from optimize_export.errors import BundleError, UsageError
from optimize_export.manifest import MANIFEST, read_json, read_manifest, sums_problem
from optimize_export.runtime import Route
from optimize_export.wording import quote
from optimizer.options import AccuracyBudget


@dataclass(frozen=True)
class Choices:
    """A route that was chosen earlier.

    Attributes:
        path: the manifest.
        recipe: how its file is made, if it is a quantized one.
    """

    path: Path
    route: Route
    recipe: Recipe | None = None


def is_lossy(route: Route) -> bool:
    """Whether a route loses more than rounding."""
    return route.format in QUANTIZED or route.is_lowered


def read_choices(path: str | Path, formats: Collection[str], budget: AccuracyBudget) -> Choices:
    """Read the recommended route of a bundle or of its manifest.

    Args:
        formats: those of this export.
        budget: that of this export.

    Raises:
        UsageError: there is no recommended route, or this export can't have it.
        BundleError: the bundle is damaged.
    """
    place = Path(os.path.expanduser(path))
    is_bundle = place.is_dir()
    file = place / MANIFEST if is_bundle else place
    try:
        manifest = read_manifest(place) if is_bundle else read_json(file, follow=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else quote(error)
        raise UsageError(f"The choices {file} can't be read: {reason}.") from error
    if is_bundle and (problem := sums_problem(place, manifest)):
        raise BundleError(f"{place} is damaged: {problem}")
    benchmark = manifest.get("benchmark") if isinstance(manifest, dict) else None
    recommended = benchmark.get("recommended") if isinstance(benchmark, dict) else None
    if not isinstance(recommended, dict):
        raise UsageError(f"{file} recommends no file: pass a bundle that was tuned or timed, or its {MANIFEST}.")
    try:
        route = Route.from_json(recommended)
    except BundleError as error:
        raise UsageError(f"{file} recommends a route that can't be used: {error}") from error
    needed = exported_format(route.format)
    if needed not in formats:
        raise UsageError(f"{file} chooses {route}, which needs the format {needed}: add it to the formats.")
    if is_lossy(route) and budget.is_exact:
        raise UsageError(f"{file} chooses {route}, which is lossy: add a budget, such as `accuracy=0.999`.")
    return Choices(file, route, _recipe(manifest, route.format, file))


def _recipe(manifest: Mapping[str, Any], format: str, file: Path) -> Recipe | None:
    if format not in QUANTIZED:
        return None
    try:
        artifact = next(each for each in manifest["artifacts"] if each["format"] == format)
        return Recipe.from_json(artifact["quantization"], format)
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise UsageError(f"{file} doesn't say how its {format} file was quantized: pass a whole {MANIFEST}.") from error
