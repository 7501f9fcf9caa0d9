"""Checks of the command's options that need no torch.

They run before torch is imported, because that import takes seconds.
"""

import difflib
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

from optimize_export.arguments import no_such_pass
from optimize_export.errors import LoadError, UsageError
from optimize_export.manifest import MANIFEST
from optimizer.options import ExportOptions
from optimizer.paths import (
    check_new_folder,
    is_utf8,
    library_of,
    program_in,
    refuse_missing_weights,
)

# The names of our own passes and formats. A test compares them with the registries, which import torch.
PASS_NAMES = (
    "fold-conv-bias",
    "fold-conv-bn",
    "channels-last",
    "simplify",
    "merge-linears",
    "pad-channels",
    "jit-fusion",
    "cast-precision",
    "sync-batch-norm",
    "insert-checkpoints",
    "torch-compile",
)
FORMAT_NAMES = ("torchscript", "onnx", "pt2", "aoti")

# The suffixes of the files that library models take as inputs, by their content.
SUFFIXES = {
    "image": (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"),
    "text": (".txt",),
}
# A path with one of these isn't the name of a library's model.
_SUFFIXES_OF_FILES = (".py", ".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".ipynb", ".pt2", ".txt")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def check_early(options: ExportOptions) -> None:
    """Raise `UsageError` or `LoadError` if a name in the options is wrong, or a file is missing."""
    check_names(options)
    refuse_missing_inputs(options.input_files)
    if split_library(options.model, options.name) is None:
        parse_target(options.model, options.name)
    if options.weights is not None:
        refuse_missing_weights(options.weights)
    if options.calibration is not None and not options.calibration.exists():
        raise LoadError(f"The calibration inputs {options.calibration} don't exist.")
    check_new_folder(options.debug_dir, "debugging", options.output)
    check_new_folder(options.profile_dir, "the profile", options.output, options.debug_dir)


def check_names(options: ExportOptions) -> None:
    """Raise `UsageError` if a pass or format is unknown, or an input can't be read."""
    _refuse_unknown_passes(options.passes or "")
    _refuse_unknown_formats(options.formats)
    for text in options.inputs:
        parts_of_input(text)


def _refuse_unknown_passes(text: str) -> None:
    known = (*PASS_NAMES, *(point.name for point in entry_points(group="optimize_export.passes")))
    for name in (part.partition(":")[0].strip() for part in text.split(",")):
        if name and name != "none" and name not in known:
            raise UsageError(no_such_pass(name, known))


def _refuse_unknown_formats(names: Sequence[str]) -> None:
    known = (*FORMAT_NAMES, *(point.name for point in entry_points(group="optimize_export.exporters")))
    for name in names:
        if name not in known:
            raise UsageError(f"There is no format {name!r}; the formats are: {', '.join(known)}.")


def refuse_missing_inputs(paths: Sequence[Path]) -> None:
    """Raise `LoadError` if a path isn't a file."""
    for path in paths:
        if not path.is_file():
            raise LoadError(f"The inputs file {path} {'is not a file' if path.exists() else 'does not exist'}.")


def files_of(path: Path, further: Sequence[str] = ()) -> list[Path]:
    """The file itself; or the .safetensors and .npz files in a folder, and those with further suffixes, by name."""
    if path.is_file():
        return [path]
    suffixes = (".safetensors", ".npz", *further)
    found = sorted(each for each in path.glob("*") if each.suffix.lower() in suffixes and each.is_file())
    if not found:
        if path.exists() and not path.is_dir():
            raise LoadError(f"{path} is neither a file nor a folder.")
        *first, last = suffixes[:3]
        what = f"contains no {', '.join(first)} or {last} file" if path.is_dir() else "doesn't exist"
        raise LoadError(f"{path} {what}.")
    return found


# MODEL ----------------------------------------------------------------------------------------------------------------


def split_library(spec: str, name: str | None = None) -> tuple[str, str] | None:
    """The library of MODEL and the name of its model, which `--model` may give; None for the user's file or module."""
    library = library_of(spec)
    if library is None:
        return None
    name = _only_name(spec.partition(":")[2].strip(), name)
    if not name:
        example = "bert-base-uncased, or a folder" if library == "transformers" else "resnet50"
        raise UsageError(f"MODEL {spec!r} names no model of {library}: add one, such as {library}:{example}.")
    if not is_utf8(name):
        raise LoadError(f"The name {name!r} isn't UTF-8.")
    if Path(library, "__init__.py").exists():
        raise LoadError(
            f"{library} is also a package in the current folder: use {library}/__init__.py:{name} for that, or start in "
            "another folder for the installed package."
        )
    if importlib.util.find_spec(library) is None:
        raise LoadError(f"{library}:{name} needs the package {library}, which isn't installed: pip install {library}.")
    if library == "transformers" and not Path(name := os.path.expanduser(name)).is_dir():
        if Path(name).is_file():
            raise LoadError(f"{name} is a file; use the folder that save_pretrained wrote.")
        if not _HUB_NAME.fullmatch(name):
            raise LoadError(f"{name} isn't a folder, and can't be a name on the hub.")
    return library, name


@dataclass(frozen=True)
class Target:
    """The user's file or importable module in MODEL, and the name in it, if any."""

    label: str
    folder: Path
    file: Path | None
    name: str | None


def parse_target(spec: str, name: str | None = None) -> Target:
    """The target of MODEL, in which `--model` may give the name; raise `UsageError` or `LoadError` if there is none."""
    place, own_name = _split_name(spec)
    name = _only_name(own_name, name)
    if name is not None and not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"{name!r} is not the name of a model in a Python file; use a name, such as {place}:build_model."
        )
    path = Path(place)
    is_a_file = path.suffix in _SUFFIXES_OF_FILES or path.exists()
    if not is_a_file and all(part.isidentifier() for part in place.split(".")):
        return Target(place, Path.cwd(), None, name)
    _refuse_other_files(path)
    full = path.resolve()
    if not is_utf8(str(full)):
        raise LoadError(f"The path {full} isn't UTF-8, which torch's exporters need: rename it.")
    return Target(path.name, full.parent, full, name)


def _only_name(own: str | None, given: str | None) -> str | None:
    if own and given and own != given:
        raise UsageError(f"MODEL names {own!r} and --model names {given!r}; use only one of them.")
    return own or given


def _split_name(spec: str) -> tuple[str, str | None]:
    if not spec.strip():
        raise UsageError("MODEL is empty; use a path to a .py file, or package.module:factory.")
    if os.path.exists(spec):
        return spec, None
    place, colon, name = spec.rpartition(":")
    drive = len(place) == 1 and place.isalpha() and ("\\" in name or "/" in name)
    if not colon or drive or "\\" in name or "/" in name or name.endswith(".py"):
        return spec, None
    if not name or not place:
        raise UsageError(
            f"MODEL {spec!r} has nothing on one side of the colon; use both, such as model.py:build_model."
        )
    return place, name


def _refuse_other_files(path: Path) -> None:
    if path.is_dir():
        raise LoadError(_folder(path))
    if not path.exists():
        raise LoadError(f"There is no file {path}{_where_else(path)}")
    if path.suffix == ".py" and path.is_file():
        return
    if path.is_file() and (what := program_in(path)):
        raise LoadError(f"{path} is {what}; MODEL must be the Python file that builds the module it was made from.")
    if path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
        raise LoadError(
            f"{path} contains weights; MODEL must be the Python file that builds the model. Pass the weights with "
            "--weights."
        )
    if path.suffix == ".onnx":
        ours = (
            f" It is in a bundle: check that with optimize-export verify {path.parent}, and run it in Python with load({str(path.parent)!r})."
            if (path.parent / MANIFEST).is_file()
            else ""
        )
        raise LoadError(
            f"{path} is an ONNX file; MODEL must be the Python file that builds the nn.Module, because ONNX files are what "
            f"this program writes.{ours}"
        )
    if path.suffix == ".ipynb":
        raise LoadError(f"{path} is a notebook; copy the cells that build the model into a Python file and use that.")
    raise LoadError(f"{path} is not a Python file (.py).")


def _folder(path: Path) -> str:
    """The message on a folder: a bundle, a model of transformers, or one with Python files."""
    if (path / MANIFEST).is_file():
        return (
            f"{path} is a bundle: MODEL is the Python file that it is built from. Check the bundle with optimize-export verify {path}, "
            f"time it with optimize-export bench {path}, and run it in Python with load({str(path)!r})."
        )
    config = path / "config.json"
    if config.is_file() and b'"model_type"' in config.read_bytes()[:100_000]:
        return f"{path} is a folder that save_pretrained wrote: use transformers:{path}."
    files = sorted(file.name for file in path.glob("*.py"))
    which = f", such as {path / files[0]}" if files else ""
    return f"{path} is a folder; use the Python file in it that contains the model{which}."


def _where_else(path: Path) -> str:
    """The end of the message on a file that doesn't exist: a file with a similar name, or a model of a library."""
    siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
    if near := difflib.get_close_matches(path.name, siblings, 1):
        return f"; did you mean {path.parent / near[0]}?"
    in_a_folder = path.parent != Path() and path.parent.is_dir()
    if in_a_folder or path.suffix in _SUFFIXES_OF_FILES or not _HUB_NAME.fullmatch(str(path)):
        return "."
    return f"; if it is the name of a model, name its library too, {library_names(str(path))}."


def library_names(name: str) -> str:
    """How to write the name of a library's model, as "such as transformers:NAME"."""
    if "/" in name or "-" in name:
        return f"as in transformers:{name}"
    return f"as in torchvision:{name}, timm:{name} or transformers:{name}"


# The syntax of --input -----------------------------------------------------------------------------------------------

INPUT_EXAMPLE = "2x3x224x224, float32[2,3,224,224], mask=bool[2,128] or ids=int64[2,128]:0..30000"

_SIZES = re.compile(r"[0-9]+(x[0-9]+)*")
_TYPED = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\]")
_MOST_ELEMENTS = 2**40
_MOST_DIGITS = 100


def parts_of_input(text: str) -> tuple[str | None, str, tuple[int, ...], str | None]:
    """The name, the dtype as it is written, the shape and the range of one `--input`; None for no name or range."""
    head, equals, rest = text.strip().partition("=")
    name, body = (head.strip(), rest.strip()) if equals else (None, head)
    if name is not None and not name.isidentifier():
        refuse_input(text, f"{name!r} is not the name of an argument")
    body, colon, range_text = body.partition(":")
    dtype_name, sizes = _split_body(text, body)
    if any(len(size) > _MOST_DIGITS for size in sizes):
        refuse_input(text, "one of its sizes is too large")
    shape = tuple(map(int, sizes))
    if 0 in shape:
        refuse_input(text, "every size must be 1 or more")
    if math.prod(shape) > _MOST_ELEMENTS:
        refuse_input(text, f"{math.prod(shape)} elements are too many")
    return name, dtype_name, shape, range_text if colon else None


def refuse_input(text: str, reason: str) -> NoReturn:
    raise UsageError(f"--input {text!r}: {reason}; a valid one looks like {INPUT_EXAMPLE}.")


def _split_body(text: str, body: str) -> tuple[str, list[str]]:
    if _SIZES.fullmatch(body):
        return "float32", body.split("x")
    typed = _TYPED.fullmatch(body)
    if typed is None:
        refuse_input(text, "the syntax is invalid")
    sizes = [size.strip() for size in typed["shape"].split(",")] if typed["shape"].strip() else []
    wrong = [size for size in sizes if not re.fullmatch("[0-9]+", size)]
    if wrong:
        refuse_input(text, f"{wrong[0]!r} is not a size; every size must be 1 or more")
    return typed["dtype"], sizes
