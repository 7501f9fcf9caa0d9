"""Check the user's module and inputs, and copy the module if another device or state is needed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optimize_export.arguments import other_gpu
from optimize_export.errors import DeviceError, LoadError, UsageError
from optimize_export.wording import listed
from optimizer.model.inputs import Call, ExampleInputs, FurtherInputs, Samples
from optimizer.model.working_copy import working_copy
from passes.base import device_of
from passes.graph.forwards import is_compiled


def check_model(model: object, *, runs: bool) -> None:
    """Raise `UsageError` or `LoadError` if the model can't be optimized, or `runs` and it can't run."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"The model must be an nn.Module, not {type(model).__name__}.")
    if is_compiled(model):
        raise UsageError(
            "The model is a wrapper made by torch.compile(module): pass the module itself, with torch-compile as "
            "the last pass."
        )
    refuse_unrunnable(model, runs=runs)
    _refuse_distributed(model)


def one_call(
    name: str,
    model: nn.Module,
    example_inputs: ExampleInputs | None,
    example_kwargs: dict[str, Any] | None,
    device: torch.device | str | None,
) -> tuple[Call, torch.device]:
    """The call of the example inputs for the function `name`, and the device to run it on: by default the model's."""
    target = device_of(model) if device is None else resolved_device(str(device), require_gpu=False)
    samples = samples_of(example_inputs, example_kwargs, (), 0, target)
    if samples is None:
        raise UsageError(f"{name}() needs example_inputs (or example_kwargs): the tensors of one call of the model.")
    return samples.given, target


def _refuse_distributed(model: nn.Module) -> None:
    """Refuse distributed models.

    A run of such a model waits for other processes, which may not run it now. A sharded model can't be copied.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "The model is wrapped in DistributedDataParallel: pass its .module, and wrap the result of optimize()."
        )
    # A process that hasn't imported this module has no sharded modules.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    for path, module in model.named_modules():
        if isinstance(module, kinds):
            where = f"{path} of the model" if path else "The model"
            raise UsageError(f"{where} is sharded by FSDP: call optimize() first, and shard its result.")


def check_numbers(seed: object, batch_sizes: Any) -> None:
    """Raise `UsageError` unless the seed is a whole number and `batch_sizes` None or whole numbers of at least 1."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError(f"seed must be a whole number, not {seed!r}.")
    if batch_sizes is None:
        return
    listed = isinstance(batch_sizes, Sequence) and not isinstance(batch_sizes, str)
    if not listed or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in batch_sizes):
        raise UsageError(
            f"batch_sizes must be a list of whole numbers of 1 or more, such as (1, 2, 8), not {batch_sizes!r}."
        )


def samples_of(
    example_inputs: ExampleInputs | None,
    example_kwargs: dict[str, Any] | None,
    further_inputs: FurtherInputs,
    seed: int,
    device: torch.device,
) -> Samples | None:
    """The samples of the example inputs; None if there are none."""
    if example_inputs is None and not example_kwargs:
        if further_inputs:
            raise UsageError(
                "further_inputs are calls in addition to example_inputs: pass the first call as example_inputs."
            )
        return None
    first = () if example_inputs is None else example_inputs
    return Samples(first, example_kwargs, further_inputs=further_inputs, seed=seed, device=device)


def resolved_device(device: str, *, require_gpu: bool) -> torch.device:
    """The device for "auto", "cpu" or "cuda"."""
    available = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if available else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise UsageError(f"There is no device {device!r}: use auto, cpu or cuda.")
    if resolved.type == "cuda" and resolved.index:
        raise UsageError(f"The device must be 'auto', 'cpu' or 'cuda', not {device!r}; {other_gpu(device)}.")
    if (require_gpu or resolved.type == "cuda") and not available:
        raise DeviceError("A GPU is required, but torch finds none here: use device='cpu', or a machine with a GPU.")
    if require_gpu and resolved.type != "cuda":
        raise DeviceError(f"A GPU is required, but the requested device is {resolved}: use device='cuda'.")
    return resolved


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself if it is on this kind of device, else a copy on the device."""
    if device_of(model).type == device.type:
        return model
    return working_copy(model, "inference").root.to(device)


def refuse_unrunnable(model: nn.Module, *, runs: bool = True) -> None:
    """Raise `LoadError` if a run would fail for lack of weights, or would give the module some permanently."""
    refuse_unmade_module(model)
    refuse_circular_modules(model)
    lazy = [
        f"{path or 'the model'} ({type(module).__name__})"
        for path, module in model.named_modules()
        if any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]
    if lazy:
        raise LoadError(
            f"{listed(lazy)} {'has' if len(lazy) == 1 else 'have'} no weights yet: run the model once to initialize "
            "them, and remove modules that it never calls."
        )
    if runs:
        refuse_empty_tensors(model)


def refuse_unmade_module(model: nn.Module) -> None:
    """Raise `LoadError` if the constructor of `nn.Module` didn't run, so that the module can't have weights."""
    if not hasattr(model, "_parameters"):
        raise LoadError(
            f"{type(model).__name__} doesn't call the constructor of nn.Module: add super().__init__() to its __init__."
        )


def refuse_circular_modules(model: nn.Module) -> None:
    """Raise `LoadError` if a module is its own descendant: `eval`, `state_dict` and others of torch never end there."""
    for name, module in model.named_modules():
        for attribute, child in module.named_children():
            if any(each is module for each in child.modules()):
                raise LoadError(
                    f"{name or f'The {type(model).__name__}'} is its own descendant, by its attribute `{attribute}`: torch "
                    "can't go through such modules. Hold the one that comes again in a tuple, such as "
                    "self.parent = (module,)."
                )


def refuse_empty_tensors(model: nn.Module) -> None:
    """Raise `LoadError` if parameters or buffers are on the meta device and have no values to compute with."""
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise LoadError(
            f"{listed(empty)} of the model {'has' if len(empty) == 1 else 'have'} no values (device meta): load weights "
            "into it first, or build the model on the CPU."
        )


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function; None if it doesn't tell one."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments without a default; empty if the function doesn't tell them."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = signature_of(function)
    parameters = () if found is None else found.parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
