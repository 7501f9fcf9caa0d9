"""Make a PyTorch module faster, put it into deployable files, and prove that it still computes the same.

    from optimize_export import export, load, optimize

No other distribution has this name, so it works next to a user's own `optimizer.py`. `load` needs numpy and one runtime;
the other names are imported from `optimizer` when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimize_export.runtime import BatchedModel, Batching, LoadedModel, QueueFull, load
    from optimizer import (
        Bundle,
        Diagnosis,
        Finding,
        ParityReport,
        Profile,
        Pushed,
        Report,
        TrainingTuning,
        check_parity,
        diagnose,
        export,
        open_bundle,
        optimize,
        profile,
        push,
        rejudge_bundle,
        report_of,
        tune_training,
        verify_bundle,
    )

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

_HERE = ("BatchedModel", "Batching", "LoadedModel", "QueueFull", "load")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("optimize_export.manifest").describe_program()["version"]
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "optimize_export.runtime" if name in _HERE else "optimizer"
    if home == "optimizer":
        import_module("optimize_export.shadowing").refuse_shadowing_modules(name)
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        errors = import_module("optimize_export.errors")
        if (sentence := errors.missing_package(error, f"optimize_export.{name}")) is None:
            raise
        raise ModuleNotFoundError(sentence, name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
