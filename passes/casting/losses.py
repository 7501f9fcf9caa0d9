"""Measure the precision loss of a module and its layers in a half precision, on their activations in a run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.base import training_flags
from passes.casting.forwards import cast_leaf, finite_in, map_leaves, masks_of, takes_one_dtype, with_masks
from passes.graph.forwards import intercepted_calls
from passes.torch_private import schema_of, without_torch_function

# A context in which a module runs in the half precision, except for the submodules that stay in float32.
Lowered = Callable[[nn.Module], AbstractContextManager[None]]
_PLAIN = (torch.Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Loss:
    """The precision loss of one module."""

    # The root mean square of the error, relative to that of the output; infinite if the output is no longer finite
    share: float
    error: str = ""  # the reason why the module doesn't run in the half precision; "" if it does


class _Watch(ABC):
    """A context in which every module call below a root goes through `_around`, with all modules in eval."""

    def __init__(self, root: nn.Module, besides: Iterable[nn.Module]) -> None:
        self.root = root
        self.besides = list(besides)
        self.outputs: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(training_flags(self.root, False))
        self._stack.enter_context(intercepted_calls(self.root, self._around, self.besides))

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @abstractmethod
    def _around(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


# Operators that choose or order elements by scores; they return indices, the last of their results.
_CHOOSING = frozenset({"topk", "sort", "max", "min", "argmax", "argmin", "nms"})


class Choices(TorchDispatchMode):
    """Keeps which elements a run chooses by scores, so that a run in half precision can take the same.

    Close scores may be in another order there. That says nothing of the precision of a layer, but would look like a large
    loss of all that is chosen.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Choices | None = None) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        # False while layers are repeated, and after a run has taken another path.
        self.is_active = True
        self._known = None if known is None else iter(known.made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, schema = func(*args, **(kwargs or {})), schema_of(func)
        if not self.is_active or schema is None or schema.is_mutable:
            return result
        name = func.name().partition("::")[2].partition(".")[0]
        # Without a dim, `max` returns a number.
        if name not in _CHOOSING or (name in ("max", "min") and not isinstance(result, tuple)):
            return result
        own = result[-1] if isinstance(result, tuple) else result
        if self._known is None:
            self.made.append(own.clone())
            return result
        known = next(self._known, None)
        if known is None or known.shape != own.shape:
            self.is_active = False
            return result
        if not isinstance(result, tuple):
            return known
        given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **(kwargs or {})}
        scores, dim = given["self"], given.get("dim", -1)
        if known.dim() == scores.dim():
            return scores.gather(dim, known), known
        return scores.gather(dim, known.unsqueeze(dim)).squeeze(dim), known


class LossWatch(_Watch):
    """A context that repeats each call of a layer in a half precision and compares the results.

    All modules are in eval meanwhile, so that equal calls give equal results. The results of the run itself don't
    change.

    Attributes:
        losses: the largest loss of each layer that was called, by its id, in the order of the first calls.
        outputs: the output of the root; None until it returns.
        choices: what the root chose.
    """

    def __init__(
        self,
        root: nn.Module,
        besides: Iterable[nn.Module],
        layers: Iterable[nn.Module],
        dtype: torch.dtype,
        lowered: Lowered,
    ) -> None:
        super().__init__(root, besides)
        self.losses: dict[int, Loss] = {}
        self._layers = {id(layer) for layer in layers}
        self._dtype = dtype
        self._lowered = lowered
        self.choices = Choices()
        self._busy = False
        self._inputs: dict[int, Any] = {}

    def _around(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._busy:
            return call(*args, **kwargs)
        if module is self.root:
            self._inputs = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs))}
        is_layer = id(module) in self._layers and _is_plain((args, kwargs))
        given = self._rounded(module, args, kwargs) if is_layer else None
        before = torch.get_rng_state()
        with self.choices if module is self.root else nullcontext():
            outputs = call(*args, **kwargs)
        if given is not None:
            self._busy, self.choices.is_active = True, False
            try:
                with torch.random.fork_rng(devices=()):
                    torch.set_rng_state(before)
                    self._measure(module, given, outputs)
            finally:
                self._busy, self.choices.is_active = False, True
        if module is self.root:
            self.outputs = map_leaves(_copied, outputs)
        return outputs

    def _rounded(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Copy the arguments of a module in the half precision.

        Inputs of the root keep their dtype, unless the module is a layer that casts its inputs.
        """
        is_cast = takes_one_dtype(module)

        def is_own(leaf: Any) -> bool:
            return not is_cast and id(leaf) in self._inputs

        def rounded(leaf: Any) -> Any:
            return _copied(leaf) if is_own(leaf) else cast_leaf(_copied(leaf), (torch.float32,), self._dtype)

        def mask(leaf: Any) -> Any:
            return leaf if is_own(leaf) else finite_in(leaf, self._dtype)

        return map_leaves(rounded, with_masks(mask, masks_of(module), args, kwargs))

    def _measure(self, module: nn.Module, rounded: Any, outputs: Any) -> None:
        try:
            # With gradients on, because torch may then choose other kernels, of which fewer support half precision.
            with self._lowered(module), torch.enable_grad():
                args, kwargs = rounded
                loss = Loss(share_lost(outputs, module(*args, **kwargs)))
        except Exception as error:  # noqa: BLE001 - missing kernels raise many kinds of errors
            loss = Loss(math.inf, _first_line(error))
        known = self.losses.get(id(module))
        if known is None or loss.share > known.share:
            self.losses[id(module)] = loss


class TrialWatch(_Watch):
    """A context that runs the root in a half precision, and retries modules that raise in other ways.

    Args:
        choices: of the run to compare with.

    Attributes:
        outputs: the output of the root; None until it returns.
        mended: the modules that raised, by id, each with the name of the way in which it works, and the error.
    """

    def __init__(
        self,
        root: nn.Module,
        besides: Iterable[nn.Module],
        ways: Callable[[nn.Module, Any], Iterator[Way]],
        choices: Choices,
    ) -> None:
        super().__init__(root, besides)
        self._choices = Choices(choices)
        self.mended: dict[int, tuple[nn.Module, str, str]] = {}
        self._ways = ways
        # Modules that are being retried; a retry may call a watched forward of the same module again.
        self._tried: set[int] = set()

    def _around(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if id(module) in self._tried:
            return call(*args, **kwargs)
        try:
            with self._choices if module is self.root else nullcontext():
                outputs = call(*args, **kwargs)
        except Exception as error:
            if not _is_plain((args, kwargs)):
                raise
            self._choices.is_active = False
            outputs = self._again(module, (args, kwargs), error)
        if module is self.root:
            self.outputs = map_leaves(_copied, outputs)
        return outputs

    def _again(self, module: nn.Module, given: Any, error: Exception) -> Any:
        args, kwargs = given
        self._tried.add(id(module))
        for name, way in self._ways(module, given):
            stack = ExitStack()
            try:
                stack.enter_context(way)
                outputs = module(*args, **kwargs)
            except Exception:  # noqa: BLE001 - the next way is tried; at the end the first error is raised
                stack.close()
                continue
            # Keep this way for the rest of the run.
            self._stack.push(stack)
            self.mended[id(module)] = (module, name, _first_line(error))
            return outputs
        self._tried.discard(id(module))
        raise error


# A name, and a context in which a module runs in that way.
Way = tuple[str, AbstractContextManager[None]]


def share_lost(wanted: Any, got: Any) -> float:
    """The largest loss among the outputs: the root mean square of the error, relative to that of the output.

    Positions where `wanted` isn't finite are ignored. The loss is infinite if only `got` isn't finite.
    """
    mine, theirs = (pytree.tree_leaves(tree) for tree in (wanted, got))
    if len(mine) != len(theirs):
        return math.inf
    # Hide these operations from modes that watch the calls of the model.
    with without_torch_function(), torch.no_grad():
        return max((_lost(*pair) for pair in zip(mine, theirs, strict=True)), default=0.0)


def _lost(wanted: Any, got: Any) -> float:
    if not _is_float(wanted) or not _is_float(got) or wanted.numel() == 0:
        return 0.0
    if wanted.shape != got.shape:
        return math.inf
    first, second = wanted.detach().double(), got.detach().double()
    finite = first.isfinite()
    first, second = first[finite], second[finite]
    if not first.numel():
        return 0.0
    error = float((second - first).square().mean().sqrt())
    size = float(first.square().mean().sqrt())
    if not math.isfinite(error):
        return math.inf
    return error / size if size else math.inf if error else 0.0


def by_share(losses: Mapping[int, Loss]) -> Sequence[int]:
    """The ids of the modules, those with the largest loss first, and among equals those called first."""
    return sorted(losses, key=lambda key: -losses[key].share)


def _is_plain(given: Any) -> bool:
    """Whether a call can be repeated: it has no argument that may hold state, such as a cache."""
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(given))


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
