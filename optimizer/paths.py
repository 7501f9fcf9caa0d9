"""The paths that options name: a library's model, and a weights file. Nothing here needs torch."""

import os
import pickletools
import zipfile
from pathlib import Path
from typing import IO

from optimize_export.errors import LoadError

# Packages whose models have names, such as timm:resnet50.
LIBRARIES = ("timm", "torchvision", "transformers")
# Objects that a file of tensors begins with.
_CONTAINERS = ("collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
# A file without the zip format has a magic number, a version and the system's sizes before its object.
_PICKLES_BEFORE = 3


def library_of(model: str) -> str | None:
    """The library whose model MODEL names; None for the user's file or module.

    A file of this name, or a module `timm.py` in the current folder, comes first.
    """
    library = model.partition(":")[0]
    own = os.path.exists(model) or os.path.exists(f"{library}.py")
    return library if library in LIBRARIES and not own else None


def default_output(model: str) -> Path:
    """The default folder of the bundle: `dist/` and the name of the file, the module or the library model."""
    if library_of(model) is not None:
        return Path("dist") / (os.path.basename(os.path.abspath(model.partition(":")[2])) or "model")
    place = model.rpartition(":")[0] if model.rpartition(":")[2].replace(".", "_").isidentifier() else model
    stem = Path(place or model).name.removesuffix(".py")
    return Path("dist") / (stem.rpartition(".")[2] or "model")


def refuse_missing_weights(path: Path) -> None:
    """Raise `LoadError` if the path, without the key after a colon, isn't a file."""
    path, _ = split_weights(path)
    if not path.is_file():
        kind = "is a folder; use the file in it" if path.is_dir() else "is not a file"
        raise LoadError(f"The weights file {path} " + (f"{kind}." if path.exists() else "doesn't exist."))


def split_weights(path: Path) -> tuple[Path, str]:
    """Split `w.pt:net` into the file and the key of the state dict in it, which is "" in `w.pt`."""
    name, _, key = str(path).rpartition(":")
    if not name or not key or "/" in key or "\\" in key or path.exists():
        return path, ""
    return Path(name), key


def program_in(path: Path) -> str:
    """What a file contains if it is a program or a whole object instead of tensors, such as "a TorchScript program".

    Empty if it contains neither, or can't be read.
    """
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                return "" if file.peek(1)[:1] != b"\x80" else _object(file, _PICKLES_BEFORE)
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
            if "constants.pkl" in names:
                return "a TorchScript program"
            if "serialized_exported_program.json" in names or any(name.startswith("models/") for name in names):
                return "a program that torch.export wrote"
            pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if pickled is None:
                return ""
            with archive.open(pickled) as file:
                return _object(file, 0)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return ""


def _object(file: IO[bytes], before: int) -> str:
    """The class of the pickled object, unless it is a container."""
    for _ in range(before):
        for _ in pickletools.genops(file):
            pass
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL":
            if argument in _CONTAINERS:
                return ""
            called = str(argument).replace(" ", ".")
            return f"a whole object of the class {called}, as torch.save(model) writes it"
        if opcode.name not in ("PROTO", "FRAME"):
            return ""
    return ""
