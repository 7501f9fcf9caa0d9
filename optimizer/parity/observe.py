"""Call a callable once, and observe its outputs and its side effects; for the passes, record the torch calls too."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from optimize_export.errors import LoadError
from optimize_export.structure import unique
from optimize_export.wording import first_line
from optimizer.model import (
    Call,
    RunsOfCopy,
    clone,
    eager_only,
    gradients_by_backward,
    is_reentrant,
    leaves_of,
    random_state,
    reachable_modules,
    rebuild,
)
from optimizer.parity.float64 import Float64Mode, raised
from passes.base import ModelTree
from passes.graph.backend import hooked_in
from passes.graph.memory import same_values
from passes.graph.recording import Recorder, Recording, Run, Runs

_OTHER_KINDS = re.compile(r"^(output|gradient of|buffer) | \(changed in place\)$")

Flatten = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[torch.Tensor]]


@dataclass
class Observation:
    """The observed values of one call."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors on the CPU by name, in the order of the output's tree. Python floats, complex numbers and numpy arrays are
    stored as tensors. An output's name is a label: the same place in an equal tree has the same one."""
    kinds: dict[str, str] = field(default_factory=dict)
    """By name: "output", "number" (of an output: a Python number or numpy array, which is a constant in files), "input"
    (an input that was changed in place), "gradient" or "buffer"."""
    structure: Any = None
    """The output's tree without its tensors; None if the callable returns flat tensors."""
    draws: bool = False
    """Whether the call drew random numbers."""

    def add(self, kind: str, name: str, value: torch.Tensor) -> None:
        """Store a value.

        Raises:
            ValueError: the name is taken, so one of the two values would not be compared.
        """
        if name in self.values:
            raise ValueError(f"two values of a call are named {name!r}")
        self.values[name] = value
        self.kinds[name] = kind

    def of_kind(self, kind: str) -> list[str]:
        return [name for name, own in self.kinds.items() if own == kind]


def observe(
    target: Callable[..., Any],
    call: Call,
    *,
    seed: int,
    training: bool = False,
    flatten: Flatten | None = None,
    mode: AbstractContextManager[Any] | None = None,
    names: Sequence[str] | None = None,
) -> Observation:
    """Call `target` once with copies of the inputs, and restore the random state afterwards.

    Changes that the call makes to a module remain, so pass a copy (`optimizer.model.runs`). Exceptions of `target` are
    not caught.

    Args:
        target: a module or another callable.
        call: the inputs.
        seed: of the random numbers in the call, and of the random gradients in training.
        training: run a backward pass too, from fixed random gradients at the outputs that require gradients. This also
            observes the gradients of the parameters and of the leaf inputs that require one, and all buffers.
        flatten: maps the arguments to flat tensors, for a `target` that accepts and returns flat tensors.
        mode: is active during the call.
        names: of the tensors in the call; by default from the signature of `target`.
    """
    args, kwargs = clone((call.args, call.kwargs))
    names = input_names(target, call) if names is None else names
    inputs = [tensor for _, tensor in leaves_of((args, kwargs)).tensors()]
    before = [tensor.detach().clone() for tensor in inputs]
    if mode is not None and isinstance(mode, Float64Mode):
        args, kwargs = _raise_inputs(mode, args, kwargs)
        inputs = [tensor for _, tensor in leaves_of((args, kwargs)).tensors()]
    observation = Observation()
    with (
        random_state(seed) as drawn,
        torch.set_grad_enabled(training),
        mode or nullcontext(),
    ):
        outputs = target(*flatten(args, kwargs)) if flatten is not None else target(*args, **kwargs)
        _add_outputs(observation, outputs, flat=flatten is not None)
        if training:
            _add_gradients(observation, target, outputs, inputs, names, seed, mode)
            _add_buffers(observation, target, mode)
        observation.draws = drawn()
    for name, tensor, old in zip(names, inputs, before, strict=True):
        if not same_values(tensor, old.to(tensor.dtype)):
            observation.add("input", f"{name} (changed in place)", _on_cpu(tensor))
    return observation


def input_names(target: Callable[..., Any], call: Call) -> list[str]:
    """A unique name for each tensor of a call, from the callable's signature if it has one."""
    positional = _parameter_names(target)
    args = [
        (positional[index] if index < len(positional) else f"input_{index}", value)
        for index, value in enumerate(call.args)
    ]
    opened = (leaves_of({name: value}) for name, value in (*args, *call.kwargs.items()))
    return list(unique(name for leaves in opened for name, _ in leaves.tensors()))


def own_dtype(target: Any, call: Call) -> torch.dtype:
    """The float dtype of most elements of a model's parameters; else of its inputs; else torch's default."""
    parameters = target.parameters() if isinstance(target, nn.Module) else ()
    inputs = (tensor for _, tensor in leaves_of((call.args, call.kwargs)).tensors())
    for tensors in (parameters, inputs):
        counts: dict[torch.dtype, int] = {}
        for tensor in tensors:
            if tensor.is_floating_point():
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
        if counts:
            return max(counts, key=lambda dtype: counts[dtype])
    return torch.get_default_dtype()


def _raise_inputs(mode: Float64Mode, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def to_float64(tensor: torch.Tensor) -> torch.Tensor:
        mode.saw(tensor.dtype)
        return tensor.detach().to(raised(tensor.dtype)).requires_grad_(tensor.requires_grad)

    raised_args, raised_kwargs = rebuild((args, kwargs), to_float64)
    return raised_args, raised_kwargs


def _parameter_names(target: Callable[..., Any]) -> list[str]:
    function = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _add_outputs(observation: Observation, outputs: Any, *, flat: bool) -> None:
    leaves = leaves_of(outputs)
    observation.structure = None if flat else leaves.structure
    # An output's key must not be mistaken for the name of a gradient, a buffer or a changed input.
    labels = (f"output {name}" if _OTHER_KINDS.search(name) else name for name in leaves.names)
    for name, value in zip(labels, leaves.values, strict=True):
        tensor = _as_tensor(value)
        if tensor is not None:
            kind = "output" if isinstance(value, torch.Tensor) or flat else "number"
            observation.add(kind, name, _on_cpu(tensor))


def _as_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, float | complex):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.complex128)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.ascontiguousarray(value))
    return None


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_nested:
        plain = plain.to_padded_tensor(0.0)
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.dequantize()
    if isinstance(plain, nn.Parameter) or type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    # A copy, because the callable may keep the tensor and write to it in its next call.
    return plain.to("cpu", copy=True).resolve_conj().resolve_neg()


def _add_gradients(
    observation: Observation,
    target: Any,
    outputs: Any,
    inputs: Iterable[torch.Tensor],
    input_names: Sequence[str],
    seed: int,
    mode: Any,
) -> None:
    tensors = (tensor for _, tensor in leaves_of(outputs).tensors() if tensor.requires_grad)
    roots = [tensor.to_padded_tensor(0.0) if tensor.is_nested else tensor for tensor in tensors]
    parameters = _own_names(target.named_parameters()) if isinstance(target, nn.Module) else {}
    # If an input and a parameter have the same name, the input is renamed.
    labels = dict(zip(unique(input_names, parameters), inputs, strict=True))
    wanted = {name: tensor for name, tensor in labels.items() if tensor.requires_grad and tensor.is_leaf}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            leaf = mode.shadow(parameter) if isinstance(mode, Float64Mode) else parameter
            wanted[name] = parameter if leaf is None else leaf
    if not roots or not wanted:
        return
    generator = torch.Generator().manual_seed(seed)
    cotangents = [
        torch.randn(root.shape, generator=generator, dtype=torch.float64).to(root.device, root.dtype) for root in roots
    ]
    leaves = list(wanted.values())
    gradients = _gradients(target, roots, leaves, cotangents, in_float64=isinstance(mode, Float64Mode))
    for name, leaf, gradient in zip(wanted, leaves, gradients, strict=True):
        # A missing gradient and a zero gradient both leave a parameter unchanged.
        observation.add(
            "gradient", f"gradient of {name}", _on_cpu(torch.zeros_like(leaf) if gradient is None else gradient)
        )


def _gradients(
    target: Any,
    roots: list[torch.Tensor],
    leaves: list[torch.Tensor],
    cotangents: list[torch.Tensor],
    *,
    in_float64: bool,
) -> tuple[torch.Tensor | None, ...]:
    outputs = [get_gradient_edge(root) for root in roots]
    if is_reentrant(outputs):
        parameters = None
        if isinstance(target, nn.Module):
            # Those of modules in plain containers too.
            parameters = [each for module in reachable_modules(target) for each in module.parameters(recurse=False)]
        return gradients_by_backward(outputs, leaves, cotangents, parameters)
    if not in_float64:
        return torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    # A TorchFunctionMode is disabled inside the functions that it intercepts. `grad` of tensors is such a function, so
    # a checkpointed part would be recomputed without the mode. `grad` of edges isn't intercepted.
    inputs = [get_gradient_edge(leaf) for leaf in leaves]
    return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)


def own_name(name: str) -> str:
    """Remove the prefix that `torch.compile(module)` adds to a name."""
    return name.replace("_orig_mod.", "")


def _own_names(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    named = list(tensors)
    return dict(zip(unique(own_name(name) for name, _ in named), (tensor for _, tensor in named), strict=True))


def _add_buffers(observation: Observation, target: Any, mode: Any) -> None:
    if not isinstance(target, nn.Module):
        return
    for name, buffer in _own_names(target.named_buffers()).items():
        shadow = mode.shadow(buffer) if isinstance(mode, Float64Mode) else None
        observation.add("buffer", f"buffer {name}", _on_cpu(buffer if shadow is None else shadow))


logger = logging.getLogger(__name__)


class RecordedRuns:
    """Makes the first run of the given calls on the working copy, whose modules the passes know, and records it."""

    def __init__(self, runs: RunsOfCopy, tree: ModelTree, calls: Collection[tuple[int | None, int]]) -> None:
        # By batch size and draw of the call.
        self.recordings: dict[tuple[int | None, int], Recording] = {}
        # The reasons why runs couldn't be recorded, by batch size and draw.
        self.failures: dict[tuple[int | None, int], str] = {}
        self.runs = runs
        self._tree = tree
        self._calls = calls

    def as_runs(self, calls: Sequence[tuple[int | None, int]]) -> Runs | None:
        """The recordings in the form that passes read, numbered in the order of `calls`.

        None if a recording is missing and none of the calls failed. If a call failed, the result has the reason.
        """
        made = [(number, self.recordings[key]) for number, key in enumerate(calls) if key in self.recordings]
        reasons = [self.failures[key] for key in calls if key in self.failures]
        if len(made) < len(calls) and not reasons:
            return None
        failure = f"it can't be recorded ({reasons[0]})" if reasons else ""
        return Runs(tuple(Run(number, None, recording) for number, recording in made), failure)

    def run(
        self, batch_size: int | None, draw: int, call: Call, *, seed: int, names: Sequence[str], is_first: bool
    ) -> Observation | None:
        """Run one call and record it; None if the call isn't one of the given calls, or can't be recorded.

        After a failure no further call is recorded.

        Args:
            is_first: stop the run before it writes to a shared weight, and repeat it with a private copy of the weight.

        Raises:
            LoadError: the model can't run on a copy.
        """
        key = batch_size, draw
        if key not in self._calls or self.failures or self.runs.is_run_itself:
            return None

        def run(module: Any) -> Observation:
            recorder = Recorder(self._tree.root, self._tree.modules)

            def recorded(*args: Any, **kwargs: Any) -> Any:
                before = hooked_in(module)
                with recorder:
                    outputs = module(*args, **kwargs)
                self._tree.hooked = tuple(path for path in hooked_in(module) if path not in before)
                return outputs

            seen = observe(recorded, call, seed=seed, names=names)
            self.recordings[key] = recorder.recording
            return seen

        with eager_only():
            if is_first:
                try:
                    return self.runs.first(run)
                except LoadError:
                    raise
                except Exception as error:  # noqa: BLE001 - foreign code may raise because each operator is watched
                    logger.debug("the watched run raised: %s", error)
            try:
                with self.runs.fresh() as module:
                    return run(module)
            except LoadError:
                raise
            except Exception as error:  # noqa: BLE001 - the plain run shows whether the model itself raises
                self.failures[key] = f"{type(error).__name__}: {first_line(error)}"
                return None
