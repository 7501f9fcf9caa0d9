"""Make a PyTorch module faster, put it into deployable files, and prove that it still computes the same.

    fast = optimize(model, example_inputs=(x,))
    bundle = export(fast, example_inputs=(x,), output="dist/model")

The names below are imported when they are first used: the command answers `--help` without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimize_export.runtime import BatchedModel, Batching, LoadedModel, QueueFull, load
    from optimizer.api import export, optimize
    from optimizer.bundle import Bundle, open_bundle, rejudge_bundle, verify_bundle
    from optimizer.diagnosis import Diagnosis, Finding, diagnose
    from optimizer.hub import Pushed, push
    from optimizer.parity import ParityReport, check_parity
    from optimizer.pipeline import report_of
    from optimizer.profiling import Profile, profile
    from optimizer.report import Report
    from optimizer.training import TrainingTuning, tune_training

__all__ = [
    "BatchedModel",
    "Batching",
    "Bundle",
    "Diagnosis",
    "Finding",
    "LoadedModel",
    "ParityReport",
    "Profile",
    "Pushed",
    "QueueFull",
    "Report",
    "TrainingTuning",
    "check_parity",
    "diagnose",
    "export",
    "load",
    "open_bundle",
    "optimize",
    "profile",
    "push",
    "rejudge_bundle",
    "report_of",
    "tune_training",
    "verify_bundle",
]

_NAMES = {
    "optimizer.api": ("export", "optimize"),
    "optimizer.bundle": ("Bundle", "open_bundle", "rejudge_bundle", "verify_bundle"),
    "optimizer.diagnosis": ("Diagnosis", "Finding", "diagnose"),
    "optimizer.hub": ("Pushed", "push"),
    "optimizer.parity": ("ParityReport", "check_parity"),
    "optimizer.pipeline": ("report_of",),
    "optimizer.profiling": ("Profile", "profile"),
    "optimizer.report": ("Report",),
    "optimizer.training": ("TrainingTuning", "tune_training"),
    "optimize_export.runtime": ("BatchedModel", "Batching", "LoadedModel", "QueueFull", "load"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from optimize_export.errors import missing_package

        if (sentence := missing_package(error, f"optimizer.{name}")) is None:
            raise
        raise ModuleNotFoundError(sentence, name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
