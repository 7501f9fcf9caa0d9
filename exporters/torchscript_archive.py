"""Write the archive of a TorchScript module, the same bytes for the same model and without traces of this machine."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping
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
        for name, record in kept.items():
            entry = zipfile.ZipInfo(name)
            entry.file_size = record.file_size
            entry.extra = _padding(copy.start_dir, name)
            if name == _IDENTITY:
                copy.writestr(entry, _identity(kept))
                continue
            if name.endswith((".py", ".pkl")):
                copy.writestr(entry, readable(name, archive.read(record)))
                continue
            with archive.open(record) as reader, copy.open(entry, "w") as writer:
                while chunk := reader.read(1 << 20):
                    writer.write(chunk)


def _without_traces(archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    for record in archive.infolist():
        name = record.filename.partition("/")[2]
        if not (name.endswith(".debug_pkl") or name.startswith("traced_inputs")):
            yield name, record


def _identity(records: Mapping[str, zipfile.ZipInfo]) -> str:
    """The serialization id of an archive: 40 digits, as in torch.

    torch's own id also depends on paths of this machine.
    """
    held = [(name, record.CRC) for name, record in records.items() if name != _IDENTITY]
    return f"{int(hashlib.sha256(repr(held).encode()).hexdigest(), 16) % 10**40:040}"


def _padding(offset: int, name: str) -> bytes:
    """An extra field for the local header that aligns the start of the record's data."""
    header = 30 + len(name.encode())
    size = -(offset + header + 4) % _ALIGNMENT
    return b"FB" + size.to_bytes(2, "little") + b"\0" * size
