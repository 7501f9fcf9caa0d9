"""Checks of the command's options that need no torch.

They run before torch is imported, because that import takes seconds.
"""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimize_export.errors import LoadError, UsageError
from optimizer.option_texts import refuse_missing_weights, split_weights
from optimizer.options import ExportOptions, check_new_folder

# The suffixes of the files that library models take as inputs, by their content.
SUFFIXES = {
    "image": (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"),
    "text": (".txt",),
}
# A path with one of these isn't the name of a library's model.
_SUFFIXES_OF_FILES = (".py", ".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".ipynb", ".pt2", ".txt")
# Packages whose models have names, such as timm:resnet50.
_LIBRARIES = ("timm", "torchvision", "transformers")
A_LIBRARYS = "a library model is timm:NAME, torchvision:NAME or transformers:NAME"


def check_early(options: ExportOptions) -> None:
    """Raise `UsageError` or `LoadError` if MODEL is wrong, a file is missing, or a new folder isn't new."""
    for path in options.input_files:
        if not path.is_file():
            raise LoadError(f"The inputs file {path} {'is not a file' if path.exists() else 'does not exist'}.")
    if split_library(options.model, options.name) is None:
        parse_target(options.model, options.name)
    if options.weights is not None:
        refuse_missing_weights(options.weights)
    if options.calibration is not None and not options.calibration.exists():
        raise LoadError(f"The calibration inputs {options.calibration} don't exist.")
    check_new_folders(options)


def check_new_folders(options: ExportOptions) -> None:
    check_new_folder(options.debug_dir, "debugging", options.output)
    check_new_folder(options.profile_dir, "the profile", options.output, options.debug_dir)


def written_folders(options: ExportOptions) -> list[Path]:
    """The folders that a build writes, the bundle's first."""
    return [path for path in (options.output, options.debug_dir, options.profile_dir) if path is not None]


def existing_files(options: ExportOptions) -> list[Path]:
    """The files and folders that the options name, as they name them, without those that don't exist here."""
    paths = [*options.input_files, *filter(None, (options.calibration, options.choices))]
    paths += [] if options.weights is None else [split_weights(options.weights)[0]]
    if library_of(options.model) is not None:
        paths.append(Path(options.model.partition(":")[2]))
    else:
        paths += [Path(options.model), Path(options.model.rpartition(":")[0])]
    return [path for path in paths if path.exists()]


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


def library_of(model: str) -> str | None:
    """The library whose model MODEL names; None for the user's file or module."""
    library = model.partition(":")[0]
    return library if library in _LIBRARIES else None


def default_output(model: str) -> Path:
    """The default folder of the bundle: `dist/` and the name of the file, the module or the library model."""
    if library_of(model) is not None:
        return Path("dist") / (os.path.basename(os.path.abspath(model.partition(":")[2])) or "model")
    place = model.rpartition(":")[0] if model.rpartition(":")[2].replace(".", "_").isidentifier() else model
    stem = Path(place or model).name.removesuffix(".py")
    return Path("dist") / (stem.rpartition(".")[2] or "model")


def split_library(spec: str, name: str | None = None) -> tuple[str, str] | None:
    """The library of MODEL and the name of its model, which `--model` may give; None for the user's file or module."""
    library = library_of(spec)
    if library is None:
        return None
    name = _only_name(spec.partition(":")[2].strip(), name)
    if not name:
        example = "bert-base-uncased, or a folder" if library == "transformers" else "resnet50"
        raise UsageError(f"MODEL {spec!r} names no model of {library}: add one, such as {library}:{example}.")
    if importlib.util.find_spec(library) is None:
        raise LoadError(f"{library}:{name} needs the package {library}, which isn't installed: pip install {library}.")
    return library, os.path.expanduser(name) if library == "transformers" else name


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
    if not colon or "\\" in name or "/" in name or name.endswith(".py"):
        return spec, None
    if not name or not place:
        raise UsageError(
            f"MODEL {spec!r} has nothing on one side of the colon; use both, such as model.py:build_model."
        )
    return place, name


def _refuse_other_files(path: Path) -> None:
    if path.is_dir():
        raise LoadError(
            f"{path} is a folder: MODEL is a Python file (.py), or transformers:{path} for a folder that save_pretrained "
            "wrote."
        )
    if not path.exists():
        raise LoadError(f"There is no file {path}" + ("." if path.suffix in _SUFFIXES_OF_FILES else f"; {A_LIBRARYS}."))
    if path.suffix != ".py" or not path.is_file():
        raise LoadError(
            f"{path} is not a Python file (.py): MODEL is the file that builds the nn.Module; --weights takes its weights."
        )
