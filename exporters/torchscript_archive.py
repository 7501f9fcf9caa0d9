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
from exporters.isolation import silent
from exporters.torchscript_deprecation import torchscript_allowed
from exporters.torchscript_names import ascii_name, readable
from exporters.writing import write_archive

# torch.jit.save aligns every record to this many bytes, so that weights can be memory-mapped.
_ALIGNMENT = 64

_IDENTITY = "model/.data/serialization_id"
# The constants of a class in the archive's source. torch takes them from a set, in the order of the process's hashes.
_CONSTANTS = re.compile(rb"(?:^  \w+ : Final\[.*\n){2,}", re.MULTILINE)


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
