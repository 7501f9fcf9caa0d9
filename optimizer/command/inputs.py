"""The example inputs of a call: drawn at random for `--input`, or read from files for `--inputs` and `--calibration`.

A file is one call. It has tensors, or an image or texts, which are preprocessed as in the library of the model.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn
from zipfile import BadZipFile, is_zipfile

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from exporters.base import named_inputs
from exporters.errors import StructureError
from optimize_export.errors import LoadError, UsageError
from optimize_export.wording import dtype_name, listed, quote
from optimizer.command.early_checks import SUFFIXES
from optimizer.command.errors import errors_of_user_code
from optimizer.model import Call, leaves_of, rebuild, signature_of

# Drawn inputs ---------------------------------------------------------------------------------------------------------

_EXAMPLE = "2x3x224x224, float32[2,3,224,224], mask=bool[2,128] or ids=int64[2,128]:0..30000"

_BODY = re.compile(r"(?:(?P<sizes>[0-9]+(?:x[0-9]+)*)|(?P<dtype>\w+)\[(?P<shape>[^\]]*)\])(?::(?P<range>.*))?")
# Short names: f16, fp16, bf16, i64, u8, c64, ...
_SHORT_DTYPE = re.compile(r"(f|fp|bf|i|u|c)(\d+)")
_KINDS = {"f": "float", "fp": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex"}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})", re.IGNORECASE)


@dataclass(frozen=True)
class InputSpec:
    """One `--input`: `[NAME=]SHAPE` or `[NAME=]DTYPE[SHAPE]`, both with an optional `:LOW..HIGH`.

    Without a range, floats are drawn from the standard normal distribution, integers uniformly from 0 to 9, and
    booleans with equal probability. A range excludes its upper end, so `ids=int64[2,128]:0..30000` suits a vocabulary
    of 30000.
    """

    name: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        try:
            return self._draw(generator)
        except (RuntimeError, MemoryError) as error:
            raise LoadError(f"The input {self} couldn't be created: {quote(error)}.") from error

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        if self.dtype.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=self.dtype)
        if self.dtype.is_floating_point:
            if self.low is None or self.high is None:
                precise = torch.float64 if self.dtype is torch.float64 else torch.float32
                return torch.randn(self.shape, generator=generator, dtype=precise).to(self.dtype)
            unit = torch.rand(self.shape, generator=generator, dtype=torch.float64)
            return unit.mul_(self.high - self.low).add_(self.low).to(self.dtype)
        low, high = (0, 2 if self.dtype is torch.bool else 10) if self.low is None else (self.low, self.high or 0)
        return torch.randint(int(low), int(high), self.shape, generator=generator).to(self.dtype)

    def __str__(self) -> str:
        named = f"{self.name}=" if self.name else ""
        return f"{named}{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def parse_input(text: str) -> InputSpec:
    """Parse one `--input`; raise a `UsageError` that quotes it and shows a valid example."""
    head, equals, rest = text.strip().partition("=")
    name, body = (head.strip(), rest.strip()) if equals else (None, head)
    if name is not None and not name.isidentifier():
        _refuse(text, f"{name!r} is not the name of an argument")
    found = _BODY.fullmatch(body)
    if found is None:
        _refuse(text, "the syntax is invalid")
    sizes = found["sizes"].split("x") if found["sizes"] else [size.strip() for size in found["shape"].split(",")]
    shape = [] if sizes == [""] else sizes
    if wrong := [size for size in shape if not re.fullmatch("0*[1-9][0-9]{0,9}", size)]:
        _refuse(text, f"{wrong[0]!r} is not a size; every size must be 1 or more")
    written = found["dtype"] or "float32"
    dtype = _dtype_named(written)
    if dtype is None:
        known = [dtype_name(each) for each in vars(torch).values() if isinstance(each, torch.dtype)]
        near = difflib.get_close_matches(written, known, 1)
        _refuse(text, f"{written!r} is not a dtype" + (f" (did you mean {near[0]}?)" if near else ""))
    limits = () if found["range"] is None else _parse_range(text, found["range"], dtype)
    return InputSpec(name, dtype, tuple(map(int, shape)), *limits)


def draw_inputs(specs: Sequence[InputSpec], seed: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Draw the positional arguments, in order, and the keyword arguments, by name."""
    names = [spec.name for spec in specs if spec.name is not None]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--input sets {', '.join(twice)} twice; set each input once.")
    generator = torch.Generator().manual_seed(seed)
    drawn = [(spec.name, spec.draw(generator)) for spec in specs]
    positional = tuple(tensor for name, tensor in drawn if name is None)
    return positional, {name: tensor for name, tensor in drawn if name is not None}


def _refuse(text: str, reason: str) -> NoReturn:
    raise UsageError(f"--input {text!r}: {reason}; a valid one looks like {_EXAMPLE}.")


def _dtype_named(name: str) -> torch.dtype | None:
    short = _SHORT_DTYPE.fullmatch(name)
    found = getattr(torch, f"{_KINDS[short[1]]}{short[2]}" if short else name, None)
    quantized = isinstance(found, torch.dtype) and dtype_name(found).startswith(("q", "bits"))
    return found if isinstance(found, torch.dtype) and not quantized else None


def _parse_range(text: str, range_text: str, dtype: torch.dtype) -> tuple[float, float]:
    found = _RANGE.fullmatch(range_text.strip())
    if found is None:
        _refuse(text, f"{range_text!r} is not a range LOW..HIGH")
    low, high = float(found["low"]), float(found["high"])
    if not low < high:
        _refuse(text, "the range is empty (its upper end is excluded)")
    if dtype.is_complex:
        _refuse(text, "complex numbers can't have a range")
    if dtype.is_floating_point:
        if max(-low, high) > torch.finfo(dtype).max:
            _refuse(text, f"the range doesn't fit {dtype_name(dtype)}")
        return low, high
    if not (low.is_integer() and high.is_integer()):
        _refuse(text, "a range of integers needs integer ends")
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if low < least or high - 1 > min(most, 2**53):
        _refuse(text, f"the range doesn't fit {dtype_name(dtype)}")
    return low, high


# Calls from files -----------------------------------------------------------------------------------------------------


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
