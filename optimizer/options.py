"""The options of the command, parsed and checked as far as possible without torch."""

import math
import os
import pickletools
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, get_args

from optimize_export.errors import LoadError, UsageError

DEFAULT_FORMATS = ("torchscript", "onnx")
# The command's own stage, which comes before the stages of the library.
LOAD_STAGE = "load"
# The environment variable that leaves out the timing of files.
NO_BENCH = "OPTIMIZE_EXPORT_NO_BENCH"
# Packages whose models have names, such as timm:resnet50.
LIBRARIES = ("timm", "torchvision", "transformers")

_LARGEST_BATCH = 1 << 20
# Objects that a file of tensors begins with.
_CONTAINERS = ("collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
# A file without the zip format has a magic number, a version and the system's sizes before its object.
_PICKLES_BEFORE = 3
_Value = TypeVar("_Value", int, str)
Effort = Literal["quick", "normal", "thorough"]
"""Number of runs that a proof takes."""
# One number for all outputs, or one per output by its name in the files.
Tolerance = float | dict[str, float] | None


@dataclass(frozen=True)
class AccuracyBudget:
    """How much accuracy a lossy route may cost: the least cosine and the least top-1 agreement, over outputs and calls.

    With neither, only rounding is allowed.
    """

    cosine: float | None = None
    top1: float | None = None

    @property
    def is_exact(self) -> bool:
        return self.cosine is None and self.top1 is None

    def __str__(self) -> str:
        parts = [
            f"{name} {value}" for name, value in (("cosine", self.cosine), ("top1", self.top1)) if value is not None
        ]
        return " and ".join(parts) or "exact"


@dataclass(frozen=True)
class ExportOptions:
    """Options to make a bundle of a model.

    With `passes` None, the preset runs; an empty text means no pass.

    Attributes:
        if_changed: build only if something changed since the bundle at `output` was built, and replace that.
        given: the options that shape the bundle and aren't files, by their long names, as the user wrote them.
    """

    model: str
    output: Path
    name: str | None = None
    inputs: tuple[str, ...] = ()
    input_files: tuple[Path, ...] = ()
    weights: Path | None = None
    passes: str | None = None
    formats: tuple[str, ...] = DEFAULT_FORMATS
    device: str = "auto"
    reference_device: str | None = None
    require_gpu: bool = False
    batch_sizes: tuple[int, ...] | None = None
    static_batch: bool = False
    dynamic: dict[str, dict[int, str | None]] | None = None
    input_names: tuple[str, ...] | None = None
    output_names: tuple[str, ...] | None = None
    opset: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    force: bool = False
    seed: int = 0
    debug_dir: Path | None = None
    profile_dir: Path | None = None
    atol: Tolerance = None
    rtol: Tolerance = None
    row_independence: bool = False
    effort: Effort = "normal"
    bench: bool = True
    tune: bool | None = None
    tune_seconds: float = 120.0
    accuracy: str = "exact"
    finite_inputs: bool = False
    calibration: Path | None = None
    choices: Path | None = None
    if_changed: bool = False
    given: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class DiagnoseOptions:
    """Options to diagnose a model.

    Attributes:
        load: what model to load, and where to run it.
        fail_on: the lowest level of findings that is a failure; None for no failure.
    """

    load: ExportOptions
    fail_on: str | None = None


@dataclass(frozen=True)
class VerifyOptions:
    """Options to verify a bundle again.

    Attributes:
        expect: the SHA-256 that the bundle's SHA256SUMS must have.
        run: False checks hashes and golden data, and loads no model file.
    """

    bundle: Path
    device: str = "auto"
    require_gpu: bool = False
    expect: str | None = None
    run: bool = True


@dataclass(frozen=True)
class BenchOptions:
    """Options to time the files of a bundle."""

    bundle: Path
    device: str = "auto"


@dataclass(frozen=True)
class RejudgeOptions:
    """Options to judge the measurements of a bundle again; `factor` None means the factor that the export allowed."""

    bundle: Path
    atol: Tolerance = None
    rtol: Tolerance = None
    factor: float | None = None


@dataclass(frozen=True)
class LayoutOptions:
    """Options to write an artifact of a bundle into a model repository; `format` None means the recommended one."""

    bundle: Path
    output: Path
    format: str | None = None


@dataclass(frozen=True)
class ListOptions:
    """Options to list the available passes."""


@dataclass(frozen=True)
class AllOptions:
    """Options to build several models.

    Attributes:
        commands: the arguments of the command that builds each model, by its name.
        jobs: how many are built at the same time.
    """

    commands: dict[str, list[str]]
    jobs: int = 1


Options = (
    ExportOptions | AllOptions | DiagnoseOptions | VerifyOptions | BenchOptions | RejudgeOptions | LayoutOptions
    | ListOptions
)  # fmt: skip


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """Parse `"1,2,3,5,8"`; raise `UsageError` unless all are different whole numbers from 1 to 2**20."""
    return _different("--batch-sizes", [_batch_size(part) for part in _parts("--batch-sizes", text)])


def parse_accuracy(given: object) -> AccuracyBudget:
    """Parse "exact", a cosine such as 0.999 or "0.999", "top1=0.99", or several parts separated by commas.

    Raises:
        UsageError: it is none of these, or a number isn't above 0 and below 1.
    """
    if given == "exact":
        return AccuracyBudget()
    found: dict[str, float] = {}
    for part in str(given).split(","):
        name, _, number = part.strip().rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name not in ("", "cosine", "top1") or not 0 < value < 1:
            raise UsageError(
                f"accuracy {given!r} isn't a budget: use exact, a cosine above 0 and below 1 such as 0.999, or top1=0.99."
            )
        if (name or "cosine") in found:
            raise UsageError(f"accuracy {given!r} has two values for {name or 'cosine'}.")
        found[name or "cosine"] = value
    return AccuracyBudget(**found)


def parse_seconds(text: str) -> float:
    """Parse the time for tuning; raise `UsageError` unless it is a number above 0."""
    return _above_zero("--tune-seconds", text, "for example --tune-seconds 60")


def parse_seed(text: str) -> int:
    """Parse a seed; raise `UsageError` unless it is a whole number that torch's generators accept."""
    if not (_is_number(text) and int(text) < 2**63):
        raise UsageError(f"--seed: {text!r} is not a whole number from 0 to {2**63 - 1}.")
    return int(text)


def parse_opset(text: str) -> int:
    """Parse a whole number; raise `UsageError` for anything else.

    Only torch and onnxruntime know which opsets exist.
    """
    if not _is_number(text):
        raise UsageError(f"--opset: {text!r} is not a whole number; use one such as 17.")
    return int(text)


def parse_metadata(texts: Sequence[str]) -> dict[str, str]:
    """Parse `["author=Jane"]` to texts by key; raise `UsageError` for a missing key or value, or a repeated key."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals and key.strip():
            raise UsageError(f"--metadata {text!r} has no value; add one, such as --metadata {key.strip()}=Jane.")
        if not key.strip():
            raise UsageError(f"--metadata {text!r} has no key; add one, such as --metadata author=Jane.")
        if key in found:
            raise UsageError(f"--metadata sets {key} twice.")
        found[key] = value
    return found


def parse_names(option: str, text: str) -> tuple[str, ...]:
    """Parse `"a,b"`; raise `UsageError` for an empty or repeated name."""
    return _different(option, _parts(option, text))


def parse_tolerance(option: str, texts: Sequence[str]) -> Tolerance:
    """Parse `["1e-3"]` to a number, and `["logits=1e-3", "boxes=0.1"]` to numbers by output; None if there is no text.

    Raises:
        UsageError: a value isn't a finite number of at least 0, an output is repeated, or a number for all outputs
            comes with a number for one output.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        name = name.strip()
        if equals and not name:
            raise UsageError(f"{option} {text!r} names no output; use for example {option} logits=1e-3.")
        if name in found:
            raise UsageError(f"{option} is given twice for {name or 'all outputs'}.")
        found[name] = _tolerance(option, value)
    if "" in found and len(found) > 1:
        named = next(name for name in found if name)
        raise UsageError(f"{option} is set for all outputs and for {named}: use one number for all, or one for each.")
    return found.get("", found or None)


def _tolerance(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(
            f"{option}: {text!r} is not a number of 0 or more; use for example {option} 1e-3 or logits=1e-3."
        )
    return value


def parse_factor(text: str) -> float:
    """Parse a finite number above 0; raise `UsageError` for anything else."""
    return _above_zero("--factor", text, "one such as 2")


def _above_zero(option: str, text: str, advice: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{option}: {text!r} is not a number above 0; use {advice}.")
    return value


def parse_dynamic(texts: Sequence[str]) -> dict[str, dict[int, str | None]] | None:
    """Parse the open dims of the inputs; None if there is no text.

    `["x:0,2"]` gives {"x": {0: None, 2: None}}, and `["x:0=batch,2=time"]` gives {"x": {0: "batch", 2: "time"}}.

    Raises:
        UsageError: a text has no input or no dim, a dim isn't a whole number of at least 0, the name of a size isn't an
            identifier, or a dim is repeated.
    """
    found: dict[str, dict[int, str | None]] = {}
    for text in texts:
        name, colon, dims = text.rpartition(":")
        name = name.strip()
        if not colon or not name or not dims.strip():
            raise UsageError(f"--dynamic {text!r} opens no dim: pass an input and its dims, such as --dynamic x:0,2.")
        for part in _parts("--dynamic", dims):
            number, equals, size = (piece.strip() for piece in part.partition("="))
            if not _is_number(number):
                raise UsageError(
                    f"--dynamic {text!r}: {number!r} is not a dim; dims are whole numbers, counted from 0."
                )
            if equals and not size.isidentifier():
                raise UsageError(f"--dynamic {text!r}: {size!r} is not a name for a size; use a word such as 2=time.")
            if int(number) in found.setdefault(name, {}):
                raise UsageError(f"--dynamic lists dim {int(number)} of {name} twice.")
            found[name][int(number)] = size or None
    return found or None


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


def check_numbers(seed: object, batch_sizes: Any) -> None:
    """Check the numbers in a call from Python; `batch_sizes` may be None.

    Raises:
        UsageError: the seed isn't a whole number, or `batch_sizes` isn't a sequence of whole numbers of at least 1.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError(f"seed must be a whole number, not {seed!r}.")
    if batch_sizes is None:
        return
    listed = isinstance(batch_sizes, Sequence) and not isinstance(batch_sizes, str)
    if not listed or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in batch_sizes):
        raise UsageError(
            f"batch_sizes must be a list of whole numbers of 1 or more, such as (1, 2, 8), not {batch_sizes!r}."
        )


def is_to_be_timed(bench: object) -> bool:
    """Whether to time files: as `bench` says; for None, unless OPTIMIZE_EXPORT_NO_BENCH is set.

    Raises:
        UsageError: `bench` is neither a bool nor None.
    """
    if bench is None:
        return not os.environ.get(NO_BENCH)
    if not isinstance(bench, bool):
        raise UsageError(f"bench must be True, False or None, not {bench!r}.")
    return bench


def is_to_be_tuned(
    bench: object, tune: object, seconds: object, accuracy: object, calibration: object, choices: object
) -> bool:
    """Check the arguments of `export` that choose what to ship, and return whether to tune.

    An accuracy budget implies tuning, unless earlier choices are taken.

    Raises:
        UsageError: the time isn't a number above 0, two arguments contradict each other, or one has no effect without
            another.
    """
    if tune is not None and not isinstance(tune, bool):
        raise UsageError(f"tune must be True, False or None, not {tune!r}.")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UsageError(f"The time for tuning must be a number of seconds above 0, not {seconds!r}.")
    if tune and choices is not None:
        raise UsageError("Tuning and choices contradict each other: choices are taken without timing.")
    is_exact = parse_accuracy(accuracy).is_exact
    if calibration is not None and is_exact:
        raise UsageError(
            "Calibration data have an effect only with an accuracy budget: add one, such as `accuracy=0.999`."
        )
    tuned = bool(tune) or (not is_exact and choices is None)
    if tuned and tune is False:
        raise UsageError("An accuracy budget has an effect only with tuning or choices: leave out `tune=False`.")
    if tuned and bench is False:
        why = "Tuning times" if tune else "An accuracy budget implies tuning, which times"
        raise UsageError(f"{why} the files: leave out `bench=False`.")
    return tuned


def check_effort(effort: object) -> None:
    """Raise `UsageError` for an unknown effort."""
    if effort not in get_args(Effort):
        raise UsageError(f"effort must be 'quick', 'normal' or 'thorough', not {effort!r}.")


def is_utf8(text: str) -> bool:
    """Whether an argument or path of the system is UTF-8; Python decodes other bytes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parts(option: str, text: str) -> list[str]:
    if not is_utf8(text):
        raise UsageError(f"{option} {text!r} isn't UTF-8.")
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{option} {text!r} has an empty entry; separate the entries by single commas.")
    return parts


def _is_number(text: str) -> bool:
    # Python refuses to parse a number with thousands of digits.
    return text.isascii() and text.isdigit() and len(text) < 100


def _batch_size(text: str) -> int:
    if not (_is_number(text) and 1 <= int(text) <= _LARGEST_BATCH):
        raise UsageError(
            f"--batch-sizes: {text!r} is not a whole number from 1 to {_LARGEST_BATCH}; use for example 1,2,3,5,8."
        )
    return int(text)


def _different(option: str, values: Sequence[_Value]) -> tuple[_Value, ...]:
    twice = [str(value) for value in dict.fromkeys(values) if list(values).count(value) > 1]
    if twice:
        raise UsageError(f"{option} has {', '.join(twice)} twice.")
    return tuple(values)


def refuse_missing_weights(path: Path) -> None:
    """Raise `LoadError` if the path, without the key after a colon, isn't a file."""
    path, _ = split_weights(path)
    if not path.is_file():
        kind = (
            "is a folder; use the file in it"
            if path.is_dir()
            else "is not a file"
            if path.exists()
            else "doesn't exist"
        )
        raise LoadError(f"The weights file {path} {kind}.")


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


def check_debug_folder(directory: str | Path | None) -> None:
    """Check that nothing exists at the path and that it is UTF-8.

    Raises:
        UsageError: a file or folder exists there, or the path isn't UTF-8.
    """
    _check_new_folder(directory, "debugging")


def check_profile_folder(directory: str | Path | None, *others: str | Path | None) -> None:
    """Check that nothing exists at the path, that it is UTF-8, and that it isn't inside of the other folders.

    Raises:
        UsageError: a file or folder exists there, the path isn't UTF-8, or it is in one of the others.
    """
    _check_new_folder(directory, "the profile")
    for other in others:
        if directory is not None and other is not None and _real(directory).is_relative_to(_real(other)):
            raise UsageError(f"{directory} is in the folder {other}, which has other files: use another folder.")


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _check_new_folder(directory: str | Path | None, purpose: str) -> None:
    if directory is not None and os.path.lexists(directory):
        raise UsageError(f"{directory} already exists: choose a new folder for {purpose}, or delete it.")
    if directory is not None and not is_utf8(str(directory)):
        raise UsageError(f"{directory} isn't UTF-8, which the libraries that write there need: use another path.")
