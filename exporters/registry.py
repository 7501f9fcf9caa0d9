"""The formats by name: our own, those of other packages, and those that this process was given.

Another package brings a format by an entry point of the group `optimize_export.exporters`. It has the name of the format
and loads a subclass of `Exporter`.
"""

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from exporters.aoti import AotiExporter
from exporters.base import Exporter, LoadedArtifact
from exporters.errors import ExporterError, UnknownFormat
from exporters.onnx import OnnxExporter
from exporters.onnx_session import on_cpu
from exporters.pt2 import Pt2Exporter
from exporters.torchscript import TorchScriptExporter

_GROUP = "optimize_export.exporters"
_OWN: dict[str, type[Exporter]] = {
    cls.name: cls for cls in (TorchScriptExporter, OnnxExporter, Pt2Exporter, AotiExporter)
}
# The exporters that `export` was given. They stay known, so that this process can load and verify their files.
_GIVEN: dict[str, Exporter] = {}
# Quantized files, which the tuning makes of an ONNX file; there is no exporter for them.
QUANTIZED = ("onnx-int8-dynamic", "onnx-int8", "onnx-int8-dense", "onnx-int8-inputs", "onnx-int4")
# Every format is also exported from the module in half precision, such as "torchscript-float16".
_HALF = ("float16", "bfloat16")


def exporter_names() -> tuple[str, ...]:
    """The names of all formats, ours first. This imports no code of other packages.

    Raises:
        ExporterError: two packages provide a format with the same name.
    """
    others = _from_others()
    return (*_OWN, *others, *(name for name in _GIVEN if name not in others))


def register(exporter: Exporter) -> str:
    """Make an exporter known in this process, without an entry point; returns the name of its format.

    It replaces an earlier exporter of the same name that was registered this way.

    Raises:
        ExporterError: it isn't an `Exporter`, lacks its names, or a format with its name exists already.
    """
    if not isinstance(exporter, Exporter):
        raise ExporterError(
            f"{exporter!r} isn't an exporter: pass an instance of a subclass of exporters.Exporter, such as Mine()."
        )
    if lacking := [f"`{name}`" for name in ("name", "file_name") if not hasattr(exporter, name)]:
        raise ExporterError(f"{type(exporter).__name__} needs {' and '.join(lacking)}.")
    name = exporter.name
    if name in _OWN or exported_format(name) != name or name in _from_others():
        raise ExporterError(f"{type(exporter).__name__} needs another name: there is a format {name!r} already.")
    _GIVEN[name] = exporter
    return name


def exporter_named(name: str) -> Exporter:
    """The exporter of a format.

    Raises:
        UnknownFormat: there is no format with that name; the message lists the known ones.
        ExporterError: two packages provide a format with the same name, or the entry point can't be used.
    """
    others = _from_others()
    if name in _OWN:
        return _OWN[name]()
    if name in _GIVEN:
        return _GIVEN[name]
    if name not in others:
        raise UnknownFormat(
            f"There is no format {name!r}; the formats are: {', '.join(exporter_names())}. Install the package that brings "
            "another one, or pass an instance in Python: exporters=[…]."
        )
    return _loaded(others[name])


def exported_format(format: str) -> str:
    """The format without what tuning lowers: "onnx" for "onnx-int8" and "onnx-float16"; other formats as they are."""
    half = half_of(format)
    return OnnxExporter.name if format in QUANTIZED else format if half is None else format.removesuffix(f"-{half}")


def half_of(format: str) -> str | None:
    """The half precision of a format that tuning exports, "float16" for "onnx-float16"; None for other formats."""
    base, _, dtype = format.rpartition("-")
    return dtype if base and dtype in _HALF else None


def load_artifact(format: str, path: Path, device: str = "cpu") -> LoadedArtifact:
    """Load the file at `path` on "cpu" or "cuda".

    Raises:
        ProviderFallback: the file would run on another device than the requested one.
    """
    return exporter_named(exported_format(format)).load(path, device)


def load_for_proof(format: str, path: Path, device: str = "cpu") -> LoadedArtifact:
    """Load the file as `load_artifact` does, in a child process if it is an ONNX file on the CPU.

    Raises:
        RuntimeCrashed: the runtime crashes on the file, hangs or is killed; each call of the result may raise it too.
    """
    if exported_format(format) == OnnxExporter.name and device == "cpu":
        return on_cpu(path)
    return load_artifact(format, path, device)


def _from_others() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=_GROUP):
        if point.name in _OWN or exported_format(point.name) != point.name:
            raise ExporterError(f"The format {point.name!r} is provided by optimize-export and by {_owner(point)}.")
        if point.name in found and point.value != found[point.name].value:
            owners = f"{_owner(found[point.name])} and by {_owner(point)}"
            raise ExporterError(f"The format {point.name!r} is provided by {owners}.")
        found[point.name] = point
    return found


def _owner(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist is not None else 'an unknown package'} ({point.value})"


def _loaded(point: EntryPoint) -> Exporter:
    try:
        cls = point.load()
    except (ImportError, AttributeError) as error:
        raise ExporterError(f"The format {point.name!r} of {_owner(point)} can't be imported: {error}.") from error
    if not (isinstance(cls, type) and issubclass(cls, Exporter)):
        raise ExporterError(f"The format {point.name!r} of {_owner(point)} isn't a subclass of exporters.Exporter.")
    if cls.name != point.name:
        raise ExporterError(f"The format {point.name!r} of {_owner(point)} calls itself {cls.name!r}.")
    return cls()
