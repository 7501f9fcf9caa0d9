"""TorchScript: a file that `torch.jit.load` and libtorch run without the model's source.

The model is traced through the adapter if the trace is right at every call, otherwise scripted. The module that
`torch.export` captures isn't traced: that trace would have the batch size baked in.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from exporters.base import Adapter, Artifact, Exporter, ExportRequest, Limit, LoadedArtifact, move_to, parameter_names
from exporters.errors import RouteRefused, WrongFile
from exporters.evidence import Evidence, gather
from exporters.exported_program import Condition
from exporters.isolation import refusing, silent, torchscript_allowed, undisturbed
from exporters.metadata import extra_files, read_extra_file, write_archive
from exporters.proof import prove_file
from exporters.routes import Route, first_right
from exporters.trace_conditions import traced_with_conditions
from optimize_export.structure import ContainerNode, Node, TensorNode

# torch.jit.save aligns every record to this many bytes, so that weights can be memory-mapped.
_ALIGNMENT = 64

_IDENTITY = "model/.data/serialization_id"
# The constants of a class in the archive's source. torch takes them from a set, in the order of the process's hashes.
_CONSTANTS = re.compile(rb"(?:^  \w+ : Final\[.*\n){2,}", re.MULTILINE)

# torch writes non-ASCII names of classes, files and attributes but can't read them: its parser accepts only ASCII
# identifiers, and it escapes the bytes of an attribute's name as signed numbers, `"\\0)+"` for the byte 0xc3.

# A text in double quotes, or non-ASCII letters outside any text.
_TEXT_OR_LETTERS = re.compile(rb'"(?:\\.|[^"\\])*"|[\x80-\xff]+', re.DOTALL)
_LETTERS = re.compile(rb"[\x80-\xff]+")
# An escaped byte has three octal digits. The digits of a negative number run from "0" down to ")".
_ESCAPE = re.compile(rb"\\([)-7]{3}|.)", re.DOTALL)
# The opcode that names a class in a pickle. The classes of a TorchScript module are below `__torch__`.
_CLASS = re.compile(rb"c__torch__\.[^\n]*\n[^\n]*\n")


class TorchScriptExporter(Exporter):
    """The exporter to `model.torchscript.pt`."""

    name: ClassVar[str] = "torchscript"
    file_name: ClassVar[str] = "model.torchscript.pt"

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        evidence = gather(request)
        limits: list[Limit] = []

        def by_trace(folder: Path) -> tuple[Path, ...]:
            module, conditions, size_read = traced_with_conditions(evidence)
            try:
                return self._write_proven(module, evidence, folder, conditions, limits)
            except WrongFile as refusal:
                if not (evidence.open_dims and size_read):
                    raise
                size = refusal.size or evidence.sizes[0].name
                raise WrongFile(f"{refusal}; {size_read}", refusal.inputs, size=size) from refusal

        def by_script(folder: Path) -> tuple[Path, ...]:
            limits.clear()
            return self._write_proven(script(evidence.adapter), evidence, folder)

        routes = (Route("trace", by_trace), Route("script", by_script))

        def known(artifact: Artifact) -> Artifact:
            return replace(artifact, limits=tuple(limits))

        return first_right(self, request, evidence, routes, directory, known)

    @staticmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        with torchscript_allowed():
            module = torch.jit.load(str(path), map_location=device)
        return _LoadedTorchScript(module.eval(), device)

    @staticmethod
    def frozen(path: Path, device: str) -> LoadedArtifact:
        """Load the file, freeze it and optimize it for this machine, as torch.jit.optimize_for_inference does.

        The result isn't written to a file, because it holds weights in the layout of this machine's library.
        """
        with torchscript_allowed(), torch.no_grad():
            module = torch.jit.load(str(path), map_location=device).eval()
            return _LoadedTorchScript(torch.jit.optimize_for_inference(torch.jit.freeze(module)), device)

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        return read_extra_file(path)

    def _write_proven(
        self,
        module: torch.jit.ScriptModule,
        evidence: Evidence,
        folder: Path,
        conditions: Sequence[Condition] = (),
        limits: list[Limit] | None = None,
    ) -> tuple[Path, ...]:
        path = folder / self.file_name
        save(with_input_checks(module, evidence), path, extra_files(evidence.metadata))
        with refusing("the file can't be loaded"):
            loaded = self.load(path, str(evidence.device))
        prove_file(evidence, loaded, [path], conditions, limits)
        return (path,)


def script(adapter: Adapter) -> torch.jit.ScriptModule:
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
    """Write `value` as TorchScript source; RouteRefused if it has none."""
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


def save(module: torch.jit.ScriptModule, path: Path, extra: dict[str, str]) -> None:
    """Write the archive, with extra files by name: the same bytes for the same model, without traces of this machine.

    Two kinds of records are left out. Debug records hold paths and source lines of this machine; the inputs of the
    trace are the user's data.

    Raises:
        OSError: the file can't be written, for example because the disk is full.
    """
    raw = path.with_suffix(".raw")
    weights = sum(tensor.nbytes for tensor in module.state_dict().values())
    with refusing("the module can't be saved"), torchscript_allowed(), silent():
        write_archive(raw, weights, partial(torch.jit.save, module, _extra_files=extra))
    _copy_without_traces(raw, path)
    raw.unlink()


def _copy_without_traces(source: Path, target: Path) -> None:
    """Copy a TorchScript archive record by record, into a top folder whose name doesn't depend on the file names."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as copy:
        names = ((record.filename.partition("/")[2], record) for record in archive.infolist())
        kept = {
            _LETTERS.sub(_spelled, f"model/{name}".encode()).decode(): record
            for name, record in names
            if not (name.endswith(".debug_pkl") or name.startswith("traced_inputs"))
        }
        texts = {
            name: _readable(name, archive.read(record))
            for name, record in kept.items()
            if name.endswith((".py", ".pkl"))
        }
        checksums = [
            (name, zlib.crc32(texts[name]) if name in texts else record.CRC)
            for name, record in kept.items()
            if name != _IDENTITY
        ]
        # torch's own id also depends on paths of this machine.
        digits = int(hashlib.sha256(repr(checksums).encode()).hexdigest(), 16) % 10**40
        texts[_IDENTITY] = f"{digits:040}".encode()
        for name, record in kept.items():
            entry = zipfile.ZipInfo(name)
            entry.file_size = record.file_size
            entry.extra = _padding(copy.start_dir, name)
            if name in texts:
                copy.writestr(entry, texts[name])
                continue
            with archive.open(record) as reader, copy.open(entry, "w") as writer:
                while chunk := reader.read(1 << 20):
                    writer.write(chunk)


def _padding(offset: int, name: str) -> bytes:
    """An extra field for the local header that aligns the start of the record's data."""
    header = 30 + len(name.encode())
    size = -(offset + header + 4) % _ALIGNMENT
    return b"FB" + size.to_bytes(2, "little") + b"\0" * size


def _readable(name: str, content: bytes) -> bytes:
    """The content of a record (source or pickled attributes), readable for torch; attributes keep their names.

    In source, the constants are in alphabetical order.
    """
    if not name.endswith(".py"):
        return _CLASS.sub(lambda found: _LETTERS.sub(_spelled, found[0]), content)
    content = _TEXT_OR_LETTERS.sub(
        lambda found: _ESCAPE.sub(_octal, found[0]) if found[0][:1] == b'"' else _spelled(found), content
    )
    return _CONSTANTS.sub(lambda found: b"".join(sorted(found[0].splitlines(keepends=True))), content)


def _spelled(letters: re.Match[bytes]) -> bytes:
    """Letters in ASCII, with `_e9_` for an é."""
    return "".join(f"_{ord(letter):x}_" for letter in letters[0].decode()).encode()


def _octal(escape: re.Match[bytes]) -> bytes:
    if len(escape[1]) < 3:
        return escape[0]
    high, middle, low = (digit - ord("0") for digit in escape[1])
    return b"\\%03o" % (64 * high + 8 * middle + low & 0xFF)


class _LoadedTorchScript:
    placement: dict[str, int] | None = None

    def __init__(self, module: torch.jit.ScriptModule, device: str) -> None:
        # Only a call of the module runs its hooks; the outermost module of our own files has none.
        self._forward = module if module._forward_pre_hooks or module._forward_hooks else module.forward
        self.device = device
        self._target = torch.device(device)
        # The precision is that of torch's global settings.
        self.settings: dict[str, str] = {}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            outputs = self._forward(*move_to(tensors, self._target))
        return outputs if isinstance(outputs, tuple) else (outputs,)
