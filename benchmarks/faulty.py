"""Faults at random places, in exported files and in results of passes. Each can be called like the correct version."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx
import torch
from planted import KINDS, File
from torch import nn

from exporters.isolation import torchscript_allowed
from exporters.onnx import OnnxExporter
from exporters.torchscript import TorchScriptExporter
from optimizer import optimize
from optimizer.model.inputs import Call
from passes.base import Context, TensorRef
from passes.graph.module_pass import ModulePass, ModuleRewriter

BY_A_PASS = "a pass scales a weight by 1 %"
IN_TORCHSCRIPT = "weight off by 1 %"
SCALE = 1.01


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        place: the operation with its output, or the parameter.
        candidate: what is judged: a loaded file, or a module.
        seen: why an earlier check has already rejected the fault; "" if it reaches the verdict.
    """

    place: str
    candidate: Any
    seen: str = ""


def in_onnx(path: Path, kind: str, tensors: tuple[torch.Tensor, ...], draw: random.Random) -> Iterator[Fault]:
    """Plant a fault of one kind in the file, at one place after another; yield nothing if the kind fits no place.

    Files that onnxruntime can't load are left out, because no user could run them.

    Args:
        tensors: the inputs of the file at batch size 2.
    """
    file = _read(path, tensors)
    places = file.candidates()
    draw.shuffle(places)
    spoilt = path.with_name("spoilt.onnx")
    for number in places:
        node, planted = file.model.graph.node[number], file.copy()
        if not KINDS[kind](planted, number, draw):
            continue
        onnx.save(planted.model, spoilt)
        try:
            loaded = OnnxExporter.load(spoilt, "cpu")
        except Exception:  # noqa: BLE001 - errors of many kinds mean that onnxruntime can't load the file
            continue
        yield Fault(f"{node.op_type} {node.output[0]}", loaded)


def _read(path: Path, tensors: tuple[torch.Tensor, ...]) -> File:
    model = onnx.load(path)
    names = [name for node in model.graph.node for name in node.output if name]
    seen, _ = OnnxExporter.values(path, "cpu", names).run(tensors)
    floats = frozenset(name for name, value in seen.items() if value.dtype == torch.float32)
    return File(model, {name: tuple(value.shape) for name, value in seen.items()}, floats)


def in_torchscript(path: Path, draw: random.Random) -> Iterator[Fault]:
    """Yield the file with one floating-point parameter 1 % larger, for one parameter after another."""
    spoilt = path.with_name("spoilt.pt")
    names = _floats(_parameters(path)[1])
    draw.shuffle(names)
    for name in names:
        module, parameters = _parameters(path)
        with torchscript_allowed(), torch.no_grad():
            parameters[name].mul_(SCALE)
            module.save(str(spoilt))
        yield Fault(name.removeprefix("model.model."), TorchScriptExporter.load(spoilt, "cpu"))


def _parameters(path: Path) -> tuple[torch.jit.ScriptModule, dict[str, torch.Tensor]]:
    with torchscript_allowed():
        module = torch.jit.load(str(path))
    return module, dict(module.named_parameters())


def _floats(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()]


@dataclass(frozen=True)
class ScaleWeight(ModulePass):
    """Scale one parameter by 1 %, and name no region that could be compared."""

    name: ClassVar[str] = "scale-weight"
    path: str = ""

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        owner, _, name = self.path.rpartition(".")
        module = graph.tree.root.get_submodule(owner)
        with graph.change(owner, "scaled"):
            graph.set_tensor(TensorRef(module, name), module.get_parameter(name).detach() * SCALE)


def by_a_pass(model: nn.Module, call: Call, draw: random.Random) -> Iterator[Fault]:
    """Optimize the model with a pass that scales one parameter, for one parameter after another."""
    names = _floats(dict(model.named_parameters()))
    draw.shuffle(names)
    for name in names:
        passes = [ScaleWeight(name)]
        fast = optimize(model, passes, example_inputs=call.args or None, example_kwargs=call.kwargs or None)
        (record,) = fast.report.passes
        if record.status == "failed":
            # The pass can't be applied to this parameter.
            continue
        yield Fault(name, fast, record.reason if record.status == "rolled-back" else "")
