"""One export: its settings, with devices, samples, folders and exporters resolved, and copies of its model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from exporters.base import Exporter, named_inputs
from exporters.metadata import refuse_metadata
from exporters.onnx import refuse_opset
from exporters.registry import exporter_named, register
from optimize_export.errors import UsageError
from optimize_export.runtime import require_runtime
from optimizer.bundle import check_target
from optimizer.model import OpenDims, Samples, open_dims, working_copy
from optimizer.options import ExportSettings, check_new_folder
from optimizer.pipeline import Provenance, detach, optimize_model
from optimizer.report import Progress, ProgressFunction, no_progress
from passes.base import Pass


@dataclass(frozen=True, kw_only=True)
class ExportJob(ExportSettings):
    """The settings of one export, with absolute paths, and `bench` and `tune` decided."""

    model: nn.Module
    provenance: Provenance | None
    """Of the model, if it is a result of `optimize`."""
    inputs: Mapping[str, Any]
    """The user's example inputs, as keyword arguments of `optimize`."""
    samples: Samples
    """Makes the calls."""
    dims: OpenDims
    """The open dims that `dynamic` declares."""
    exporters: Sequence[Exporter]
    target: torch.device
    """The device of the artifacts."""
    home: torch.device
    """The device of the original."""
    source: str | None
    """The origin of the model, for the manifest; None for the module of its class."""
    tell: ProgressFunction
    """Receives the progress."""

    def progress(self, stage: str, done: int, total: int, text: str, name: str = "") -> None:
        """Report progress."""
        self.tell(Progress(stage, done, total, text, name))


def exporters_of(
    formats: Sequence[str], given: Sequence[Exporter], opset: int | None, metadata: Mapping[str, str]
) -> list[Exporter]:
    """Look up the exporters of the formats, each once.

    Args:
        given: further exporters.
    """
    names = [formats] if isinstance(formats, str) else list(formats or ())
    names += map(register, [given] if isinstance(given, Exporter) else given)
    if not names:
        raise UsageError("formats is empty: name at least one format, such as 'onnx'.")
    exporters = [exporter_named(name) for name in dict.fromkeys(names)]
    writers: dict[str, str] = {}
    for exporter in exporters:
        if (other := writers.setdefault(exporter.file_name, exporter.name)) != exporter.name:
            raise UsageError(
                f"The formats {other!r} and {exporter.name!r} both write {exporter.file_name}: export them to two folders."
            )
    if any(exporter.name == "onnx" for exporter in exporters):
        require_runtime("onnxruntime")
    refuse_opset(opset, [exporter.name for exporter in exporters])
    refuse_metadata(metadata)
    return exporters


def with_checked_folders(settings: ExportSettings) -> ExportSettings:
    """Check that all folders can be written, and make their paths absolute."""
    output: object = settings.output
    if not isinstance(output, str | os.PathLike) or not str(output).strip():
        raise UsageError(f"output must be the folder of the bundle, such as 'dist/net', not {output!r}.")
    folder, debug, profile = (
        None if each is None else Path(os.path.expanduser(each))
        for each in (output, settings.debug_dir, settings.profile_dir)
    )
    assert folder is not None
    check_target(folder, force=settings.force)
    check_new_folder(debug, "debugging", folder)
    check_new_folder(profile, "the profile", folder, debug)
    # The user's code may change the current folder.
    return replace(
        settings,
        output=folder.absolute(),
        debug_dir=None if debug is None else debug.absolute(),
        profile_dir=None if profile is None else profile.absolute(),
    )


def opened(model: nn.Module, samples: Samples, settings: ExportSettings) -> tuple[Samples, OpenDims]:
    """Open the dims that `dynamic` declares, and return the samples with these dims."""
    if settings.dynamic is None:
        return samples, OpenDims()
    call = samples.given
    inputs = named_inputs(model, call.args, call.kwargs, input_names=settings.input_names)
    dims = open_dims(settings.dynamic, inputs, first=samples.first, static_batch=settings.static_batch)
    return samples.opened(dims, inputs), dims


# ------------------------------------------------------------------------------------------------- copies of its model


def copy_for_export(
    model: nn.Module, device: torch.device, written: frozenset[str] = frozenset(), *, fixed: bool = False
) -> nn.Module:
    """Copy a module for export: without compiled calls and provenance, in eval mode, on the device.

    Args:
        written: names of parameters that forward writes to; the copy has its own memory for these.
        fixed: compute once what weight_norm, spectral_norm and other parametrizations by torch's modules compute at each
            call.
    """
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    copy = working_copy(model, "inference", private=own & written).root
    detach(copy)
    copy.eval()
    if fixed:
        _fix_weights(copy)
    return copy.to(device)


def _fix_weights(copy: nn.Module) -> None:
    """Replace computed weights with plain ones, except those that differ from one computation to the next."""
    with torch.no_grad():
        for module in list(copy.modules()):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for hook in list(module._forward_pre_hooks.values()):
                if isinstance(hook, WeightNorm):
                    remove_weight_norm(module, hook.name)
                elif isinstance(hook, SpectralNorm):
                    remove_spectral_norm(module, hook.name)
            if parametrize.is_parametrized(module) and _depends_on_weights_alone(module):
                _fix_parametrized(module)


def _depends_on_weights_alone(module: nn.Module) -> bool:
    """Whether all parametrizations of a module are torch's; forward may change the settings of others between calls."""
    assert isinstance(module.parametrizations, nn.ModuleDict)
    steps = list(module.parametrizations.modules())[1:]
    return all(type(each).__module__.startswith("torch.nn.") for each in steps)


def _fix_parametrized(module: nn.Module) -> None:
    assert isinstance(module.parametrizations, nn.ModuleDict)
    weights: dict[str, torch.Tensor] = {
        name: getattr(module, name).detach().clone() for name in module.parametrizations
    }
    if not all(torch.equal(weight, getattr(module, name)) for name, weight in weights.items()):
        return
    # parametrize.remove_parametrizations changes the class, which the copied model shares.
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    for name, weight in weights.items():
        module.register_parameter(name, nn.Parameter(weight, requires_grad=False))


def optimize_again(job: ExportJob, passes: Sequence[Pass], device: torch.device) -> nn.Module:
    """Optimize the original of an export with other passes."""
    provenance = job.provenance
    original = job.model if provenance is None else provenance.original
    assert original is not None
    with warnings.catch_warnings():
        # The first run of the passes has already shown their warnings.
        warnings.simplefilter("ignore")
        return optimize_model(
            original,
            passes,
            **job.inputs,
            mode="inference" if provenance is None else provenance.report.mode,
            device=device,
            strict=False,
            batch_sizes=None if provenance is None else provenance.batch_sizes,
            seed=job.seed,
            progress=no_progress,
        )
