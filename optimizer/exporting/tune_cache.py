"""Keep the results of tuning by content, so that the same files aren't tuned twice on one machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from exporters.onnx_quantization import Recipe
from optimizer.bundle import describe_device, weights_hash
from optimizer.errors import BundleError
from optimizer.exporting.bench import Bench
from optimizer.exporting.lossy import Lossy
from optimizer.manifest import check_benchmark, file_digest, plain, to_json_text, version_of
from optimizer.tuning import Benchmark

# What the choice depends on, besides the files and the machine.
_DISTRIBUTIONS = ("optimize-export", "torch", "onnxruntime", "onnxruntime-gpu", "openvino")


@dataclass(frozen=True)
class Kept:
    """A result that was kept.

    Attributes:
        date: in ISO 8601.
        recipe: how the recommended file is made, if it is a quantized one.
    """

    path: Path
    date: str
    found: Benchmark
    recipe: Recipe | None

    @property
    def note(self) -> str:
        return f"these are times of {self.date}; delete {self.path} to tune again"


def cache_file(bench: Bench, lossy: Lossy | None) -> Path:
    """The file for the results of tuning these files, with these inputs and this budget, on this machine.

    It is below $XDG_CACHE_HOME, or below ~/.cache without that variable.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    content = {
        "files": {
            entry["format"]: [file_digest(bench.files.folder / path) for path in entry["files"]]
            for entry in bench.files.entries
        },
        "batch_sizes": bench.batch_sizes,
        "inputs": [[str(tensor.dtype), list(tensor.shape)] for tensor in bench.files.inputs],
        "device": describe_device(bench.job.target),
        "threads": torch.get_num_threads(),
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
        # In which lossy candidates are judged.
        "mode": bench.measured.reference.blank.mode,
        "budget": str(bench.job.accuracy),
        "calibration": None if lossy is None else _digest((*lossy.calibration.used, *lossy.calibration.apart)),
    }
    digest = hashlib.sha256(json.dumps(plain(content), sort_keys=True).encode()).hexdigest()
    return Path(home, "optimize-export", "tune", f"{digest}.json")


def _digest(calls: Iterable[tuple[torch.Tensor, ...]]) -> str:
    named = {f"{number:06}.{index}": t for number, call in enumerate(calls) for index, t in enumerate(call)}
    return weights_hash(named)


def read_kept(path: Path, seconds: float) -> Kept | None:
    """The result that a file keeps; None if there is none, it is broken, or its tuning took less time than `seconds`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        check_benchmark(data["benchmark"])
        found, recipe = Benchmark.from_json(data["benchmark"]), data["quantization"]
        if data["seconds"] < seconds or found.recommended is None:
            return None
        made = None if recipe is None else Recipe.from_json(recipe, found.recommended.format)
        return Kept(path, str(data["date"]), found, made)
    except (OSError, ValueError, KeyError, TypeError, BundleError):
        return None


def keep(path: Path, found: Benchmark, recipe: Mapping[str, Any] | None, seconds: float) -> str | None:
    """Write a result to its file.

    Returns:
        A note if the file can't be written; None if it was.
    """
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    data: dict[str, Any] = {
        "date": date,
        "seconds": seconds,
        "quantization": recipe,
        "benchmark": found.to_json(),
    }
    new = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(to_json_text(data), encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        return f"the result of the tuning isn't kept: {path.parent} can't be written ({error.strerror or error})"
    return None
