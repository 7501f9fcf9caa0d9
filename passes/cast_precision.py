"""Compute in bfloat16 or float16, except for layers that would lose too much precision."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from passes.base import Context, Precision
from passes.casting.forwards import (
    AutocastForward,
    CastForward,
    FiniteMasks,
    InFloat32,
    LoweredInput,
    UnderAutocast,
    dtypes_of,
    masks_of,
    takes_one_dtype,
)
from passes.casting.losses import Choices, LossWatch, TrialWatch, Way, by_share, share_lost
from passes.errors import RequirementNotMet
from passes.module_interface import (
    AttributeEdit,
    Edit,
    ModelTree,
    ModulePass,
    ModuleRewriter,
    TensorEdit,
    TensorRef,
    exact,
    in_place,
    is_atom,
    paths_matching,
)
from passes.torch_private import AnyNorm

# The maximum error of a layer in the dtype, in units of the dtype (its spacing at 1). The error is a root mean square,
# relative to that of the output. Rounding inputs and weights once explains about half a unit.
_MOST_OF_A_LAYER = 8
# The maximum error of the model's outputs: a hundred layers with an error of one unit each add up to ten.
_MOST_OF_ALL = 16
# GPUs with a lower compute capability have no bfloat16 arithmetic.
_FIRST_WITH_BFLOAT16 = (8, 0)


@dataclass(frozen=True)
class CastPrecision(ModulePass):
    """Compute in bfloat16 or float16, and keep layers that would lose too much precision in float32.

        autocast:  y = f(x)  ->  with torch.autocast(dtype): y = f(x).float()
        weights:   y = f(x)  ->  y = f'(x).float()      layers of f' have weights in the dtype and cast their inputs

    The inputs and outputs of the model keep their dtypes.

    `autocast` casts where torch's own autocast lists say so, and leaves the weights unchanged. It also works in
    training; float16 then needs a `torch.amp.GradScaler` in your training loop. It casts the weights at each call. If
    calls are small, as in the steps of a language model, `weights` is faster.

    `weights` halves the memory of the parameters. The weights and statistics of BatchNorm and InstanceNorm stay in
    float32, because torch accepts them next to an input of another dtype. So do all buffers, which are tables,
    positions and statistics more often than weights. Checkpoints of the original can be loaded into the result, and are
    cast. A layer that gets weights in another dtype (`assign=True`, `.float()`) computes in that dtype.

    The model receives its inputs unchanged, and each layer casts its own inputs. So a time, a position or a mask that
    no layer takes keeps its digits and its range, and is used in float32. With `weights`, a module may combine such
    float32 values with the outputs of its layers, in a product that accepts only one dtype. This module then computes
    under autocast. Finite values in masks for torch.nn layers, such as attention, stay finite.

    With example inputs, each layer with parameters is also run in the dtype, on its actual inputs. It stays in
    float32 if its error is above 8 units of the dtype (6 % in bfloat16, 0.8 % in float16; both as a root mean square,
    relative to that of the output), if its output is no longer finite, or if it raises.

    Then the whole model is run. As long as the error of its outputs is above 16 units, more layers stay in float32,
    those with the largest errors first. The report names each of them with its error. If that doesn't help, nothing is
    changed. Without example inputs, autocast is set for the whole model without these measurements.

    The measurements also reveal wrong kernels. On a CPU with AMX, torch 2.13 returns unrelated numbers for some
    convolutions in bfloat16, among them those with 8, 16 or 24 channels, a kernel of width 8 and a stride of 8.

    TorchScript files support both dtypes. A model with bfloat16 convolutions can't be exported to ONNX, and the error
    says so: use float16 for it.

    The error of the result is compared with the original's own error at that precision: that of the original computing
    in the dtype, with the same layers in float32. At most 4 times this error is allowed.

    Raises RequirementNotMet for quantized models and parameters in float64; for `weights` in training or without
    example inputs; for a path in `keep` that matches no module; and for bfloat16 on GPUs before compute capability 8.0.

    Does not handle:

    - outputs inside objects that `torch.utils._pytree` doesn't open, such as the caches of language models: they stay in
      the dtype, so the pass is rolled back
    - operations outside of layers, whose precision loss is measured only in the outputs of the model
    - overflows that the example inputs don't cause
    - layers and methods of a result that are called directly, which accept float32 and may return the dtype
    - `.bfloat16()` of a result with bfloat16 weights, which still returns float32: cast the original instead

    Attributes:
        dtype: "bfloat16", or "float16", which has more digits, and numbers up to 65504.
        how: "autocast" or "weights".
        keep: the paths of modules that compute in float32, including their submodules, such as "head|layers.*.norm".
        error: the largest error of the model's outputs instead of 16 units, as a share such as 0.01; layers with a larger
            error stay in float32 too.
    """

    name: ClassVar[str] = "cast-precision"
    lowers_precision: ClassVar[bool] = True

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    how: Literal["autocast", "weights"] = "autocast"
    keep: str = ""
    error: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype must be 'bfloat16' or 'float16', not {self.dtype!r}")
        if self.how not in ("autocast", "weights"):
            raise ValueError(f"how must be 'autocast' or 'weights', not {self.how!r}")
        if not isinstance(self.keep, str):
            raise ValueError(f"keep must be a string of module paths, such as 'head', not {self.keep!r}")
        if self.error is not None and not (isinstance(self.error, float) and 0 < self.error < 1):
            raise ValueError(f"error must be a share above 0 and below 1, such as 0.01, not {self.error!r}")

    def check(self, context: Context) -> None:
        """Check that the mode, the example inputs and the device fit the options.

        Raises:
            RequirementNotMet: they don't.
        """
        super().check(context)
        if self.how == "weights" and context.mode != "inference":
            raise RequirementNotMet(
                f"The pass {self.name} casts weights for inference only: train with how='autocast', which keeps "
                "them in float32."
            )
        if self.how == "weights" and not context.example_calls:
            raise RequirementNotMet(
                f"The pass {self.name} with how='weights' needs a run to find what can't be computed in "
                f"{self.dtype}: add example inputs, or use how='autocast'."
            )
        if context.device.type == "cuda" and self.dtype == "bfloat16":
            found = torch.cuda.get_device_capability(context.device)
            if found < _FIRST_WITH_BFLOAT16:
                raise RequirementNotMet(
                    f"The pass {self.name} can't use bfloat16 on a GPU of compute capability {found[0]}.{found[1]}, "
                    "which has no arithmetic for it: use dtype='float16'."
                )

    def rewrite(self, model: ModuleRewriter, context: Context) -> None:
        """Measure the precision loss of each layer, keep the sensitive ones in float32, and cast the others."""
        tree, dtype = model.tree, getattr(torch, self.dtype)
        self._refuse(tree)
        if (done := model.computes_in) is not None:
            model.skip("", f"it already computes in {str(done).removeprefix('torch.')}")
            return
        floats = [tensor for module in tree.modules() for _, tensor in _floats_of(module)]
        if floats and all(tensor.dtype is not torch.float32 for tensor in floats):
            named = " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in floats}))
            model.skip("", f"its parameters are already in {named}")
            return
        most = _MOST_OF_ALL * torch.finfo(dtype).eps if self.error is None else self.error
        casting = _Casting(model, context, dtype, most, weights=self.how == "weights")
        casting.keep_named(self._kept_by_name(tree))
        if context.run_inside is not None and not casting.settle():
            return
        casting.write()
        if context.device.type == "cpu" and self.dtype not in fast_dtypes(context.device):
            model.remark("", f"torch has no fast kernels for {self.dtype} on this CPU: the result is for other devices")

    def _refuse(self, tree: ModelTree) -> None:
        for module in tree.modules():
            path = tree.path(module) or "the root"
            if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")) or any(
                tensor.is_quantized for _, tensor in _tensors_of(module)
            ):
                raise RequirementNotMet(
                    f"The pass {self.name} is for models in float32, and {path} is quantized: leave the pass out."
                )
            if any(tensor.dtype is torch.float64 for _, tensor in _floats_of(module)):
                raise RequirementNotMet(
                    f"The pass {self.name} is for models in float32, and {path} has parameters in float64: use a "
                    "float32 model, or leave the pass out."
                )

    def _kept_by_name(self, tree: ModelTree) -> list[nn.Module]:
        if not self.keep:
            return []
        paths = {path: module for module in tree.modules() for path in tree.paths(module) if path}
        for pattern in self.keep.split("|"):
            if not paths_matching(paths, pattern):
                raise RequirementNotMet(
                    f"{self.name} has keep={self.keep!r}, but {pattern.strip()!r} isn't the path of any module of "
                    f"{type(tree.root).__name__}."
                )
        return [paths[path] for path in sorted(paths_matching(paths, self.keep))]


@dataclass
class _Choice:
    """The modules that don't simply run in the dtype, by id, each with the reason for the report."""

    kept: dict[int, str] = field(default_factory=dict)  # the modules that stay in float32, including their submodules
    # The modules that compute under autocast, although their weights are in the dtype
    mixed: dict[int, str] = field(default_factory=dict)
    bare: set[int] = field(default_factory=set)  # the modules among `kept` whose outputs stay in float32 too


class _Casting:
    """Finds the modules of one model that stay in float32, and casts the others."""

    def __init__(
        self, model: ModuleRewriter, context: Context, dtype: torch.dtype, most: float, *, weights: bool
    ) -> None:
        self.model = model
        self.tree = model.tree
        self.root = model.tree.root
        self.context = context
        self.dtype = dtype
        self.most = most  # the largest error of the model's outputs
        self.weights = weights
        self.word = str(dtype).removeprefix("torch.")
        self.choice = _Choice()
        self.besides = [module for _, module in self.tree.unregistered]
        self.modules = {id(module): module for module in self.tree.modules()}
        self.installed = {key: module.__dict__.get("forward") for key, module in self.modules.items()}
        # Only autocast needs this, and it takes a recorded run.
        self.repeats = not weights and self._repeats()
        self.outputs: tuple[torch.dtype | None, ...] = ()
        self._found: tuple[frozenset[int], tuple[set[int], list[nn.Module]]] | None = None
        # (original, cast) by the id of the original, which is held so that no other tensor can get its id.
        self._casts: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}

    def keep_named(self, modules: list[nn.Module]) -> None:
        """Keep these modules, which the user named, in float32."""
        for module in modules:
            self.choice.kept[id(module)] = "kept in float32 by the option keep"
        self._keep_what_is_tied()

    # Finding ----------------------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Find the modules that stay in float32. Returns whether the rest can be cast; if not, records a skip."""
        unit = torch.finfo(self.dtype).eps
        layers = [module for module in self.modules.values() if self._is_measured(module)]
        most = min(_MOST_OF_A_LAYER * unit, self.most)
        watch = LossWatch(self.root, self.besides, layers, self.dtype, self._lowered)
        if (problem := self._run(watch)) is not None:
            self.model.skip("", f"no run shows the precision that its layers lose in {self.word} ({problem})")
            return False
        losses, wanted = watch.losses, watch.outputs
        self.outputs = dtypes_of(wanted)
        for key, loss in losses.items():
            if loss.share > most:
                shown = f"raises ({loss.error})" if loss.error else _off(loss.share)
                self.choice.kept[key] = f"kept in float32: in {self.word} it {shown}"
                if math.isinf(loss.share) and not loss.error:
                    self.choice.bare.add(key)
        self._keep_what_is_tied()
        worst = [key for key in by_share(losses) if not self._is_kept(self.modules[key]) and losses[key].share > 0]
        count = 1
        while True:
            problem, lost = self._try(wanted, watch.choices)
            if problem is None and lost <= self.most:
                return True
            if problem is not None:
                self.model.skip("", f"it doesn't run in {self.word} ({problem})")
                return False
            if math.isinf(lost) and (rounded := self.choice.kept.keys() - self.choice.bare):
                # An output of theirs may be too large for the dtype.
                self.choice.bare |= rounded
                continue
            if not worst:
                bound = f"and may be by {100 * self.most:.2g} %"
                self.model.skip(
                    "", f"in {self.word} it {_off(lost)} even with every sensitive layer in float32, {bound}"
                )
                return False
            for key in worst[:count]:
                shown = f"in {self.word} the model {_off(lost)}, and this layer {_off(losses[key].share)}"
                self.choice.kept[key] = f"kept in float32: {shown}"
                self.choice.bare.add(key)
            self._keep_what_is_tied()
            # One more layer per run would take many runs for a deep model, so the number doubles each time.
            worst, count = [key for key in worst[count:] if not self._is_kept(self.modules[key])], 2 * count

    def _is_measured(self, module: nn.Module) -> bool:
        return module is not self.root and _has_floats(module) and not self._is_kept(module)

    def _keep_what_is_tied(self) -> None:
        """Keep modules that share a parameter with a kept module, because one tensor has only one dtype."""
        if not self.weights:
            return
        while True:
            kept = [module for module in self.modules.values() if self._is_kept(module)]
            held = {id(tensor): self.tree.path(module) for module in kept for _, tensor in _floats_of(module)}
            found = next(
                (
                    (module, held[id(tensor)])
                    for module in self.modules.values()
                    if not self._is_kept(module)
                    for _, tensor in _floats_of(module)
                    if id(tensor) in held
                ),
                None,
            )
            if found is None:
                return
            module, path = found
            self.choice.kept[id(module)] = f"kept in float32, because it shares a parameter with {path}"

    def _is_kept(self, module: nn.Module) -> bool:
        return id(module) in self._kept_now()[0]

    def _kept_now(self) -> tuple[set[int], list[nn.Module]]:
        """The ids of all modules that stay in float32, and the topmost of these modules."""
        known = frozenset(self.choice.kept)
        if self._found is None or self._found[0] != known:
            chosen = [self.modules[key] for key in self.choice.kept]
            below = {id(each) for module in chosen for each in module.modules() if each is not module}
            tops = [module for module in chosen if id(module) not in below]
            self._found = known, (below | known, tops)
        return self._found[1]

    def _try(self, wanted: Any, choices: Choices) -> tuple[str | None, float]:
        """Run the model with the current choice. Returns the error if it raises, and the precision loss of its outputs.

        A module that raises in the run is retried under autocast or in float32. If that works, it is chosen.
        """
        trial = TrialWatch(self.root, self.besides, self._ways, choices)
        with in_place(self._edits(self.root)):
            problem = self._run(trial)
        for module, way, error in trial.mended.values():
            if way == _MIXED:
                self.choice.mixed[id(module)] = f"under autocast, because it raises without ({error})"
            else:
                self.choice.kept[id(module)] = f"kept in float32: in {self.word} it raises ({error})"
        if trial.mended:
            self._keep_what_is_tied()
        return problem, 0.0 if problem is not None else share_lost(wanted, trial.outputs)

    def _run(self, watch: AbstractContextManager[Any]) -> str | None:
        assert self.context.run_inside is not None
        return self.context.run_inside(watch)

    def _ways(self, module: nn.Module, given: Any) -> Iterator[Way]:
        if self._is_kept(module):
            return
        if self.weights and not is_atom(module) and id(module) not in self.choice.mixed:
            yield _MIXED, in_place([AttributeEdit(module, "forward", self._forward_of(module, mixed=True))])
        if module is not self.root:
            yield _KEPT, in_place([*self._back(module), self._keeping(module)])

    @contextmanager
    def _lowered(self, module: nn.Module) -> Iterator[None]:
        """Run a module in the dtype inside the block, with its submodules as currently chosen."""
        if self._is_kept(module):
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(in_place(self._edits(module)))
            if not self.weights:
                device = self.context.device.type
                stack.enter_context(torch.autocast(device, self.dtype, cache_enabled=False))
            yield

    # Writing ----------------------------------------------------------------------------------------------------------

    def _edits(self, top: nn.Module) -> list[Edit]:
        """The edits that cast a module and its submodules, and for the root also the edit that casts its outputs."""
        edits: list[Edit] = []
        kept, tops = self._kept_now()
        inside = self.modules.keys() if top is self.root else {id(module) for module in top.modules()}
        edits += [self._keeping(module) for module in tops if id(module) in inside]
        for key in inside - kept:
            module = self.modules[key]
            if self.weights:
                edits += [TensorEdit(module, name, self._cast(tensor)) for name, tensor in _castable(module)]
                edits += self._flat_weights(module)
            if (forward := self._forward_of(module)) is not self.installed[key]:
                edits.append(AttributeEdit(module, "forward", forward))
        if top is self.root:
            edits.append(AttributeEdit(top, "forward", self._forward_of(top)))
        return edits

    def _cast(self, tensor: torch.Tensor) -> nn.Parameter:
        if id(tensor) not in self._casts:
            cast = exact(tensor).to(self.dtype)
            made = nn.Parameter(cast, requires_grad=tensor.requires_grad)
            self._casts[id(tensor)] = tensor, made
        return self._casts[id(tensor)][1]

    def _flat_weights(self, module: nn.Module) -> list[AttributeEdit]:
        held: list[Any] = list(module._flat_weights) if isinstance(module, nn.RNNBase) else []
        return _held_flat(module, [self._cast(tensor) if _is_castable(tensor) else tensor for tensor in held])

    def _back(self, module: nn.Module) -> list[Edit]:
        """The edits that restore the original parameters of a module and its submodules."""
        origins = {id(made): tensor for tensor, made in self._casts.values()}
        edits: list[Edit] = []
        for each in module.modules():
            held = ((name, tensor) for name, tensor in each._parameters.items() if id(tensor) in origins)
            edits += [TensorEdit(each, name, origins[id(tensor)]) for name, tensor in held]
            flat: list[Any] = list(each._flat_weights) if isinstance(each, nn.RNNBase) else []
            edits += _held_flat(each, [origins.get(id(tensor), tensor) for tensor in flat])
        return edits

    def _keeping(self, module: nn.Module) -> AttributeEdit:
        gives = self.dtype if self.weights and id(module) not in self.choice.bare else None
        forward = InFloat32(module, module.__dict__.get("forward"), gives, is_atom=is_atom(module))
        return AttributeEdit(module, "forward", forward)

    def _forward_of(self, module: nn.Module, *, mixed: bool = False) -> Any:
        """The new forward of a module that isn't kept in float32, wrapped around its current one."""
        forward = self.installed[id(module)]
        if self.weights and self._takes_one_dtype(module):
            forward = LoweredInput(module, forward, self.dtype, is_atom=is_atom(module))
        elif not self.weights and is_atom(module) and masks_of(module):
            forward = FiniteMasks(module, forward, self.dtype, is_atom=True)
        if mixed or id(module) in self.choice.mixed:
            forward = UnderAutocast(module, forward, self.dtype)
        if module is not self.root:
            return forward
        if self.weights:
            return CastForward(module, forward, self.dtype, self.outputs)
        return AutocastForward(module, forward, self.dtype, self.outputs, repeats=self.repeats)

    def _repeats(self) -> bool:
        """Whether a call of the model may use a parameter more than once, so that autocast should cache its casts."""
        recorded = self.model.runs(self.context)
        if recorded is None or recorded.failure:
            return True
        refs = [TensorRef(module, name) for module in self.modules.values() for name, _ in _floats_of(module)]
        return any(len(run.recording.uses(ref)) > 1 for run in recorded.runs for ref in refs)

    def _takes_one_dtype(self, module: nn.Module) -> bool:
        # A torch.nn module with sublayers computes with their weights itself, so all of them must be in the dtype.
        return takes_one_dtype(module) and not any(self._is_kept(each) for each in module.modules())

    def write(self) -> None:
        """Make the changes, and record each under the path of its module."""
        model, path_of = self.model, self.tree.path
        in_float32, tops = self._kept_now()
        for module in tops:
            with model.change(path_of(module), self.choice.kept[id(module)]):
                model.set_attribute(module, "forward", self._keeping(module).new)
        for key, module in self.modules.items():
            if key not in in_float32:
                self._write_one(path_of(module), module)
        what = "inputs and outputs keep their dtypes around" if self.weights else "runs under autocast to"
        mixed = self.choice.mixed.get(id(self.root))
        with model.change("", f"{what} {self.word}{f', {mixed}' if mixed else ''}"):
            model.set_attribute(self.root, "forward", self._forward_of(self.root))
        kept = tuple(path_of(module) for module in tops)
        bare = tuple(path_of(self.modules[key]) for key in self.choice.bare)
        model.precision = Precision(self.dtype, self.weights, kept, bare)

    def _write_one(self, path: str, module: nn.Module) -> None:
        held, forward = list(_castable(module)) if self.weights else [], self._forward_of(module)
        is_around = module is not self.root and forward is not self.installed[id(module)]
        if not held and not is_around:
            return
        what = [f"weights in {self.word}"] if held else []
        if isinstance(forward, FiniteMasks):
            what.append(f"masks stay finite in {self.word}")
        elif self._takes_one_dtype(module) and not held:
            what.append(f"input cast to {self.word} for its layers")
        what += [self.choice.mixed[id(module)]] if is_around and id(module) in self.choice.mixed else []
        with self.model.change(path, ", ".join(what)) as change:
            flat = self._flat_weights(module)
            for name, tensor in held:
                change.sources.append(TensorRef(module, name))
                self.model.set_tensor(TensorRef(module, name), self._cast(tensor))
            for edit in flat:
                self.model.set_attribute(module, edit.name, edit.new)
            if is_around:
                self.model.set_attribute(module, "forward", forward)


def _held_flat(module: nn.Module, flat: list[Any]) -> list[AttributeEdit]:
    """The edits of a recurrent layer's two extra lists: its parameters, and references that detect replaced ones."""
    if not flat:
        return []
    references = [None if tensor is None else weakref.ref(tensor) for tensor in flat]
    return [AttributeEdit(module, "_flat_weights", flat), AttributeEdit(module, "_flat_weight_refs", references)]


_MIXED = "mixed"
_KEPT = "kept"


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for held in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in held.items() if tensor is not None and not is_lazy(tensor))


def _floats_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating-point parameters of a module, without lazy ones."""
    found: Mapping[str, Any] = module._parameters
    for name, tensor in found.items():
        if tensor is not None and not is_lazy(tensor) and tensor.is_floating_point():
            yield name, tensor


def _has_floats(module: nn.Module) -> bool:
    return any(True for _ in _floats_of(module))


def _castable(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a module that `how="weights"` casts."""
    if isinstance(module, AnyNorm | torch.jit.ScriptModule):
        return
    yield from ((name, tensor) for name, tensor in _floats_of(module) if _is_castable(tensor))


def _is_castable(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32


def fast_dtypes(device: torch.device) -> tuple[str, ...]:
    """The half precisions that torch computes fast in on a device, the better one first: the more digits, or the faster."""
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.get_device_capability(device) >= _FIRST_WITH_BFLOAT16
        return ("float16", "bfloat16") if has_bfloat16 else ("float16",)
    ops = torch.ops.mkldnn
    kernels = (("bfloat16", ops._is_mkldnn_bf16_supported), ("float16", ops._is_mkldnn_fp16_supported))
    return tuple(name for name, supported in kernels if supported())


def _off(share: float) -> str:
    return f"is off by {100 * share:.2g} % of its output" if math.isfinite(share) else "is no longer finite"
