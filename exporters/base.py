"""What every exporter shares: the adapter that gives any model a fixed flat signature, the request, the artifact."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from exporters.errors import StructureError
from exporters.isolation import silent, undisturbed
from exporters.steps import FileParts, FileValues, Program
from exporters.structure import Structure, bind, identifier, input_names, kind_without_strides, output_names


class Adapter(nn.Module):
    """A model behind a fixed number of positional tensors and a flat tuple of tensors (a single tensor stays one).

    Arguments and outputs may be any tree of dicts, lists, tuples, dataclasses and registered pytrees, outputs also hold
    objects with tensors among their attributes (a key-value cache). What isn't a tensor in them is a constant of the file.
    The model is run once, to learn the structure of its outputs, where nobody tells it.

    Attributes:
        inputs, outputs: the structures of arguments (by name) and output.
        input_names: one name per tensor, after the signature of the model's forward: `x`, `past_key_values_0_1`.
        output_names: one name per tensor, after the keys of the output: `logits`; else `output`, `output_0`, …

    Raises:
        StructureError: an argument or output is neither a tensor, nor a constant, nor made of such; there is no tensor
            among the outputs; the model holds a sparse, nested or mkldnn tensor; the number of given names is wrong.
    """

    input_names: tuple[str, ...]
    output_names: tuple[str, ...]

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        outputs: Structure | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        for index, stray in enumerate(_strays(model)):
            # A parameter or layer that the model keeps in a plain list: tracers take only what is registered.
            name = f"unregistered_{index}"
            self.add_module(name, stray) if isinstance(stray, nn.Module) else self.register_parameter(name, stray)
        for place, tensor in _tensors(self):
            if kind := kind_without_strides(tensor):
                raise StructureError(
                    f"The model holds a {kind} tensor ({place.removeprefix('model.')}), which files have no place for;"
                    " hold a dense one."
                )
        # Set, not train(): that would switch the model too. The old ONNX exporter reads the flag of the outermost module.
        self.training = model.training
        bound = bind(model, args, kwargs or {})
        self._positional = len(args)
        self.inputs = Structure(bound, side="argument")
        if outputs is None:
            with undisturbed(self), silent():
                outputs = Structure(self._call(clones(self.inputs.flatten(bound))), side="output")
        self.outputs = outputs
        if not self.outputs.paths:
            raise StructureError("The model's output holds no tensor, so there is nothing that a file could compute.")
        self.input_names, self.output_names = self._names(input_names, output_names)
        self.__class__ = _with_signature(self.input_names)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        flat = self.outputs.flatten(self._call(tensors), constants=False)
        return flat[0] if len(flat) == 1 else flat

    def flatten_inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of a call's arguments, in the order of `input_names`.

        Raises:
            StructureError: the arguments have another structure, or other constants, than the example had.
        """
        return self.inputs.flatten(bind(self.model, args, kwargs or {}))

    def flatten_outputs(self, outputs: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of what the model returned, in the order of `output_names`.

        Raises:
            StructureError: the outputs have another structure, or other constants, than those of the example.
        """
        return self.outputs.flatten(outputs)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What the model gives for these inputs, flat; the inputs are copied first, as a model may write to them.

        Raises:
            StructureError: the outputs have another structure, or other constants, than those of the example.
        """
        return self.outputs.flatten(self._call(clones(tensors)))

    @property
    def input_structure(self) -> Any:
        """The arguments by name as JSON, with the name of an input where a tensor stands."""
        return self.inputs.describe(self.input_names)

    @property
    def output_structure(self) -> Any:
        """The model's output as JSON, with the name of an output where a tensor stands."""
        return self.outputs.describe(self.output_names)

    def call_arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model for flat inputs (tensors, or whatever stands for them)."""
        bound = self.inputs.rebuild(tensors)
        names = list(bound)
        positional = tuple(bound[name] for name in names[: self._positional])
        return positional, {name: bound[name] for name in names[self._positional :]}

    def _call(self, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self.call_arguments(tensors)
        return self.model(*args, **kwargs)

    def _names(
        self, inputs: Sequence[str] | None, outputs: Sequence[str] | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        chosen_inputs = _input_names(self.inputs, inputs)
        own_outputs = output_names(self.outputs.paths, chosen_inputs)
        chosen_outputs = own_outputs if outputs is None else _given("output", outputs, own_outputs)
        if both := sorted(set(chosen_inputs) & set(chosen_outputs)):
            raise StructureError(f"`{both[0]}` names an input and an output; each tensor of a file needs its own name.")
        return chosen_inputs, chosen_outputs


def named_inputs(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    input_names: Sequence[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a call by their names in files, as an adapter has them; the model isn't run.

    Raises:
        StructureError: an argument is neither a tensor, nor a constant, nor made of such; the number of given names is wrong.
    """
    bound = bind(model, args, kwargs or {})
    structure = Structure(bound, side="argument")
    return dict(zip(_input_names(structure, input_names), structure.flatten(bound), strict=True))


def clones(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies that share no memory with the originals or with each other, without gradients."""
    return tuple(tensor.detach().clone() for tensor in tensors)


class Proof(Protocol):
    """See `ExportRequest.proof`."""

    def __call__(self, loaded: LoadedArtifact, files: Sequence[Path]) -> bool: ...


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    Attributes:
        model: any module, in the mode it shall be exported in.
        calls: positional and keyword arguments of several calls of one structure. The first is the one that is traced;
            the file must be right for all of them. Where the batch is dynamic the first has two rows or more (a size of
            1 is special to every tracer) and others have other sizes. Of several open sizes each changes by itself in one
            call at least, better in two, while the others are as in the first call; in further calls all may grow together,
            by equal steps.
        dynamic_batch: dim 0 of every input tensor that differs between the calls is left open in the file.
        open_dims: by the name of an input, its open dims with the name of the size of each: {"ids": {0: "batch", 1: "time"}}.
            Dims of one name have one size. For inputs that stand here it holds in the place of `dynamic_batch`.
        input_names, output_names: names in place of the derived ones, one per tensor.
        opset: version of the ONNX operator set, of `exporters.opset.opsets()`; None is the exporter's default. Other formats
            don't read it.
        computes_in: the half precision that the model computes in, whatever the dtypes of its outputs; None for none.
        metadata: what the user has the file say of itself, beside what is written anyway (`exporters.metadata`).
        outputs: what the model gives at each call, flat, where the caller has it; None where the exporter has to run it. An
            output that the model gives otherwise each time isn't known.
        output_structure: the structure of its output, where the caller has it.
        proof: compares what is loaded from these files with the model, at these calls and others; whether it is right.
            None where the exporter has to compare all calls itself.
        place_of: where a file that was refused differs from the model at these inputs of it, a clause: "first differs at …";
            "" where that isn't known. It is asked where every route was refused.
    """

    model: nn.Module
    calls: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]
    dynamic_batch: bool = True
    open_dims: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    input_names: tuple[str, ...] | None = None
    output_names: tuple[str, ...] | None = None
    opset: int | None = None
    computes_in: torch.dtype | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[tuple[torch.Tensor, ...], ...] | None = None
    output_structure: Structure | None = None
    proof: Proof | None = None
    place_of: Callable[[Artifact, tuple[torch.Tensor, ...]], str] | None = None


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a file: `dtype` as in "float32", `shape` with a name ("batch") for each open dim."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class LoadedArtifact(Protocol):
    """A file ready to run.

    Attributes:
        device: "cpu" or "cuda", where it runs and where its outputs are.
        placement: for formats that choose a device per operator, the number of operators by provider; else None.
        settings: what of the runtime decides how precisely it computes, as it tells itself: {"onnxruntime_tf32": "off"}.
    """

    @property
    def device(self) -> str: ...

    @property
    def placement(self) -> dict[str, int] | None: ...

    @property
    def settings(self) -> dict[str, str]: ...

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The file's outputs for its inputs, both flat and in the file's order; inputs may be on any device."""


@dataclass(frozen=True)
class Artifact:
    """An exported file.

    Attributes:
        format: name of the exporter.
        path: the file to load.
        files: all files of the artifact, `path` first, then external data if any.
        route: how it was made: "trace", "script", "dynamo", "dynamo-unoptimized", "torchscript", "export",
            "export-strict", "aotinductor", "aotinductor-strict".
        refused: (route, reason) of the routes that were tried before.
        inputs, outputs: the file's signature.
        notes: sentences about what couldn't be checked, and what the file was made for.
        loader: the exporter's `load`.
        unoptimized: the same where the runtime does nothing to the graph of its own; None where it never does.
        opset: version of the ONNX operator set that the file has; None for other formats.
        metadata: what the file says of itself.
        program: what the file was made from, step by step, where the exporter can tell; it isn't in the file.
        values: makes the file give the named ones of its values, or all for None, where the exporter can.
        parts: makes the modules in the file callable one by one, where it has them.
        source: the program that a file was compiled from which gives no values itself, ready to give all of its own.
    """

    format: str
    path: Path
    files: tuple[Path, ...]
    route: str
    refused: tuple[tuple[str, str], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...] = ()
    loader: Callable[[Path, str], LoadedArtifact] = field(kw_only=True, repr=False, compare=False)
    opset: int | None = field(default=None, kw_only=True)
    metadata: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    unoptimized: Callable[[Path, str], LoadedArtifact] | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )
    program: Program | None = field(default=None, kw_only=True, repr=False, compare=False)
    values: Callable[[Path, str, Collection[str] | None], FileValues] | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )
    parts: Callable[[Path, str], FileParts] | None = field(default=None, kw_only=True, repr=False, compare=False)
    source: Callable[[str], FileValues] | None = field(default=None, kw_only=True, repr=False, compare=False)

    def load(self, device: str = "cpu") -> LoadedArtifact:
        """The artifact, ready to run on "cpu" or "cuda"."""
        return self.loader(self.path, device)


class Exporter(ABC):
    """One format.

    Attributes:
        name: what the user calls the format.
        file_name: name of the file inside a bundle.
    """

    name: ClassVar[str]
    file_name: ClassVar[str]

    @abstractmethod
    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        """Write the model into `directory` (which exists) and return what was written.

        Raises:
            ExportError: no route gives a right file; nothing is left in the directory.
            StructureError: the calls don't fit each other, or hold what no file can.
            MetadataError: the metadata are none that a file can hold.
            OSError: the directory can't be written to.
            Whatever the model itself raises when it is run.
        """

    @staticmethod
    @abstractmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        """The file at `path`, ready to run on "cpu" or "cuda".

        Raises:
            ProviderFallback: the device was asked for and isn't the one that would compute.
        """

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        """What the file at `path` says of itself; nothing of it is run. Empty where the format has no place for it.

        Raises:
            MetadataError: it can't be read.
        """
        return {}


def _input_names(structure: Structure, given: Sequence[str] | None) -> tuple[str, ...]:
    own = input_names(structure.paths)
    return own if given is None else _given("input", given, own)


def _given(side: str, names: Sequence[str], own: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) != len(own):
        raise StructureError(f"{len(names)} {side} names were given for {len(own)} {side} tensors ({', '.join(own)}).")
    if bad := [name for name in names if not isinstance(name, str) or not name.strip() or not name.isprintable()]:
        raise StructureError(f"{bad[0]!r} is no name for an {side}.")
    if len(set(names)) != len(names):
        raise StructureError(f"The {side} names {', '.join(names)} aren't different from each other.")
    return tuple(names)


def _with_signature(names: tuple[str, ...]) -> type[Adapter]:
    """The adapter's class with named parameters, from which exporters and tracers take the names in the file."""

    def forward(self: Adapter, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return Adapter.forward(self, *tensors)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *parameter_names(names))]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type("Adapter", (Adapter,), {"forward": forward, "__module__": __name__})


def parameter_names(names: Sequence[str]) -> list[str]:
    """Names of inputs as different names of parameters beside `self`."""
    parameters: list[str] = []
    for name in map(identifier, names):
        while name == "self" or name in parameters:
            name = f"{name}_"
        parameters.append(name)
    return parameters


def _strays(model: nn.Module) -> Iterator[nn.Module | nn.Parameter]:
    """Parameters and modules that `model` holds in plain lists, tuples or dicts, out of reach of `parameters()`."""
    known = {id(module) for module in model.modules()} | {id(parameter) for parameter in model.parameters()}
    for module in list(model.modules()):
        for name, value in vars(module).items():
            if name.startswith("_") and name in _MODULE_STATE:
                continue
            for stray in _held(value):
                if id(stray) not in known:
                    known.add(id(stray))
                    yield stray


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor among the parameters, buffers and plain attributes of the modules, with its path."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            leaves = pytree.tree_leaves(value) if name not in _MODULE_STATE else ()
            yield from ((f"{path}.{name}", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


_MODULE_STATE = frozenset(vars(nn.Module()))


def _held(value: Any) -> Iterator[nn.Module | nn.Parameter]:
    items: Sequence[Any] = ()
    if isinstance(value, list | tuple):
        items = value
    elif isinstance(value, dict):
        items = tuple(value.values())
    for item in items:
        if isinstance(item, nn.Module | nn.Parameter):
            yield item
        else:
            yield from _held(item)
