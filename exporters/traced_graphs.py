"""Change a trace so that it doesn't keep the device and the settings of the moment."""

from __future__ import annotations

import torch

from exporters.torch_private import graphs_of


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

    On the device of the trace the results are the same. Does not handle methods without a tensor.

    Args:
        device: the device of the traced inputs; constants with another device are kept.
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
