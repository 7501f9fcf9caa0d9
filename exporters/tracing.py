"""Trace an adapter: with the record of its decisions, and without the device and the settings of the moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from exporters.base import Adapter, clones
from exporters.decisions import Watch
from exporters.errors import RouteRefused
from exporters.isolation import refusing, silent, torchscript_allowed, undisturbed
from exporters.places import called_in_torch, place_of_error
from exporters.torch_private import graphs_of, is_tracing

# Part of torch's message when compiled code is traced; in each eager call, `torch.cond` compiles itself.
_NO_COMPILED_CODE = "torch.jit.trace a dynamo-optimized function"


@contextmanager
def watching(adapter: Adapter, fixed: Sequence[Sequence[bool]] = ()) -> Iterator[Watch]:
    """Record where Python reads traced values in traces of `adapter` made inside; `fixed` is as for `Watch`."""
    watch = Watch(adapter, fixed)
    hook = adapter.register_forward_pre_hook(watch.start)
    try:
        with watch:
            yield watch
    except RuntimeError as error:
        if _NO_COMPILED_CODE not in str(error) or not (place := place_of_error(error, adapter.model)):
            raise
        raise RouteRefused(
            f"TorchScript's tracer can't record torch's `{called_in_torch(error)}`, which the model calls at {place}: "
            "export to pt2, which can hold it"
        ) from error
    finally:
        hook.remove()


def trace(
    adapter: Adapter, inputs: Sequence[torch.Tensor], fixed: Sequence[Sequence[bool]] = ()
) -> tuple[torch.jit.ScriptModule, Watch]:
    """Trace the adapter on these inputs, and record where Python reads traced values; `fixed` is as for `Watch`."""
    with (
        undisturbed(adapter), refusing(), silent(), torchscript_allowed(), traced_by_their_forwards(),
        watching(adapter, fixed) as watch,
    ):  # fmt: skip
        module = torch.jit.trace(adapter, clones(inputs), check_trace=False)
    return module, watch


@contextmanager
def traced_by_their_forwards() -> Iterator[None]:
    """Inside, a trace records the operations of a `torch.autograd.Function`'s forward instead of one call to Python.

    No file format can hold a call to Python. Without gradients, the forward is all that the function does. Calls
    through names that were bound before (`gelu = Gelu.apply` at module level) stay calls to Python.
    """
    own = vars(torch.autograd.Function)["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not is_tracing() or torch.is_grad_enabled():
            return own.__get__(None, cls)(*args, **kwargs)
        if cls.setup_context is not torch.autograd.Function.setup_context:
            # setup_context saves data for a backward pass, and there is none.
            return cls.forward(*args, **kwargs)
        context = FunctionCtx()
        context.needs_input_grad = (False,) * len(args)  # type: ignore[attr-defined]
        return cls.forward(context, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


def follow_settings(module: torch.jit.ScriptModule) -> None:
    """Replace each convolution by the operator that reads torch's settings when it runs, in place.

    A trace holds the settings as constants, among them whether cuDNN may compute in TF32, which it may by default:

        aten::_convolution(x, ..., benchmark, deterministic, cudnn_enabled, allow_tf32)  ->  aten::conv2d(x, ...)
    """
    for graph in graphs_of(module):
        for node in graph.findAllNodes("aten::_convolution"):
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_ = node.inputs()
            dims = len(list(stride.node().inputs()))
            if transposed.toIValue():
                inputs = [x, weight, bias, stride, padding, output_padding, groups, dilation]
                plain = graph.create(f"aten::conv_transpose{dims}d", inputs, 1)
            else:
                plain = graph.create(f"aten::conv{dims}d", [x, weight, bias, stride, padding, dilation, groups], 1)
            plain.insertBefore(node)
            plain.copyMetadata(node)
            plain.output().setType(node.output().type())
            node.output().replaceAllUsesWith(plain.output())
            node.destroy()


def follow_inputs(module: torch.jit.ScriptModule, device: torch.device) -> None:
    """Replace the device in each method of a trace by that of the method's first tensor, in place.

    A trace holds the device of each new tensor as a constant, which `map_location` doesn't change:

        torch.arange(n, device=x.device)  ->  traced as device="cuda:0"  ->  device=prim::device(x)

    On the device of the trace, that of the inputs, the results are the same. Constants with another device are kept.
    Does not handle methods without a tensor.
    """
    for graph in graphs_of(module):
        source = next((value for value in graph.inputs() if value.type().kind() == "TensorType"), None)
        for node in graph.findAllNodes("prim::Constant") if source is not None else ():
            constant = node.output()
            if constant.type().kind() == "DeviceObjType" and torch.device(node.s("value")) == device:
                followed = graph.create("prim::device", [source], 1)
                followed.insertBefore(next(iter(graph.nodes())))
                followed.output().setType(constant.type())
                constant.replaceAllUsesWith(followed.output())
