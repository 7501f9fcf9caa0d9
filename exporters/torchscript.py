"""TorchScript: a file that `torch.jit.load` and libtorch run without the model's source.

The model is traced through the adapter if the trace is right at every call, otherwise scripted. `torch.export` isn't
used: its module would produce a trace with the batch size baked in.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from exporters.base import Adapter, Artifact, Exporter, ExportRequest, LoadedArtifact, parameter_names
from exporters.decisions import Watch, traced
from exporters.errors import RouteRefused, WrongFile
from exporters.file_values import FileParts
from exporters.isolation import silent, undisturbed
from exporters.metadata import extra_files, read_extra_file
from exporters.proof import Evidence, Route, first_right, gather, refusing
from exporters.structure import ContainerNode, Node, TensorNode
from exporters.torchscript_deprecation import torchscript_allowed
from exporters.torchscript_names import ascii_name, readable
from exporters.trace_conditions import conditions_of_trace, prove_file
from exporters.writing import write_archive

# torch.jit.save aligns every record to this many bytes, so that weights can be memory-mapped.
_ALIGNMENT = 64

_IDENTITY = "model/.data/serialization_id"


class TorchScriptExporter(Exporter):
    """The exporter to `model.torchscript.pt`."""

    name: ClassVar[str] = "torchscript"
    file_name: ClassVar[str] = "model.torchscript.pt"

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        evidence = gather(request)

        def by_trace(folder: Path) -> tuple[Path, ...]:
            module, watch = traced(evidence.adapter, evidence.inputs[0])
            try:
                return self._proven(module, evidence, folder, watch)
            except WrongFile as refusal:
                if not (evidence.open_dims and watch.sizes):
                    raise
                place = f"the model reads a size in Python at {watch.sizes[0]}, which the trace freezes"
                raise WrongFile(f"{refusal}; {place}", refusal.inputs, refusal.output, size=evidence.size) from refusal

        def scripted(folder: Path) -> tuple[Path, ...]:
            with undisturbed(evidence.adapter), refusing(), silent(), torchscript_allowed():
                module = _script(evidence.adapter)
            return self._proven(module, evidence, folder)

        routes = (Route("trace", by_trace), Route("script", scripted))
        return first_right(
            self, request, evidence, routes, directory, lambda artifact: replace(artifact, parts=self.parts)
        )

    @staticmethod
    def parts(path: Path, device: str) -> FileParts:
        """Load the file's modules as callables."""
        with torchscript_allowed():
            return _Parts(torch.jit.load(str(path), map_location=device).eval())

    @staticmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        with torchscript_allowed():
            module = torch.jit.load(str(path), map_location=device)
        return _LoadedTorchScript(module.eval(), device)

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        return read_extra_file(path)

    def _proven(
        self, module: torch.jit.ScriptModule, evidence: Evidence, folder: Path, watch: Watch | None = None
    ) -> tuple[Path, ...]:
        conditions = () if watch is None else conditions_of_trace(evidence, watch)
        path = folder / self.file_name
        with refusing(), silent(), torchscript_allowed():
            checked = _with_input_checks(module, evidence)
        _save(checked, path, extra_files(evidence.metadata))
        with refusing("the file can't be loaded"):
            loaded = self.load(path, str(evidence.device))
        prove_file(evidence, loaded, [path], conditions)
        return (path,)


class _LoadedTorchScript:
    placement: dict[str, int] | None = None

    def __init__(self, module: torch.jit.ScriptModule, device: str) -> None:
        self._module = module
        self.device = device
        # The precision is that of torch's global settings.
        self.settings: dict[str, str] = {}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            outputs = self._module(*(tensor.to(self.device) for tensor in tensors))
        return outputs if isinstance(outputs, tuple) else (outputs,)


class _Parts:
    def __init__(self, module: torch.jit.ScriptModule) -> None:
        # The outermost module checks the inputs, its child is the adapter, and the adapter's child is the model.
        self._model = module.model.model
        # Scripting replaces the adapter with a generated class that has another name.
        self._traced = module.model.original_name == Adapter.__name__

    def part(self, path: str, number: int, *, alone: bool) -> Callable[[torch.Tensor], Any] | None:
        """Return the method for one call of a module; None if the file has none that takes a single tensor.

        In a trace, each further call of a module is a separate method (`forward1` is the second call) that takes only
        tensors.
        """
        module = self._model
        for name in path.split(".") if path else ():
            if not hasattr(module, name):
                return None
            module = getattr(module, name)
        method = getattr(module, f"forward{number - 1}" if self._traced and number > 1 else "forward", None)
        if method is None:
            return None
        first, *others = method.schema.arguments[1:] or (None,)
        if first is None or str(first.type) != "Tensor":
            return None
        # A scripted forward has the model's own arguments. Those that aren't passed have the same defaults in both.
        left_out = alone and not self._traced and all(each.has_default_value() for each in others)
        return method if left_out or (self._traced and not others) else None


def _script(adapter: Adapter) -> torch.jit.ScriptModule:
    """Script the model behind a generated forward with flat tensor inputs and outputs, like the adapter's.

    Raises:
        RouteRefused: a module has a forward on the instance, or an argument has no TorchScript source.
    """
    model = adapter.model
    changed = next((name for name, module in model.named_modules() if "forward" in vars(module)), None)
    if changed is not None:
        raise RouteRefused(
            f"{f'module `{changed}`' if changed else 'the model'} has its own forward, but scripting would compile "
            "the one of its class: leave out the pass that replaced it"
        )
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


def _with_input_checks(module: torch.jit.ScriptModule, evidence: Evidence) -> torch.jit.ScriptModule:
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
    scripted: torch.jit.ScriptModule = torch.jit.script(holder)
    scripted.define(forward)
    return scripted


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


def _save(module: torch.jit.ScriptModule, path: Path, extra: dict[str, str]) -> None:
    """Write the archive, with extra files by name.

    Two kinds of records are left out. Debug records hold paths and source lines of this machine; the inputs of the
    trace are the user's data.

    Raises:
        OSError: the file can't be written, for example because the disk is full.
    """
    raw = path.with_suffix(".raw")
    weights = sum(tensor.nbytes for tensor in module.state_dict().values())
    with refusing("the module can't be saved"), torchscript_allowed(), silent():
        write_archive(
            raw,
            weights,
            partial(module.save_to_buffer, _extra_files=extra),
            partial(torch.jit.save, module, _extra_files=extra),
        )
    _copy_without_traces(raw, path)
    raw.unlink()


def _copy_without_traces(source: Path, target: Path) -> None:
    """Copy a TorchScript archive record by record, into a top folder whose name doesn't depend on the file names."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as copy:
        kept = {ascii_name(f"model/{name}"): record for name, record in _without_traces(archive)}
        for name, record in kept.items():
            entry = zipfile.ZipInfo(name)
            entry.file_size = record.file_size
            entry.extra = _padding(copy.start_dir, name)
            if name == _IDENTITY:
                copy.writestr(entry, _identity(kept))
                continue
            if name.endswith((".py", ".pkl")):
                copy.writestr(entry, readable(name, archive.read(record)))
                continue
            with archive.open(record) as reader, copy.open(entry, "w") as writer:
                while chunk := reader.read(1 << 20):
                    writer.write(chunk)


def _without_traces(archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    for record in archive.infolist():
        name = record.filename.partition("/")[2]
        if not (name.endswith(".debug_pkl") or name.startswith("traced_inputs")):
            yield name, record


def _identity(records: Mapping[str, zipfile.ZipInfo]) -> str:
    """The serialization id of an archive: 40 digits, as in torch.

    torch's own id also depends on paths of this machine.
    """
    held = [(name, record.CRC) for name, record in records.items() if name != _IDENTITY]
    return f"{int(hashlib.sha256(repr(held).encode()).hexdigest(), 16) % 10**40:040}"


def _padding(offset: int, name: str) -> bytes:
    """An extra field for the local header that aligns the start of the record's data."""
    header = 30 + len(name.encode())
    size = -(offset + header + 4) % _ALIGNMENT
    return b"FB" + size.to_bytes(2, "little") + b"\0" * size
