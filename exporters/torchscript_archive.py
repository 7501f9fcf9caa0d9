"""Write the archive of a TorchScript module, the same bytes for the same model and without traces of this machine."""

from __future__ import annotations

import hashlib
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from exporters.errors import refusing
from exporters.isolation import silent, torchscript_allowed
from exporters.metadata import write_archive

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


def save(module: torch.jit.ScriptModule, path: Path, extra: dict[str, str]) -> None:
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
        texts = {
            name: _text(name, archive.read(record)) for name, record in kept.items() if name.endswith((".py", ".pkl"))
        }
        checksums = [
            (name, zlib.crc32(texts[name]) if name in texts else record.CRC)
            for name, record in kept.items()
            if name != _IDENTITY
        ]
        texts[_IDENTITY] = _identity(checksums)
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


def _without_traces(archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    for record in archive.infolist():
        name = record.filename.partition("/")[2]
        if not (name.endswith(".debug_pkl") or name.startswith("traced_inputs")):
            yield name, record


def _text(name: str, content: bytes) -> bytes:
    """The content of a record (source or pickled attributes), readable and with constants in alphabetical order."""
    content = readable(name, content)
    if not name.endswith(".py"):
        return content
    return _CONSTANTS.sub(lambda found: b"".join(sorted(found[0].splitlines(keepends=True))), content)


def _identity(checksums: Sequence[tuple[str, int]]) -> bytes:
    """The serialization id of an archive, from the names and checksums of its records: 40 digits, as in torch.

    torch's own id also depends on paths of this machine.
    """
    return f"{int(hashlib.sha256(repr(checksums).encode()).hexdigest(), 16) % 10**40:040}".encode()


def _padding(offset: int, name: str) -> bytes:
    """An extra field for the local header that aligns the start of the record's data."""
    header = 30 + len(name.encode())
    size = -(offset + header + 4) % _ALIGNMENT
    return b"FB" + size.to_bytes(2, "little") + b"\0" * size


def ascii_name(name: str) -> str:
    """The name of a record or class in ASCII, with `_e9_` for an é."""
    return _LETTERS.sub(_spelled, name.encode()).decode()


def readable(name: str, content: bytes) -> bytes:
    """The content of a record (source or pickled attributes), readable for torch; attributes keep their names."""
    if name.endswith(".py"):
        return _TEXT_OR_LETTERS.sub(lambda found: _escaped(found) if found[0][:1] == b'"' else _spelled(found), content)
    return _CLASS.sub(lambda found: _LETTERS.sub(_spelled, found[0]), content)


def _spelled(letters: re.Match[bytes]) -> bytes:
    return "".join(f"_{ord(letter):x}_" for letter in letters[0].decode()).encode()


def _escaped(text: re.Match[bytes]) -> bytes:
    return _ESCAPE.sub(_octal, text[0])


def _octal(escape: re.Match[bytes]) -> bytes:
    if len(escape[1]) < 3:
        return escape[0]
    high, middle, low = (digit - ord("0") for digit in escape[1])
    return b"\\%03o" % (64 * high + 8 * middle + low & 0xFF)
