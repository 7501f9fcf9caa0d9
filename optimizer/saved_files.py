"""The contents of a file that torch wrote, recognized without torch and without running code of the file."""

import pickletools
import zipfile
from pathlib import Path
from typing import IO

# Objects that a file of tensors begins with.
_CONTAINERS = ("collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
# A file without the zip format has a magic number, a version and the system's sizes before its object.
_PICKLES_BEFORE = 3


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
            called = str(argument).replace(" ", ".")
            return (
                ""
                if argument in _CONTAINERS
                else f"a whole object of the class {called}, as torch.save(model) writes it"
            )
        if opcode.name not in ("PROTO", "FRAME"):
            return ""
    return ""
