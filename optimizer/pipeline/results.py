"""What a result of `optimize` carries: provenance, report, `refresh`, `warm_up`, and the hook that gives it own storage."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimize_export.errors import ExportFailed, UsageError
from optimizer.model import Call, Samples, Source, own_storage
from optimizer.parity import OriginalOutputs
from optimizer.report import Report
from passes.base import DeclaredError, Pass, Precision, device_of
from passes.errors import UnknownPass
from passes.graph.backend import refresh
from passes.graph.memory import storages_of
from passes.registry import pass_named

_ATTRIBUTE = "_optimize_export"
# The bytes of example inputs that a result keeps.
_LARGEST_KEPT = 64 * 2**20
_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
}


@dataclass
class Provenance:
    """The provenance of a result, kept in its `__dict__`.

    Copies of the result share it. A pickle doesn't contain the original: an unpickled result can be run and exported,
    and its files are compared with the result itself.
    """

    # The caller's module, which shares all weights with the result that no pass changed; None after unpickling.
    original: nn.Module | None
    report: Report
    # The caller's tensors that the result holds converted copies of.
    sources: tuple[Source, ...] = field(default=(), repr=False)
    # The reasons why the result is less precise than the original: half precisions, and declared errors.
    precisions: tuple[Precision | DeclaredError, ...] = ()
    # The passes in order, which can run again; empty after unpickling.
    passes: tuple[Pass, ...] = field(default=(), repr=False)
    # The argument of `optimize`.
    batch_sizes: tuple[int, ...] | None = None
    # The original's outputs, for an export on the same inputs; None in training mode, or if they take much memory.
    outputs: OriginalOutputs | None = field(default=None, repr=False)
    # The operations of a run of the original, as `recorded_operations` gives them; empty after unpickling.
    operations: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def applied(self) -> tuple[Pass, ...]:
        """The passes whose changes are exported; compiled calls aren't."""
        pairs = zip(self.passes, self.report.passes, strict=True) if self.passes else ()
        return tuple(item for item, record in pairs if record.status == "applied" and not item.is_barrier)

    def __deepcopy__(self, memo: dict[int, Any]) -> Provenance:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Provenance, (None, self.report)

    def check_sources(self) -> None:
        """Raise `ExportFailed` if the caller wrote to a tensor of the original from which the result was computed."""
        for source in self.sources:
            if not source.unchanged:
                raise ExportFailed(
                    f"{source.path} was modified after optimize() copied it: the "
                    "result has the old values, so optimize the model again before you export it."
                )


@dataclass(eq=False, repr=False)
class StaysInEval:
    """Replaces `train` in the `__dict__` of an inference result: the result stays in eval, and warns once."""

    owner: nn.Module
    warned: bool = False

    def __call__(self, mode: bool = True) -> nn.Module:
        if mode and not self.warned:
            self.warned = True
            warnings.warn(
                f"this {type(self.owner).__name__} was optimized for inference and stays in eval: train the original, or"
                " use optimize(model, mode='training')",
                UserWarning,
                stacklevel=2,
            )
        return self.owner


@dataclass(eq=False, repr=False)
class Refresh:
    """The `refresh` of a result: call it after writes to its weights that torch doesn't count, through `.data` or numpy."""

    owner: nn.Module

    def __call__(self) -> None:
        refresh(self.owner)


def attach(module: nn.Module, provenance: Provenance, samples: Samples | None, *, stays_in_eval: bool) -> None:
    """Attach the provenance, and `.report`, `.refresh()` and `.warm_up()` where the model has no such attributes."""
    module.__dict__[_ATTRIBUTE] = provenance
    if not hasattr(module, "report"):
        module.__dict__["report"] = provenance.report
    if not hasattr(module, "refresh"):
        module.__dict__["refresh"] = Refresh(module)
    if not hasattr(module, "warm_up"):
        module.__dict__["warm_up"] = WarmUp(module, samples)
    if stays_in_eval:
        module.__dict__["train"] = StaysInEval(module)


def provenance_of(module: object) -> Provenance | None:
    """The provenance of a result of `optimize`; None for any other module."""
    found = getattr(module, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, Provenance) else None


def detach(module: nn.Module) -> None:
    """Remove everything that `attach` added."""
    module.__dict__.pop(_ATTRIBUTE, None)
    for name, kind in {"train": StaysInEval, "refresh": Refresh, "warm_up": WarmUp, "report": Report}.items():
        if isinstance(module.__dict__.get(name), kind):
            del module.__dict__[name]


def report_of(model: nn.Module) -> Report:
    """The report of a module that `optimize` returned.

    Raises:
        UsageError: `optimize` didn't return this module.
    """
    provenance = provenance_of(model)
    if provenance is None:
        raise UsageError(f"This {type(model).__name__} has no report: optimize() didn't return it.")
    return provenance.report


def class_of_pass(name: str, provenance: Provenance | None) -> type[Pass] | None:
    """The class of a pass by its name; None for a pass of a package that isn't installed here."""
    known = {} if provenance is None else {item.name: type(item) for item in provenance.passes}
    try:
        return known.get(name) or pass_named(name)
    except UnknownPass:
        # An unpickled result has no passes.
        return None


class WarmUp:
    """The `warm_up` of a result: call it in a new process, or on a new device, before requests arrive.

    The first call captures the forward again after unpickling, which takes seconds. A batch of one row, `no_grad` and
    `inference_mode` each need a capture of their own; all batch sizes above 1 share one.

    Args:
        owner: the result.
        samples: the example inputs of `optimize`; None if there were none.
    """

    def __init__(self, owner: nn.Module, samples: Samples | None) -> None:
        self.owner = owner
        self.samples = None if samples is None or _bytes_of(samples.given) > _LARGEST_KEPT else samples.as_given()

    def __call__(self, batch_sizes: Sequence[int] | None = None, modes: Sequence[str] = ("no_grad",)) -> None:
        """Call the result on its example inputs, at each batch size and in each mode.

        The calls count for a forward that keeps state between calls.

        Args:
            batch_sizes: None for the batch size of the example inputs.
            modes: "no_grad", "inference_mode" or "grad".

        Raises:
            UsageError: there is no such mode, the example inputs have no batch dim or none of this size can be made, or
                the result has no example inputs, as they took more than 64 MiB or weren't given.
        """
        if unknown := [mode for mode in modes if mode not in _MODES]:
            raise UsageError(f"warm_up has no mode {unknown[0]!r}; the modes are: {', '.join(_MODES)}.")
        if self.samples is None:
            raise UsageError(
                "warm_up() needs the example inputs, and this result has none: optimize() got none, or they take more "
                "than 64 MiB. Call the result once on inputs of your own instead."
            )
        samples = self.samples.to(device_of(self.owner))
        sizes: Sequence[int | None] = batch_sizes or [samples.batch_size]
        calls = [samples.at(size) for size in sizes]
        for mode in modes:
            for call in calls:
                given = call.copied()
                with _MODES[mode]():
                    self.owner(*given.args, **given.kwargs)
                    if mode == "inference_mode":
                        # Inputs that are made in inference mode need another capture than those from outside.
                        made = call.copied()
                        self.owner(*made.args, **made.kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> WarmUp:
        twin = copy.copy(self)
        twin.owner = copy.deepcopy(self.owner, memo)
        return twin


def _bytes_of(call: Call) -> int:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


class OwnStorage:
    """A `load_state_dict` pre-hook of every module of a result: copies the weights that are shared with the caller's model.

    Copies and pickles of the result have storage of their own from the start.
    """

    # torch copies the name of a hook.
    __name__ = "own_storage"

    def __init__(self, root: nn.Module | None = None, storages: Iterable[int] = ()) -> None:
        self._root = None if root is None else weakref.ref(root)
        # The addresses of the caller's storages.
        self._storages = set(storages)

    def __call__(self, *_: Any) -> None:
        root = None if self._root is None else self._root()
        shared = (
            []
            if root is None
            else [each for each in root.parameters() if self._storages.intersection(storages_of(each))]
        )
        self._root = None
        own_storage(shared)

    def __deepcopy__(self, memo: Any) -> OwnStorage:
        return OwnStorage()

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnStorage, ()


def share_until_loading(result: nn.Module, original: nn.Module) -> None:
    """Register the hook on all modules of a result that shares weights with the caller's model."""
    hook = OwnStorage(result, set[int]().union(*map(storages_of, original.parameters())))
    for module in result.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_load_state_dict_pre_hook(hook)


def remove_hooks(result: nn.Module) -> None:
    """Remove the hooks of an earlier `share_until_loading`."""
    for module in result.modules():
        hooks = module.__dict__.get("_load_state_dict_pre_hooks", {})
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "hook", None), OwnStorage):
                del hooks[key]
