"""`--inputs` and `--calibration`: calls of the model from files, one call per file.

A file has tensors, or an image or texts, which are preprocessed as in the library of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile, is_zipfile

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from exporters.base import named_inputs
from exporters.errors import StructureError
from optimize_export.errors import LoadError
from optimize_export.wording import listed, quote
from optimizer.command.early_checks import SUFFIXES
from optimizer.command.errors import errors_of_user_code
from optimizer.model import Call, leaves_of, rebuild


def read_calls(
    paths: Sequence[Path], model: nn.Module, own: Call | None, preprocessing: Preprocessing | None = None
) -> tuple[Call, ...]:
    """Read one call per file.

    The tensors have the names of forward's arguments, or numbers (0, 1, …) for positional arguments.

    Args:
        own: the call in the user's file, if any. Its arguments without tensors (`use_cache=False`) are kept.
        preprocessing: converts images or texts; None if the model's isn't known.
    """
    named = [(path.name, _tensors_in(path, preprocessing)) for path in paths]
    first, expected = named[0]
    for name, tensors in named[1:]:
        if tensors.keys() != expected.keys():
            raise LoadError(
                f"{name} contains {listed(sorted(tensors))}, but {first} contains {listed(sorted(expected))}: each "
                "file is one call, with the same arguments."
            )
    places = {} if own is None else _names_in_files(model, own)
    arguments = {parameter.name for parameter in _parameters(model)}
    if own is not None and expected.keys() == set(places.values()) and not arguments.issuperset(expected):
        return tuple(_filled(name, tensors, own, places) for name, tensors in named)
    constants = {} if own is None else _constants_of(model, own)
    return tuple(_call(name, tensors, model, constants) for name, tensors in named)


def _names_in_files(model: nn.Module, own: Call) -> dict[int, str]:
    """The name that exported files give to each tensor of a call, such as batch_image, by the tensor's id."""
    try:
        names = {id(tensor): name for name, tensor in named_inputs(model, own.args, own.kwargs).items()}
    except StructureError:
        return {}
    return names if len(names) == len(leaves_of((own.args, own.kwargs)).tensors()) else {}


def _filled(file: str, tensors: Mapping[str, torch.Tensor], own: Call, places: Mapping[int, str]) -> Call:
    """The user's own call with the tensors of a file in their places."""
    args, kwargs = rebuild((own.args, own.kwargs), lambda tensor: tensors[places[id(tensor)]])
    return Call(args, kwargs, file)


def _tensors_in(path: Path, preprocessing: Preprocessing | None) -> dict[str, torch.Tensor]:
    if (content := kind_of(path)) is not None:
        return preprocessed(path, content, preprocessing)
    kind = "npz" if path.suffix.lower() == ".npz" else "safetensors"
    if kind == "npz" and path.is_file() and not is_zipfile(path):
        raise LoadError(f"The inputs {path.name} aren't a .npz file: write it with numpy.savez.")
    try:
        if kind == "npz":
            with numpy.load(path, allow_pickle=False) as arrays:
                tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        else:
            tensors = load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError, BadZipFile) as error:
        raise LoadError(f"The inputs {path.name} couldn't be read as {kind}: {quote(error)}.") from error
    if not tensors:
        raise LoadError(f"The inputs {path.name} contain no tensor.")
    return tensors


def _constants_of(model: nn.Module, call: Call) -> dict[str, Any]:
    """The arguments without tensors, by name; positional arguments that have no name are left out."""
    positional = zip(_parameters(model), call.args, strict=False)
    arguments = {**{p.name: value for p, value in positional if p.kind is p.POSITIONAL_OR_KEYWORD}, **call.kwargs}
    return {name: value for name, value in arguments.items() if not leaves_of(value).tensors()}


def _call(
    file: str,
    tensors: Mapping[str, torch.Tensor],
    model: nn.Module,
    constants: Mapping[str, Any],
) -> Call:
    count = sum(name.isdecimal() for name in tensors)
    numbers = [str(number) for number in range(count)]
    if absent := [number for number in numbers if number not in tensors]:
        raise LoadError(
            f"The inputs {file} lack the positional argument {absent[0]}: number them from 0, without a gap."
        )
    args = tuple(tensors[number] for number in numbers)
    parameters = _parameters(model)
    order = [parameter.name for parameter in parameters]
    by_number = {p.name for p in parameters[:count] if p.kind is p.POSITIONAL_OR_KEYWORD}
    given = {name: value for name, value in constants.items() if name not in by_number}
    given |= {name: tensor for name, tensor in tensors.items() if name not in numbers}
    # The first tensor with rows determines the batch size, and a file may not keep the order of forward's arguments.
    names = sorted(given, key=lambda name: (order.index(name) if name in order else len(order), name))
    call = Call(args, {name: given[name] for name in names}, file)
    if why := misfit(model, call):
        raise LoadError(f"The inputs {file} don't fit forward of {type(model).__name__}: {why}.")
    return call


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    signature = signature_of(model.forward)
    return [] if signature is None else list(signature.parameters.values())


def misfit(model: nn.Module, call: Call) -> str | None:
    """Say why the arguments don't bind to forward, and name its parameters; None if they do, or if it has no signature."""
    signature = signature_of(model.forward)
    try:
        if signature is not None:
            signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        names = [str(parameter).partition(":")[0] for parameter in _parameters(model)]
        given = f"{len(call.args)} positional" + (f" and {listed(list(call.kwargs))}" if call.kwargs else "")
        return f"{error}; forward takes ({', '.join(names)}), but got {given}"
    return None


# Images and text files -----------------------------------------------------------------------------------------------

Kind = Literal["image", "text"]


@dataclass(frozen=True)
class Preprocessing:
    """Converts an image or texts to the tensors of a call, as the model's library does."""

    label: str
    """The model, for messages."""
    kind: Kind
    convert: Callable[[Any], dict[str, torch.Tensor]]
    """Takes a PIL image in RGB, or a list of texts; returns tensors by the names of forward's arguments, or by their
    positions ("0", "1", …)."""


def kind_of(path: Path) -> Kind | None:
    """The kind of a file by its suffix; None for files of tensors and others."""
    kinds: tuple[Kind, ...] = ("image", "text")
    return next((kind for kind in kinds if path.suffix.lower() in SUFFIXES[kind]), None)


def preprocessed(path: Path, kind: Kind, preprocessing: Preprocessing | None) -> dict[str, torch.Tensor]:
    """Read an image or a text file, and convert it to tensors."""
    described = {"image": "an image", "text": "a text file"}
    if preprocessing is None:
        raise LoadError(
            f"{path.name} is {described[kind]}, and the model's preprocessing of it isn't known: save the tensors of a "
            "call in a .safetensors file, named after forward's arguments."
        )
    if preprocessing.kind != kind:
        raise LoadError(
            f"{path.name} is {described[kind]}, but {preprocessing.label} takes {described[preprocessing.kind]} "
            f"({' '.join(SUFFIXES[preprocessing.kind])}) or the tensors of a call (.safetensors .npz)."
        )
    content = _image_in(path) if kind == "image" else _lines_of(path)
    with errors_of_user_code(f"{path.name} couldn't be preprocessed for {preprocessing.label}", Path.cwd()):
        return preprocessing.convert(content)


def _image_in(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise LoadError(f"Pillow, which reads {path.name}, isn't installed: pip install pillow.") from error
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise LoadError(f"The image {path.name} couldn't be read: {quote(error)}.") from error


def _lines_of(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise LoadError(f"The text file {path.name} couldn't be read as UTF-8: {quote(error)}.") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise LoadError(f"The text file {path.name} is empty: write one text per line.")
    return texts
