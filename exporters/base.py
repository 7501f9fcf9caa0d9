"""Shared parts of all exporters: the adapter that gives any model a fixed flat signature, the request, the artifact."""

from __future__ import annotations

import inspect
import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from exporters.errors import ExporterError, RouteRefused, StructureError
from exporters.isolation import silent, undisturbed
from exporters.places import FileValues, Program
from optimize_export.structure import ContainerNode, Key, Structure, kind_without_strides, unique
from optimize_export.wording import a_type, dtype_name

T = TypeVar("T")


class Adapter(nn.Module):
    """A model with a fixed number of positional input tensors and a flat tuple of output tensors.

    A single output tensor is returned as such. Arguments and outputs may be any tree of dicts, lists, tuples,
    dataclasses and registered pytrees. Outputs may also contain objects with tensor attributes (a key-value cache). All
    non-tensors are constants of the file. The model is run once to learn the structure of its outputs, unless `outputs`
    is passed.

    Raises:
        StructureError: an argument or output isn't a tree of tensors and constants; the outputs contain no tensor; the
            model holds a sparse, nested or mkldnn tensor; the names passed are invalid, duplicates or the wrong number.
    """

    # One name per tensor, from the signature of the model's forward (`past_key_values_0_1`), and from the keys of the
    # output (`logits`), or else `output`, `output_0`, …
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
            # A parameter or layer that the model keeps in a plain list. Tracers only see registered ones.
            name = f"unregistered_{index}"
            self.add_module(name, stray) if isinstance(stray, nn.Module) else self.register_parameter(name, stray)
        for place, tensor in _tensors(self):
            if kind := kind_without_strides(tensor):
                raise StructureError(
                    f"The model contains a {kind} tensor ({place.removeprefix('model.')}), which exported files "
                    "can't represent; use a dense one."
                )
        # Set the flag instead of calling train(), which would also switch the model. The old ONNX exporter reads the
        # flag of the outermost module.
        self.training = model.training
        bound = _bind(model, args, kwargs or {})
        self._positional = len(args)
        # The structures of the arguments (by name) and of the output.
        self.inputs = Structure(bound, side="argument")
        if outputs is None:
            with undisturbed(self), silent():
                outputs = Structure(self._call(clones(self.inputs.flatten(bound))), side="output")
        self.outputs = outputs
        if not self.outputs.paths:
            raise StructureError("The model's output contains no tensor, so a file would compute nothing.")
        self.input_names = _input_names(self.inputs, input_names)
        own = _output_names(self.outputs.paths, self.input_names)
        self.output_names = own if output_names is None else _given("output", output_names, own)
        if both := sorted(set(self.input_names) & set(self.output_names)):
            raise StructureError(f"`{both[0]}` names an input and an output; each tensor of a file needs its own name.")
        self.__class__ = _with_signature(self.input_names)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        flat = self.outputs.flatten(self._call(tensors), constants=False)
        return flat[0] if len(flat) == 1 else flat

    def flatten_inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The tensors in a call's arguments, in the order of `input_names`; StructureError if its structure differs."""
        return self.inputs.flatten(_bind(self.model, args, kwargs or {}))

    def flatten_outputs(self, outputs: Any) -> tuple[torch.Tensor, ...]:
        """The tensors in the model's return value, in the order of `output_names`; StructureError if it differs."""
        return self.outputs.flatten(outputs)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the model on copies of flat inputs, since a model may write to them; return the flat outputs."""
        return self.outputs.flatten(self._call(clones(tensors)))

    @property
    def input_structure(self) -> Any:
        """The arguments by name as JSON, with input names in place of tensors."""
        return self.inputs.describe(self.input_names)

    @property
    def positional_names(self) -> list[str]:
        """The names of the arguments that a call can pass by position, in order; also those that no call passed."""
        given = list(self.inputs.root.keys)[: self._positional] if isinstance(self.inputs.root, ContainerNode) else []
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in _forward_parameters(self.model) if parameter.kind in by_position]
        return [*map(str, given), *names[self._positional :]]

    @property
    def output_structure(self) -> Any:
        """The model's output as JSON, with output names in place of tensors."""
        return self.outputs.describe(self.output_names)

    def call_arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's positional and keyword arguments for flat inputs: tensors or placeholders for them."""
        bound = self.inputs.rebuild(tensors)
        names = list(bound)
        positional = tuple(bound[name] for name in names[: self._positional])
        return positional, {name: bound[name] for name in names[self._positional :]}

    def _call(self, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self.call_arguments(tensors)
        return self.model(*args, **kwargs)


def named_inputs(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    input_names: Sequence[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a call, by the input names that an adapter gives them; raises as it, but doesn't run the model."""
    bound = _bind(model, args, kwargs or {})
    structure = Structure(bound, side="argument")
    return dict(zip(_input_names(structure, input_names), structure.flatten(bound), strict=True))


def clones(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Detached copies that share no memory with the originals or with each other."""
    return tuple(tensor.detach().clone() for tensor in tensors)


class Captures:
    """The captures of one model by torch.export, each made when it is first needed and shared by all formats."""

    def __init__(self, adapter: Adapter) -> None:
        # It wraps the copy of the model that is captured. Formats trace and run other copies.
        self.adapter = adapter
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make` at the first call with this key, which every later call returns too.

        Raises:
            RouteRefused: `make` raised it in this call or an earlier one.
        """
        if key not in self._made:
            try:
                self._made[key] = make()
            except RouteRefused as refusal:
                # Without its traceback, whose frames hold a capture that was given up.
                self._made[key] = RouteRefused(str(refusal), size=refusal.size)
                raise
        made = self._made[key]
        if isinstance(made, RouteRefused):
            raise RouteRefused(str(made), size=made.size)
        return made

    def known(self, key: Hashable) -> Any:
        """The earlier result with this key; None if there is none, or if `make` raised."""
        made = self._made.get(key)
        return None if isinstance(made, RouteRefused) else made


@dataclass(frozen=True)
class ExportRequest:
    """A model to export, with example calls and options."""

    # Any module, in the mode (training or eval) in which to export it.
    model: nn.Module
    # (args, kwargs) of several calls with the same structure. The first one is traced, and the file must be right for all
    # of them. With a dynamic batch, the first call has at least two rows, since every tracer specializes a size of 1. The
    # other calls have other batch sizes. With several open sizes, each one changes by itself in at least one call, better
    # in two; the others keep their size of the first call. In further calls all may grow together, by equal steps.
    calls: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]
    # Whether to leave dim 0 open for every input tensor whose dim 0 differs between the calls.
    dynamic_batch: bool = True
    # Open dims by input name, each with the name of its size: {"ids": {0: "batch", 1: "time"}}. Dims with the same name
    # have the same size. For the inputs listed here, this replaces `dynamic_batch`.
    open_dims: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    # Names that replace the derived ones, one per tensor.
    input_names: tuple[str, ...] | None = None
    output_names: tuple[str, ...] | None = None
    # The version of the ONNX operator set, one of `exporters.onnx.opsets()`; None for the exporter's default.
    opset: int | None = None
    # The half precision that the model computes in, whatever the dtypes of its outputs; None if there is none.
    computes_in: torch.dtype | None = None
    # The user's metadata for the file, in addition to the standard entries (`exporters.metadata`).
    metadata: Mapping[str, str] = field(default_factory=dict)
    # The model's flat outputs at each call, if the caller has them; None makes the exporter run the model. They are
    # assumed to be the same in every run.
    outputs: tuple[tuple[torch.Tensor, ...], ...] | None = None
    # The dims of outputs, each as output index and dim, whose size depends on input values as far as known.
    varying: frozenset[tuple[int, int]] = frozenset()
    # Outputs whose order or choice the model leaves to equal scores, by index: the share of elements that other choices may
    # change, or None where only the order is free. Only `proof` compares their values by place.
    undecided: Mapping[int, float | None] = field(default_factory=dict)
    # The structure of the model's output, if the caller has it.
    output_structure: Structure | None = None
    # Compares the artifact loaded from these files with the model, at these calls and others, and returns whether it is
    # right. None makes the exporter compare all calls itself.
    proof: Callable[[LoadedArtifact, Sequence[Path]], bool] | None = None
    # The captures that the formats of one export share: of `model` or of a copy of it, at the same calls. None makes the
    # exporter capture for itself.
    captures: Captures | None = None
    # Locates the first difference between a refused file and the model at the given inputs of the file, as a clause:
    # "first differs at …"; "" if unknown. It is called if every route was refused.
    place_of: Callable[[Artifact, tuple[torch.Tensor, ...]], str] | None = None


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a file."""

    name: str
    # As in "float32".
    dtype: str
    # A number per fixed dim and a name ("batch") per open dim.
    shape: tuple[int | str, ...]


class LoadedArtifact(Protocol):
    """A file ready to run."""

    @property
    def device(self) -> str:
        """The file's device, "cpu" or "cuda": it runs there and returns its outputs there."""

    @property
    def placement(self) -> dict[str, int] | None:
        """The number of operators by provider, for formats that choose a device per operator; else None."""

    @property
    def settings(self) -> dict[str, str]:
        """Runtime settings that affect precision, as the runtime reports them: {"onnxruntime_tf32": "off"}."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the file: inputs and outputs are flat, in the file's order; inputs may be on any device."""


def outputs_of(loaded: LoadedArtifact, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run a file.

    Raises:
        ExporterError: it returns no tuple; a tensor alone would be read as its rows.
    """
    outputs: object = loaded(*tensors)
    if not isinstance(outputs, tuple | list):
        raise ExporterError(
            f"{type(loaded).__name__} returns {a_type(outputs)}: what `load` of an exporter returns must return a tuple of "
            "tensors, also for one output."
        )
    return tuple(outputs)


@dataclass(frozen=True)
class Limit:
    """A condition on sizes beyond which a file was not compared, because the inputs would be too large to build."""

    # A relation of sizes by name, such as `4096*batch <= 2147483648`.
    condition: str
    # The name of a size, and its largest value where the others are as in the example inputs.
    size: str
    largest: int


@dataclass(frozen=True)
class Artifact:
    """An exported file."""

    # The name of the exporter.
    format: str
    # The file to load, and all files: `path` first, then external data if there is any.
    path: Path
    files: tuple[Path, ...]
    # How it was made: "trace", "script", "dynamo", "dynamo-unoptimized", "torchscript", "export", "export-strict",
    # "aotinductor", "aotinductor-strict".
    route: str
    # (route, reason) of the routes that were tried before.
    refused: tuple[tuple[str, str], ...]
    # The file's signature.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # Sentences about checks that weren't possible, and about the machine that the file was made for.
    notes: tuple[str, ...] = ()
    # The file is right only where all of these conditions hold.
    limits: tuple[Limit, ...] = field(default=(), kw_only=True)
    # A clause for each route that was refused because the runtime crashed on its file.
    crashes: tuple[str, ...] = field(default=(), kw_only=True)
    # The exporter's `load`.
    loader: Callable[[Path, str], LoadedArtifact] = field(kw_only=True, repr=False, compare=False)
    # The version of the ONNX operator set of the file; None for other formats.
    opset: int | None = field(default=None, kw_only=True)
    metadata: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    # Like `loader`, but without the runtime's graph optimizations; None where the runtime has none.
    unoptimized: Callable[[Path, str], LoadedArtifact] | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )
    # The program that the file was made from, where there is one; not stored in the file.
    program: Program | None = field(default=None, kw_only=True, repr=False, compare=False)
    # Loads the file so that it returns the values with these names, or all for None; None where unsupported.
    values: Callable[[Path, str, Collection[str] | None], FileValues] | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )

    def load(self, device: str = "cpu") -> LoadedArtifact:
        """Load the artifact on "cpu" or "cuda"."""
        return self.loader(self.path, device)


class Exporter(ABC):
    """One file format."""

    # The user's name for the format, and the name of the file inside a bundle.
    name: ClassVar[str]
    file_name: ClassVar[str]

    @abstractmethod
    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        """Write the model into `directory`, which must exist, and return the artifact.

        Exceptions that the model raises in its own run pass through.

        Raises:
            ExportError: no route produces a right file; nothing is left in the directory.
            StructureError: the calls don't match each other, or contain something that no file can hold.
            MetadataError: a file can't hold the metadata.
            OSError: the directory isn't writable.
        """

    @staticmethod
    @abstractmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        """Load the file at `path` on "cpu" or "cuda".

        Raises:
            ProviderFallback: the file would run on another device than the requested one.
        """

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        """Read the metadata in the file at `path` without running the file; empty where the format can't hold metadata.

        Raises:
            MetadataError: the metadata can't be read.
        """
        return {}


def _input_names(structure: Structure, given: Sequence[str] | None) -> tuple[str, ...]:
    """Identifiers for arguments: `mask`, `past_key_values_0_1`."""
    own = unique(_identifier(path) for path in structure.paths)
    return own if given is None else _given("input", given, own)


def _output_names(paths: Iterable[tuple[Key, ...]], taken: Sequence[str]) -> tuple[str, ...]:
    """Identifiers for outputs: `logits`, `hidden_states_1`, `output`, `output_0`; never one of `taken`."""
    names = []
    for path in paths:
        unnamed = not path or isinstance(path[0], int)
        name = _identifier(("output", *path) if unnamed else path)
        names.append(f"{name}_out" if name in taken else name)
    return unique(names, taken)


def _given(side: str, names: Sequence[str], own: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) != len(own):
        raise StructureError(f"{len(names)} {side} names were given for {len(own)} {side} tensors ({', '.join(own)}).")
    if bad := [name for name in names if not isinstance(name, str) or not name.strip() or not name.isprintable()]:
        raise StructureError(f"{bad[0]!r} is not a valid name for an {side}.")
    if len(set(names)) != len(names):
        raise StructureError(f"The {side} names {', '.join(names)} aren't unique.")
    return tuple(names)


def _bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the model's signature, in the order in which they were passed.

    Arguments that can't be passed by name get names that no other argument has.

    Raises:
        StructureError: an argument is passed both by position and by name.
    """
    parameters = _forward_parameters(model)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: len(args)]
    if twice := [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in kwargs]:
        raise StructureError(f"argument `{twice[0]}` is given twice, by position and by name.")
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    further = (f"{rest}_{number}" for number in range(len(args) - len(named)))
    names = unique((*(p.name for p in named), *further), kwargs)
    return {**dict(zip(names, args, strict=True)), **kwargs}


def _forward_parameters(model: nn.Module) -> list[inspect.Parameter]:
    if isinstance(model, torch.jit.ScriptModule):
        scripted: Any = model.forward
        arguments = scripted.schema.arguments[1:]
        return [inspect.Parameter(argument.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments]
    # Prefer the forward of the class: one set on the instance often takes only *args.
    of_class = type(model).forward is not nn.Module.forward
    try:
        parameters = list(inspect.signature(type(model).forward if of_class else model.forward).parameters.values())
    except (TypeError, ValueError):  # forward isn't a Python function, so the names are unknown
        return []
    return parameters[1:] if of_class else parameters


def _identifier(path: tuple[Key, ...]) -> str:
    """The path to a tensor as a Python identifier."""
    name = re.sub(r"\W", "_", "_".join(map(str, path)), flags=re.ASCII) or "_"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def _with_signature(names: tuple[str, ...]) -> type[Adapter]:
    """A subclass of Adapter whose forward has named parameters: exporters and tracers use these names."""

    def forward(self: Adapter, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return Adapter.forward(self, *tensors)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *captured_names(names))]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type("Adapter", (Adapter,), {"forward": forward, "__module__": __name__})


def parameter_names(names: Sequence[str]) -> list[str]:
    """Unique, valid parameter names for the inputs, none of them `self`."""
    parameters: list[str] = []
    for name in names:
        name = _identifier((name,))
        while name == "self" or name in parameters:
            name = f"{name}_"
        parameters.append(name)
    return parameters


def captured_names(names: Sequence[str]) -> list[str]:
    """The names of the inputs in programs captured by torch.export, and in their guards.

    torch names the inputs of a program after the parameters in lower case, but not those in guards.
    """
    return parameter_names([_identifier((name,)).lower() for name in names])


_MODULE_STATE = frozenset(vars(nn.Module()))


def _strays(model: nn.Module) -> Iterator[nn.Module | nn.Parameter]:
    """Parameters and modules that `model` holds in plain lists, tuples or dicts, which `parameters()` doesn't find."""
    known = {id(module) for module in model.modules()} | {id(parameter) for parameter in model.parameters()}
    for module in list(model.modules()):
        for name, value in vars(module).items():
            if name in _MODULE_STATE or not isinstance(value, list | tuple | dict):
                continue
            for held in pytree.tree_leaves(value):
                if isinstance(held, nn.Module | nn.Parameter) and id(held) not in known:
                    known.add(id(held))
                    yield held


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in the parameters, buffers and plain attributes of the modules, with its path."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            leaves = pytree.tree_leaves(value) if name not in _MODULE_STATE else ()
            yield from ((f"{path}.{name}", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def move_to(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tensors on the device. Those that are there already skip `to`, which takes a microsecond even then."""
    return [each if each.device == device else each.to(device) for each in tensors]


def refuse_unfit(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if the number, dtype or shape of inputs is wrong; dims with one name must have one size."""
    if len(tensors) != len(specs):
        raise ValueError(f"The file takes {len(specs)} tensors, not {len(tensors)}.")
    sizes: dict[str, int] = {}
    for spec, tensor in zip(specs, tensors, strict=True):
        dtype, shape = dtype_name(tensor.dtype), list(tensor.shape)
        fits = len(shape) == len(spec.shape) and all(
            size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
            for wanted, size in zip(spec.shape, shape, strict=True)
        )
        if dtype != spec.dtype or not fits:
            wanted = ", ".join(str(sizes.get(size, size) if isinstance(size, str) else size) for size in spec.shape)
            raise ValueError(f"Input `{spec.name}` of the file is {spec.dtype}[{wanted}], but got {dtype}{shape}.")
