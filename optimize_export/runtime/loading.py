"""Load a bundle as a callable with the original's arguments and outputs."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

import numpy

from optimize_export.arguments import other_gpu, parse_digest
from optimize_export.errors import BundleError, DeviceError, UsageError
from optimize_export.manifest import (
    MOST_THREADS,
    SCHEMA_NAME,
    parse_json,
    read_checked,
    read_manifest,
    refuse_changed,
    sums_problem,
)
from optimize_export.relations import Relation
from optimize_export.runtime.batching import BatchedModel, Batching, refuse_unjoined
from optimize_export.runtime.cpus import processor, usable_cpus
from optimize_export.runtime.route import NUMPY_DTYPES, SETTINGS, Route, Runner, open_route, own_routes
from optimize_export.runtime.structure import Arguments, Outputs

logger = logging.getLogger(__name__)


class LoadedModel:
    """A bundle's artifact, called as the original model is called.

    Numpy arrays as arguments give numpy arrays, torch tensors give torch tensors on the device of the first of them.
    Calls may run in several threads at once.
    """

    path: Path
    route: Route
    """The artifact, the runtime and its settings."""
    device: str
    """"cpu" or "cuda"."""
    batch_sizes: tuple[int, ...]
    """Those at which the route was chosen; others work where the artifact's batch is open."""
    accuracy: str
    """How far the outputs may differ from the original's, if by more than rounding: "within budget: cosine 0.9997 (budget:
    cosine 0.999)"; "" otherwise."""
    notes: tuple[str, ...]
    """Sentences about a choice other than the recommended one, and about another machine."""

    def __init__(
        self, path: Path, artifact: Mapping[str, Any], manifest: Mapping[str, Any], runner: Runner, route: Route
    ) -> None:
        inputs, outputs = artifact["inputs"], artifact["outputs"]
        names = [each["name"] for each in inputs]
        for field in ("input_structure", "output_structure"):
            if field not in manifest:
                raise BundleError(f"{path} can't be called like the original: its manifest lacks `{field}`.")
        self._arguments = Arguments(manifest["input_structure"], manifest.get("positional"), names)
        self._outputs = Outputs(manifest["output_structure"], [each["name"] for each in outputs])
        # Sizes are numbers, open ones are names.
        self._specs = tuple((each["name"], each["dtype"], tuple(each["shape"])) for each in inputs)
        self._limits = _limits(artifact)
        self._dtypes: dict[Any, str] = {}
        # A tensor that numpy has no dtype for.
        strange = (each for each in (*inputs, *outputs) if each["dtype"] not in NUMPY_DTYPES)
        self._not_in_numpy = next(strange, None)
        self._runner = runner
        self.path = path
        self.route = route
        self.device = runner.device
        self.batch_sizes: tuple[int, ...] = ()
        self.accuracy = _accuracy(manifest, artifact, route)
        self.notes: tuple[str, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Args:
            args, kwargs: the arguments of the exported call: numpy arrays or torch tensors, in the same structure. Their
                dtypes are those of the example inputs, and so are their shapes, except that dynamic dims may have other
                sizes.

        Returns:
            The outputs in the structure of the original's, with the shapes and dtypes that the original returns. They
            are numpy arrays if no argument is a torch tensor.

        Raises:
            UsageError: the arguments differ from the exported call in structure, dtype, a fixed size or a constant.
                Or the sizes break one of the file's limits in the manifest. Other conditions on sizes are the file's
                own, and its runtime raises its own errors.
        """
        tensors = self._arguments.flatten(args, kwargs)
        home = self._check(tensors)
        return self._outputs.rebuild(self._at_home(self._runner(*tensors), home))

    def __repr__(self) -> str:
        told = f", {self.accuracy}" if self.accuracy else ""
        return f"LoadedModel({str(self.path)!r}, {self.route}, device={self.device!r}{told})"

    def _at_home(self, outputs: tuple[Any, ...], home: Any) -> tuple[Any, ...]:
        """The outputs on the device of the arguments; as they are for arrays."""
        if home is None or outputs[0].device == home:
            return outputs
        return tuple(output.to(home) for output in outputs)

    def _check(self, tensors: list[Any]) -> Any:
        """Refuse tensors that don't fit the file, and convert numpy's scalars to arrays, in the list.

        Returns:
            The device of the first torch tensor; None if there is none.
        """
        torch = sys.modules.get("torch")
        home = None
        open_sizes: dict[str, int] = {}
        for index, (name, dtype, shape) in enumerate(self._specs):
            tensor = tensors[index]
            if torch is not None and isinstance(tensor, torch.Tensor):
                home = tensor.device if home is None else home
                if tensor.is_meta or tensor.layout is not torch.strided:
                    what = "has no values (meta)" if tensor.is_meta else f"has the layout {tensor.layout}"
                    raise UsageError(f"`{name}` {what}: pass a dense tensor on the CPU or a GPU.")
            elif isinstance(tensor, numpy.generic):
                tensor = tensors[index] = numpy.asarray(tensor)
            elif not isinstance(tensor, numpy.ndarray):
                raise UsageError(f"`{name}` is of type {type(tensor).__name__}: pass a torch tensor or a numpy array.")
            given = self._dtypes.get(tensor.dtype)
            if given is None:
                given = self._dtypes[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
            if given != dtype:
                raise UsageError(f"`{name}` is {given}, but the file takes {dtype}: convert it.")
            sizes = tensor.shape
            fits = len(shape) == len(sizes)
            for axis, size in enumerate(sizes if fits else ()):
                wanted = shape[axis]
                # Dims with the same name have the same size.
                fits &= size == (wanted if type(wanted) is int else open_sizes.setdefault(wanted, size))
            if not fits:
                known = "".join(f", where {dim} is {open_sizes[dim]}" for dim in shape if dim in open_sizes)
                wanted = ", ".join(map(str, shape))
                raise UsageError(f"`{name}` has the shape {list(tensor.shape)}, but the file takes [{wanted}]{known}.")
        for limit in self._limits:
            if not limit.holds(open_sizes):
                sizes = ", ".join(f"{name} is {open_sizes[name]}" for name in limit.names if name in open_sizes)
                raise UsageError(f"The file is right only where {limit}, and {sizes}: pass smaller inputs.")
        if home is None and self._not_in_numpy is not None:
            name, dtype = self._not_in_numpy["name"], self._not_in_numpy["dtype"]
            raise UsageError(f"`{name}` is {dtype}, which numpy doesn't have: pass torch tensors.")
        return home


@overload
def load(
    bundle: str | PathLike[str],
    *,
    device: str = "auto",
    format: str | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    expect: str | None = None,
    warm_up: bool = True,
    batching: Literal[False] = False,
) -> LoadedModel: ...
@overload
def load(
    bundle: str | PathLike[str],
    *,
    device: str = "auto",
    format: str | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    expect: str | None = None,
    warm_up: bool = True,
    batching: Literal[True] | Batching,
) -> BatchedModel: ...
def load(
    bundle: str | PathLike[str],
    *,
    device: str = "auto",
    format: str | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    expect: str | None = None,
    warm_up: bool = True,
    batching: bool | Batching = False,
) -> LoadedModel | BatchedModel:
    """Load a bundle as a callable with the arguments and outputs of the original model.

    This runs the artifact that the manifest recommends, if this machine can; otherwise the next one, and `notes` says
    why. torch is imported only if the artifact needs it: an ONNX file needs numpy and onnxruntime.

    A model file is a program with all the rights of the user who loads it. The hashes of the artifact's files are
    checked before they are loaded, and with `expect` also that the bundle is the builder's.

    Args:
        bundle: the folder, or what `export` returned.
        device: "cpu", "cuda", or "auto": the GPU if the bundle was made for one and there is one here.
        format: run the artifact of this format.
        runtime: run it in "onnxruntime", "openvino" or "torch".
        threads: of one call; by default the number that was measured as best, or the runtime's default. torch has one
            setting for the whole process, which this changes.
        expect: the SHA-256 that the bundle's SHA256SUMS must have.
        warm_up: run the inputs of the first golden call once, so that the first call of the user is fast.
        batching: gather the calls of several threads, or of asyncio, into batches. On a CPU, each of the instances has
            its share of the processors, unless `threads` is given. True takes the settings that `bench --throughput --save`
            put into the manifest, if this process may use as many processors as that one, and the defaults otherwise.

    Raises:
        BundleError: there is no bundle, it is damaged, it isn't the expected one, or no artifact can run here.
        DeviceError: the requested device or runtime is missing.
        UsageError: an argument is invalid; or with `batching`, nothing says that rows can be joined.
    """
    device = str(device)  # torch's devices, too
    if device not in ("auto", "cpu", "cuda"):
        way = other_gpu(device)
        raise UsageError(f"device must be 'auto', 'cpu' or 'cuda', not {device!r}{'; ' if way else ''}{way}.")
    if threads is not None and (type(threads) is not int or not 1 <= threads <= MOST_THREADS):
        raise UsageError(f"threads must be a whole number from 1 to {MOST_THREADS}, not {threads!r}.")
    if runtime is not None and runtime not in SETTINGS:
        raise UsageError(f"There is no runtime {runtime!r}; the runtimes are {', '.join(SETTINGS)}.")
    if not isinstance(batching, bool | Batching):
        raise UsageError(f"batching must be True, False or a Batching, not {batching!r}.")
    folder = Path(os.path.expanduser(bundle))
    manifest = read_manifest(folder)
    if problem := sums_problem(folder, manifest, None if expect is None else parse_digest("expect", expect)):
        raise BundleError(f"{folder} can't be used: {problem}")
    gathered = Batching() if batching is True else batching
    if gathered and threads is None and device != "cuda" and (device, manifest["device"]["type"]) != ("auto", "cuda"):
        service = manifest.get("service")
        if batching is True and service and format is runtime is None and service["cpus"] == usable_cpus():
            gathered = Batching(service["max_batch"], service["max_wait"], instances=service["instances"])
            threads = service["threads"]
        else:
            threads = max(1, usable_cpus() // (gathered.instances or usable_cpus()))
    model, refused = _first_that_runs(folder, manifest, _routes(manifest, format, runtime, threads), device)
    model.notes = (*refused, *_notes(manifest, model))
    for note in model.notes:
        logger.warning("%s: %s", folder, note)
    benchmark = manifest.get("benchmark") or {}
    model.batch_sizes = tuple(benchmark.get("batch_sizes", ()))
    if warm_up and model._not_in_numpy is None and (inputs := first_inputs(folder, manifest)) is not None:
        _warm_up(model, inputs)
    return _gathering(folder, manifest, model, gathered) if gathered else model


def _gathering(folder: Path, manifest: Mapping[str, Any], model: LoadedModel, batching: Batching) -> BatchedModel:
    artifact = next(each for each in manifest["artifacts"] if each["format"] == model.route.format)
    refuse_unjoined(folder, manifest, artifact)
    settings = batching.for_device(model.device, manifest["parity"].get("batch_sizes") or ())
    models = [model] * (settings.instances or 1)
    if model.route.runtime == "openvino":
        # A compiled model answers one request after another.
        models[1:] = (_first_that_runs(folder, manifest, [model.route], model.device)[0] for _ in models[1:])
    return BatchedModel(models, settings)


def _warm_up(model: LoadedModel, inputs: list[Any]) -> None:
    """Run the golden inputs once.

    Raises:
        BundleError: they don't fit the file, or it fails on them.
    """
    try:
        model._check(inputs)
        model._runner(*inputs)
    except UsageError as error:
        raise BundleError(f"{model.path} is damaged: its golden inputs don't fit its file. {error}") from error
    # Each runtime has its own errors, and some derive from Exception alone.
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise BundleError(
            f"{model.path}: {model.route} fails on the golden inputs: {reason.rstrip('.')}. Pass warm_up=False to do "
            "without them."
        ) from error


def _routes(manifest: Mapping[str, Any], format: str | None, runtime: str | None, threads: int | None) -> list[Route]:
    """The routes to try, the recommended one first.

    Raises:
        UsageError: the bundle has no such format, or no artifact runs in the runtime.
    """
    formats = [artifact["format"] for artifact in manifest["artifacts"]]
    if format is not None and format not in formats:
        raise UsageError(f"The bundle has no {format!r} artifact; it has {', '.join(formats)}.")
    recommended = (manifest.get("benchmark") or {}).get("recommended")
    routes = [] if recommended is None else [Route.from_json(recommended)]
    for own in own_routes(formats):
        in_openvino = (own.runtime, runtime) == ("onnxruntime", "openvino")
        routes.append(replace(own, runtime="openvino") if in_openvino else own)
    found = [route for route in routes if format in (None, route.format) and runtime in (None, route.runtime)]
    if not found:
        chosen = ", ".join(formats) if format is None else format
        raise UsageError(f"{chosen} doesn't run in {runtime}: choose another format or runtime.")
    if threads is None:
        return found
    return [replace(route, settings={**route.settings, "threads": threads}) for route in found]


def _first_that_runs(
    folder: Path, manifest: Mapping[str, Any], routes: Sequence[Route], device: str
) -> tuple[LoadedModel, list[str]]:
    """Open the first route that this machine can run; with a note on each one before it.

    Raises:
        BundleError: a file of the artifact was changed.
        DeviceError: none can run; the message has all reasons.
    """
    refused: list[str] = []
    for route in routes:
        artifact = next(each for each in manifest["artifacts"] if each["format"] == route.format)
        refuse_changed(folder, manifest, artifact)
        for target in _devices(device, manifest, route):
            try:
                runner = open_route(folder / artifact["path"], route, target)
            except DeviceError as error:
                refused.append(f"{route} isn't used on {target}: {error}")
                continue
            return LoadedModel(folder, artifact, manifest, runner, route), refused
    raise DeviceError(f"{folder} can't be run here: {'; '.join(refused)}")


def _devices(device: str, manifest: Mapping[str, Any], route: Route) -> tuple[str, ...]:
    """The devices to try. A route in OpenVINO runs on the CPU."""
    if device != "auto":
        return (device,)
    return ("cuda", "cpu") if manifest["device"]["type"] == "cuda" and route.runtime != "openvino" else ("cpu",)


def _limits(artifact: Mapping[str, Any]) -> tuple[Relation, ...]:
    try:
        return tuple(map(Relation, dict.fromkeys(each["condition"] for each in artifact.get("limits", ()))))
    except ValueError as error:
        raise BundleError(f"The manifest has a limit that can't be checked: {error}.") from error


def _accuracy(manifest: Mapping[str, Any], artifact: Mapping[str, Any], route: Route) -> str:
    if artifact.get("accuracy"):
        return f"within budget: {(artifact['parity'] or {}).get('reason', '')}"
    return str(manifest["parity"]["reason"]) if route.is_lowered else ""


def _notes(manifest: Mapping[str, Any], model: LoadedModel) -> list[str]:
    """Notes if the route was chosen on another processor, or has more threads than are usable here."""
    there, here = manifest["device"], processor()
    if model.device != "cpu":
        return []
    is_chosen = bool(manifest.get("benchmark")) and there["type"] == "cpu"
    again = ": `optimize-export bench` measures again" if is_chosen else ""
    notes = []
    if is_chosen and there["name"] != here:
        notes.append(f"{model.route} was chosen on {there['name']}, and this machine is {here}{again}")
    if int(model.route.settings.get("threads", 0)) > (usable := usable_cpus()):
        notes.append(
            f"{model.route} has at most {usable} thread{'s' if usable > 1 else ''} here, one for each processor that "
            f"this process may use{again}"
        )
    return notes


# The names of dtypes in safetensors files that numpy has too.
_DTYPES = {
    **{"BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "F32": "float32", "F64": "float64"},
}


def first_inputs(folder: Path, manifest: Mapping[str, Any]) -> list[Any] | None:
    """The inputs of the first golden call, in the file's order; None if one is complex or numpy lacks its dtype.

    Raises:
        BundleError: the file was changed or can't be read.
    """
    golden = manifest["golden"]
    call = golden["calls"][0]
    try:
        data = read_checked(folder, manifest, golden["path"])
    except BundleError as error:
        raise BundleError(f"{error} Pass warm_up=False to do without it.") from error
    try:
        size = int.from_bytes(data[:8], "little")
        header, content = parse_json(data[8 : 8 + size]), memoryview(data)[8 + size :]
        # Complex tensors are stored as pairs of real numbers.
        complex_names = parse_json(header["__metadata__"][SCHEMA_NAME].encode("utf-8"))["complex"]
        keys = [f"{call['name']}/input/{name}" for name in call["inputs"]]
        if any(key in complex_names or header[key]["dtype"] not in _DTYPES for key in keys):
            return None
        return [_array(header[key], content) for key in keys]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        path, reason = folder / golden["path"], f"{type(error).__name__} {error}"
        raise BundleError(f"{path} can't be read: {reason}. Pass warm_up=False to do without it.") from error


def _array(entry: Mapping[str, Any], content: memoryview) -> Any:
    """A tensor of the file; raise ValueError if its bytes don't have its shape."""
    begin, end = entry["data_offsets"]
    shape, dtype = entry["shape"], numpy.dtype(_DTYPES[entry["dtype"]])
    count = math.prod(shape)
    if min((begin, *shape)) < 0 or end - begin != count * dtype.itemsize or end > len(content):
        raise ValueError(f"a tensor of shape {shape} doesn't have {end - begin} bytes")
    # A copy, because the array must be aligned, and a runtime may write to its inputs.
    return numpy.frombuffer(content[begin:end], dtype).reshape(shape).copy() if count else numpy.empty(shape, dtype)
