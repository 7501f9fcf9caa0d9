"""channels_last in training: the weights stay as they are, and convolutions convert their inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from passes.base import Context
from passes.memory_format.costs import (
    CONTIGUOUS_KERNELS,
    READING_CHANNELS_LAST,
    Costs,
    cheapest_formats,
    kernel_of,
    why_dear,
    why_no_format,
)
from passes.memory_format.forwards import (
    ChannelsLastInput,
    ContiguousInput,
    DrawsInOrder,
    FormattedForward,
    dim_order,
    enters_channels_last,
    is_kept_contiguous,
    ordered_leaves,
)
from passes.memory_format.watch import Layouts, LayoutWatch
from passes.module_interface import (
    CHANNELS_LAST_FORMATS,
    AroundForward,
    AttributeEdit,
    ModulePass,
    ModuleRewriter,
    Run,
    Runs,
    batch_norm_arguments,
    call_of,
    convolution_arguments,
    exact,
    in_place,
    is_channels_last,
    is_stock,
    shape_of,
    training_flags,
)
from passes.torch_private import AnyBatchNorm, AnyConvolution

# The shapes of the input and the output of a layer, for each of its calls in one run.
_Shapes = Sequence[tuple[torch.Size, torch.Size]]
# For each output, the order of its dims in memory; None to leave the output as it is.
_Orders = tuple[tuple[int, ...] | None, ...]
# The layers that compute nothing but a convolution, which works in either format.
_LAYERS: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class ChannelsLastTraining(ModulePass):
    """The part of `ChannelsLast` for training."""

    name: ClassVar[str] = "channels-last"
    modes: ClassVar[tuple[str, ...]] = ("training",)

    def rewrite(self, model: ModuleRewriter, context: Context) -> None:
        """Convert the inputs of the convolutions for which it is possible and pays."""
        seen = model.runs(context) or Runs()
        if seen.failure:
            model.skip("", seen.failure)
        else:
            _train(model, context, seen)


# The cost per element of a contiguous weight in channels_last training, relative to an element that is read or written
# in contiguous format. The weight is copied for the forward pass and for the backward pass, and so is its gradient.
_COPIED = 1
# The same if the kernel also packs these copies, in a slow way.
_COPIED_AND_PACKED = 4


def _train(model: ModuleRewriter, context: Context, seen: Runs) -> None:
    """Run the feature maps in channels_last where it pays, and leave all weights as they are.

    A convolution returns its output in the format of its input. So the first convolutions convert their inputs, and so
    do those after an operation that loses the format. A run shows which ones these are.
    """
    root = model.tree.root
    convolutions = dict(_convolutions(root))
    maps = _maps_in([run for run in seen.runs if run.number == 0 and _is_training(root, run)][:1] or seen.runs[:1])
    orders = _orders_of([run.recording.outputs for run in seen.runs if run.flag is None])
    reasons = {path: _why_not_entered(maps, module, context) for path, module in convolutions.items()}
    free = [path for path, reason in reasons.items() if reason is None]
    dear = _too_dear_in_training(model, maps, orders, reasons) if context.device.type == "cpu" else frozenset[str]()
    entered = {path: convolutions[path] for path in free if path not in dear}
    for path, module in convolutions.items():
        if path in dear:
            _keep_contiguous(model, path, module) if entered else model.skip(path, _why_dear(module, maps[id(module)]))
        elif reason := reasons[path]:
            model.skip(path, reason)
    if not entered:
        return
    wrapped = [
        AttributeEdit(module, "forward", ChannelsLastInput(module, module.__dict__.get("forward")))
        for module in entered.values()
    ]
    with in_place(wrapped), training_flags(root, None if root.training else True):
        layouts = _audit(model, context)
    for path, module in entered.items():
        if layouts is None or path in layouts.entries:
            with model.change(path, "input converted to channels_last", module):
                _put_around(model, module, ChannelsLastInput(module, module.__dict__.get("forward")))
    for path in () if layouts is None else layouts.draws:
        module = root.get_submodule(path)
        with model.change(path, "random numbers drawn as for contiguous maps"):
            _put_around(model, module, DrawsInOrder(module, module.__dict__.get("forward")))
    if model.changes:
        _keep_output_orders(model, orders)


def _convolutions(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in root.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, AnyConvolution) else None
        if weight is not None and (is_lazy(weight) or weight.dim() in CHANNELS_LAST_FORMATS):
            yield path, module


def _is_training(root: nn.Module, run: Run) -> bool:
    return root.training if run.flag is None else run.flag


def _why_not_entered(maps: Mapping[int, _Shapes], module: nn.Module, context: Context) -> str | None:
    """The reason why the convolution can't convert its input; "" if it needn't, None if it should."""
    weight = module._parameters["weight"]
    assert weight is not None
    if reason := why_no_format(weight):
        return reason
    if is_channels_last(weight) or is_kept_contiguous(module) or enters_channels_last(module):
        return ""
    if reason := _why_not_tried(weight, context):
        return reason
    if not is_stock(module, _LAYERS):
        return f"it is a {type(module).__name__}, which has its own computation"
    if any(len(shape) != weight.dim() for shape, _ in maps.get(id(module), ())):
        return "its input has no batch dim, so its kernels treat it as contiguous"
    return None


def _too_dear_in_training(
    model: ModuleRewriter, maps: Mapping[int, _Shapes], orders: _Orders, reasons: Mapping[str, str | None]
) -> frozenset[str]:
    """The paths of the convolutions that are faster in contiguous format; see `cheapest_formats`.

    Here a weight with more than one element per kernel costs more than in inference, because it is copied too. One with
    1x1 kernels costs nothing, because it is in both formats. A BatchNorm takes twice as long on contiguous maps as on
    maps in channels_last.
    """
    modules = {id(module): (path, module) for path, module in model.tree.root.named_modules()}
    steps = [(*modules[key], shapes) for key, shapes in maps.items() if key in modules]
    steps = [step for step in steps if step[0] in reasons or isinstance(step[1], AnyBatchNorm)]
    costs = [_costs_in_training(module, reasons.get(path), shapes) for path, module, shapes in steps]
    if steps and any(len(order or ()) in CHANNELS_LAST_FORMATS for order in orders):
        # A map that the root returns is converted back at the end.
        *_, (_, _, shapes) = steps
        costs.append(Costs(_read_and_written(shapes)[1], 0, math.inf))
    formats = cheapest_formats(costs)
    dear = (path for (path, _, _), is_last in zip(steps, formats, strict=False) if not is_last)
    return frozenset(path for path in dear if path in reasons and reasons[path] is None)


def _costs_in_training(module: nn.Module, reason: str | None, maps: _Shapes) -> Costs:
    read, written = _read_and_written(maps)
    if isinstance(module, AnyBatchNorm):
        return Costs(0, read, math.inf)
    if is_kept_contiguous(module):
        return Costs(math.inf, 0, read)
    weight = module._parameters["weight"]
    assert weight is not None
    backends = {_backend(module, shape) for shape, _ in maps}
    if not backends.isdisjoint(CONTIGUOUS_KERNELS):
        return Costs(2 * (read + written), 0, read)
    copied = 0 if weight[0, 0].numel() == 1 else weight.numel()
    factor = _COPIED if backends <= READING_CHANNELS_LAST else _COPIED_AND_PACKED
    # A convolution that can't convert its input keeps the input's format. One with a channels_last weight, or one that
    # converts already, is never contiguous.
    contiguous = math.inf if reason == "" else read + written
    return Costs(factor * copied, contiguous, math.inf if reason else read)


def _why_not_tried(weight: nn.Parameter, context: Context) -> str | None:
    if not context.example_calls:
        return "only a run can show that no view depends on the old format: add example inputs"
    if weight.is_meta:
        return "its weight is on the meta device and has no values"
    return None


def _maps_in(runs: Sequence[Run]) -> Mapping[int, _Shapes]:
    """The shapes of inputs and outputs of each convolution and BatchNorm, by its id, in the order of execution."""
    found: dict[int, list[tuple[torch.Size, torch.Size]]] = {}
    for node in (node for run in runs for node in run.recording.nodes()):
        module = call_of(node).module
        if not isinstance(module, AnyConvolution | AnyBatchNorm):
            continue
        given = convolution_arguments(node) or batch_norm_arguments(node)
        if given is not None:
            shapes = shape_of(given["input"]), shape_of(node)
            if shapes[0] is not None and shapes[1] is not None:
                found.setdefault(id(module), []).append((torch.Size(shapes[0].sizes), torch.Size(shapes[1].sizes)))
    return found


def _read_and_written(maps: _Shapes) -> tuple[int, int]:
    return sum(shape.numel() for shape, _ in maps), sum(shape.numel() for _, shape in maps)


def _why_dear(module: nn.Module, maps: _Shapes) -> str:
    return why_dear(_costs_in_training(module, None, maps), {_backend(module, shape) for shape, _ in maps})


def _backend(module: nn.Module, shape: torch.Size) -> str:
    """The name of the kernel that torch selects for an input of this shape."""
    assert isinstance(module, AnyConvolution)
    sides = module._reversed_padding_repeated_twice
    named = {name: getattr(module, name) for name in ("stride", "dilation", "output_padding", "groups")}
    named["padding"] = [max(pair) for pair in zip(sides[::2], sides[1::2], strict=True)][::-1]
    return kernel_of(named, exact(module.weight), shape, module.transposed)


def _audit(model: ModuleRewriter, context: Context) -> Layouts | None:
    """Watch a run, and add remarks where the format is lost; returns None if there is no such run."""
    if context.run_inside is None:
        return None
    watch = LayoutWatch(model.tree.root)
    if (problem := context.run_inside(watch, context.smallest_call)) is not None:
        model.remark("", f"no run shows where channels_last is lost ({problem})")
        return None
    for path in watch.layouts.scripted:
        model.remark(path, "it is TorchScript: whether channels_last is lost inside it can't be seen")
    for loss in watch.layouts.losses:
        model.remark(loss.where, loss.text)
    return watch.layouts


# Writing --------------------------------------------------------------------------------------------------------------


def _keep_contiguous(model: ModuleRewriter, path: str, module: nn.Module) -> None:
    with model.change(path, "kept in contiguous format", module):
        _put_around(model, module, ContiguousInput(module, module.__dict__.get("forward")))


def _orders_of(outputs: Sequence[Any]) -> _Orders:
    if not outputs:
        return ()
    first, *others = (ordered_leaves(output) for output in outputs)
    alike = [leaves for leaves in others if len(leaves) == len(first)]
    return tuple(dim_order(leaves) for leaves in zip(first, *alike, strict=True))


def _keep_output_orders(model: ModuleRewriter, orders: _Orders) -> None:
    """Wrap the root's forward so that its outputs get these orders of dims in memory; None leaves an output as it is.

    An earlier such wrapper is replaced. The wrapper reads the outputs at each call, because they may differ between
    calls.
    """
    if not any(orders):
        return
    root = model.tree.root
    inner = root.__dict__.get("forward")
    if isinstance(inner, FormattedForward):
        inner = inner.inner
    with model.change("", "outputs in the memory format of the original"):
        _put_around(model, root, FormattedForward(root, orders, inner))


def _put_around(model: ModuleRewriter, module: nn.Module, forward: AroundForward) -> None:
    model.set_attribute(module, "forward", forward)
