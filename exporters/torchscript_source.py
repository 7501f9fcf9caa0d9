"""Generate TorchScript source: a forward around a model to script, and a forward that checks a module's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exporters.base import Adapter, parameter_names
from exporters.errors import RouteRefused, refusing
from exporters.evidence import Evidence
from exporters.isolation import silent, undisturbed
from exporters.structure import ContainerNode, Node, TensorNode
from exporters.torchscript_deprecation import torchscript_allowed


def scripted(adapter: Adapter) -> torch.jit.ScriptModule:
    """Script the model inside a generated forward with flat tensor inputs and outputs, like the adapter's.

    Raises:
        RouteRefused: it can't be scripted: a module has a forward on the instance, an argument has no TorchScript
            source, or torch refuses the source.
    """
    model = adapter.model
    changed = next((name for name, module in model.named_modules() if "forward" in vars(module)), None)
    if changed is not None:
        raise RouteRefused(
            f"{f'module `{changed}`' if changed else 'the model'} has its own forward, but scripting would compile "
            "the one of its class"
        )
    with undisturbed(adapter), refusing():
        names = [f"input_{index}" for index in range(len(adapter.input_names))]
        args, kwargs = adapter.call_arguments([_Source(name) for name in names])
        arguments = [_spell(value) for value in args] + [f"{name}={_spell(value)}" for name, value in kwargs.items()]
        outputs = list(_reads(adapter.outputs.root, "result"))
        return _defined(
            model,
            model.training,
            f"def forward(self, {', '.join(names)}):\n"
            f"    result = self.model({', '.join(arguments)})\n"
            f"    return {', '.join(outputs)}\n",
        )


def with_input_checks(module: torch.jit.ScriptModule, evidence: Evidence) -> torch.jit.ScriptModule:
    """Wrap the module in a forward that refuses sizes for which the file wasn't made, as onnxruntime does.

    A trace would compute with them, although sizes computed in Python are baked into it.
    """
    names = parameter_names(evidence.adapter.input_names)
    lines = [f"def forward(self, {', '.join(names)}):"]
    for name, spec in zip(names, evidence.input_specs, strict=True):
        fixed = [f"{name}.size({dim}) != {size}" for dim, size in enumerate(spec.shape) if isinstance(size, int)]
        wrong = " or ".join([f"{name}.dim() != {len(spec.shape)}", *fixed])
        sizes = ", ".join(map(str, spec.shape))
        lines += [f"    if {wrong}:", f"        raise ValueError({f'Input {spec.name} of this file is [{sizes}].'!r})"]
    lines.append(f"    return self.model({', '.join(names)})")
    return _defined(module, module.training, "\n".join((*lines, "")))


def _defined(model: nn.Module, training: bool, forward: str) -> torch.jit.ScriptModule:
    """Script a module that has `model` as its child and the forward given as source."""
    # Create a new class: torch uses one TorchScript type, with one forward, for all instances of a class.
    holder = type("Holder", (nn.Module,), {})()
    holder.training = training
    holder.model = model
    with refusing(), silent(), torchscript_allowed():
        module: torch.jit.ScriptModule = torch.jit.script(holder)
        module.define(forward)
    return module


@dataclass(frozen=True)
class _Source:
    """Placeholder for a tensor when arguments are written as source: the name of the parameter that holds it."""

    name: str


def _spell(value: Any) -> str:
    """Write `value` as TorchScript source.

    Raises:
        RouteRefused: it has no TorchScript source.
    """
    if isinstance(value, _Source):
        return value.name
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if type(value) is list:
        return f"[{', '.join(map(_spell, value))}]"
    if type(value) is tuple:
        return f"({''.join(f'{_spell(item)}, ' for item in value)})"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {_spell(item)}' for key, item in value.items())}}}"
    raise RouteRefused(f"an argument is a {type(value).__name__}, which has no TorchScript source")


def _reads(node: Node, source: str) -> Iterator[str]:
    """TorchScript expressions that read each tensor below `node` from `source`."""
    if isinstance(node, TensorNode):
        yield source
    elif isinstance(node, ContainerNode):
        indexed = issubclass(node.type, Mapping | list | tuple)
        # Read the fields of a named tuple by index: the parser accepts only ASCII names.
        keys = range(len(node.keys)) if hasattr(node.type, "_fields") else node.keys
        for key, child in zip(keys, node.children, strict=True):
            yield from _reads(child, f"{source}[{key!r}]" if indexed else f"{source}.{key}")
