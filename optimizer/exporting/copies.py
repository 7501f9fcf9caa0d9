"""Copy the module for the exporters, and make it again with other passes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from optimizer.exporting.job import ExportJob
from optimizer.model import working_copy
from optimizer.pipeline import detach, optimize_model
from optimizer.report import no_progress
from passes.base import Pass


def copy_for_export(
    model: nn.Module, device: torch.device, written: frozenset[str] = frozenset(), *, fixed: bool = False
) -> nn.Module:
    """Copy a module for export: without compiled calls and provenance, in eval mode, on the device.

    Args:
        model: the module.
        device: of the copy.
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
