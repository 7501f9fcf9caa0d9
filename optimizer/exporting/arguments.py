"""Check the arguments of `export`: formats, folders, dynamic shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from exporters.base import Exporter, named_inputs
from exporters.metadata import refuse_metadata
from exporters.onnx import refuse_opset
from exporters.registry import exporter_named, register
from optimize_export.errors import UsageError
from optimizer.bundle import check_target
from optimizer.model import Dynamic, OpenDims, Samples, open_dims
from optimizer.options import check_debug_folder, check_profile_folder


def exporters_of(
    formats: Sequence[str], given: Sequence[Exporter], opset: int | None, metadata: Mapping[str, str]
) -> list[Exporter]:
    """Look up the exporters of the formats, each once.

    Args:
        given: further exporters.

    Raises:
        UsageError: `formats` is empty, and no exporter is given.
        ExporterError: a format or the opset is unknown, no file can store the metadata, or one of those given isn't an
            exporter or has the name of another format.
    """
    names = [formats] if isinstance(formats, str) else list(formats or ())
    names += map(register, [given] if isinstance(given, Exporter) else given)
    if not names:
        raise UsageError("formats is empty: name at least one format, such as 'onnx'.")
    exporters = [exporter_named(name) for name in dict.fromkeys(names)]
    refuse_opset(opset, [exporter.name for exporter in exporters])
    refuse_metadata(metadata)
    return exporters


def check_folders(
    output: str | Path, debug_dir: str | Path | None, profile_dir: str | Path | None, *, force: bool
) -> tuple[Path, Path | None, Path | None]:
    """Check that all folders can be written, and return their absolute paths.

    Raises:
        UsageError: `output` isn't a path, or `debug_dir` or `profile_dir` can't be used or is the same folder.
        BundleError: a bundle can't be written to `output`.
    """
    if not isinstance(output, str | os.PathLike) or not str(output).strip():
        raise UsageError(f"output must be the folder of the bundle, such as 'dist/net', not {output!r}.")
    output = os.path.expanduser(output)
    debug_dir, profile_dir = (None if each is None else os.path.expanduser(each) for each in (debug_dir, profile_dir))
    check_target(output, force=force)
    check_debug_folder(debug_dir)
    if debug_dir is not None and os.path.realpath(debug_dir) == os.path.realpath(output):
        raise UsageError(f"{debug_dir} is the folder of the bundle: use another folder for debugging.")
    check_profile_folder(profile_dir, output, debug_dir)
    debug, profile = (None if folder is None else Path(folder).absolute() for folder in (debug_dir, profile_dir))
    return Path(output).absolute(), debug, profile


def opened(
    model: nn.Module,
    samples: Samples,
    dynamic: Dynamic | None,
    input_names: Sequence[str] | None,
    static_batch: bool,
) -> tuple[Samples, OpenDims]:
    """Open the dims that `dynamic` declares, and return the samples with these dims.

    Raises:
        UsageError: `dynamic` names a dim that the inputs don't have, or contradicts another option.
    """
    if dynamic is None:
        return samples, OpenDims()
    call = samples.given
    inputs = named_inputs(model, call.args, call.kwargs, input_names=input_names)
    dims = open_dims(dynamic, inputs, first=samples.first, static_batch=static_batch)
    return samples.opened(dims, inputs), dims
