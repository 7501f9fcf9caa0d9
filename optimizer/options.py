"""What the user may ask for: each setting with its type, default, help line and check, spelled once.

The options of the command, the keys of a config, the arguments of `export`, the record that `--if-changed` compares and
the reference in docs/options.md come from the fields of these dataclasses. Nothing here needs torch or click.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from optimize_export.arguments import parse_digest
from optimize_export.errors import UsageError
from optimizer.option_texts import (
    Tolerance,
    above_zero,
    file_ending,
    number_in,
    parse_batch_sizes,
    parse_cluster,
    parse_duration,
    parse_dynamic,
    parse_files,
    parse_metadata,
    parse_names,
    parse_passes,
    parse_sets,
    parse_shard,
    parse_size,
    parse_tolerance,
    path_of,
    whole_number,
)

# The command's own stage, which comes before the stages of the library.
LOAD_STAGE = "load"
# The environment variable that leaves out the timing of files.
NO_BENCH = "OPTIMIZE_EXPORT_NO_BENCH"

Effort = Literal["quick", "normal", "thorough"]
"""Number of runs that a proof takes."""

# The groups of the help and of the reference, in their order.
GROUPS = {
    "build": "The config",
    "model": "The model and its inputs",
    "shapes": "Shapes and names",
    "proof": "The proof",
    "speed": "Speed",
    "output": "Output",
}


# The declaration of a setting -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """How the command line and a config spell a setting; its default is that of the dataclass field."""

    help: str
    """One short line."""
    group: str
    """One of `GROUPS`."""
    metavar: str = ""
    """What the help calls its value; "" for a flag."""
    more: str = ""
    """Further sentences, for `--help-all` and the reference."""
    common: bool = False
    """Whether `--help` shows it; `--help-all` shows all."""
    names: tuple[str, ...] = ()
    """Instead of `--` and the name of the field."""
    parse: Callable[[str, Any], Any] | None = None
    """Makes the value from the option's name and its text, or its texts if it is repeated; None keeps the text."""
    repeated: bool = False
    choices: tuple[str, ...] = ()
    default_text: str = ""
    """What the help calls the default, if the field's doesn't say it."""
    flags: Mapping[str, tuple[Any, str, str]] = field(default_factory=dict)
    """Instead of an option with a value: flags, each with the value that it stands for, its help line and `more`."""
    recorded: bool = True
    """Whether `--if-changed` compares its text. Files are compared by their content instead."""


def option(help: str, group: str, **settings: Any) -> dict[str, Option]:
    """The metadata of a dataclass field that is an option."""
    return {"option": Option(help, group, **settings)}


def options_of(cls: type) -> dict[str, tuple[Field[Any], Option]]:
    """The fields of a dataclass that are options, by their names."""
    return {each.name: (each, each.metadata["option"]) for each in fields(cls) if "option" in each.metadata}


# The settings of an export ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AccuracyBudget:
    """How much accuracy a lossy route may cost; with nothing set, only rounding is allowed."""

    cosine: float | None = None
    """The least cosine of any output at any call."""
    top1: float | None = None
    """The least top-1 agreement of any output at any call."""
    drop: float | None = None
    """The largest drop of the user's metric."""
    confidence: float | None = None
    """How sure the bound of the drop must be; None without a drop."""
    percent: bool = False
    """Whether the user gave the drop in percent, so that it is told in points."""

    @property
    def is_exact(self) -> bool:
        return self.cosine is None and self.top1 is None and self.drop is None

    def to_json(self) -> dict[str, Any]:
        """The fields for the manifest; those of a drop only where there is one."""
        kept = ("cosine", "top1") if self.drop is None else tuple(each.name for each in fields(self))
        return {name: getattr(self, name) for name in kept}

    def __str__(self) -> str:
        parts = [
            f"{name} {value}" for name, value in (("cosine", self.cosine), ("top1", self.top1)) if value is not None
        ]
        if self.drop is not None:
            sure = f" at {100 * self.confidence:g} %" if self.confidence else ""
            parts.append(f"drop {points(self.drop, percent=self.percent)}{sure}")
        return " and ".join(parts) or "exact"


def points(amount: float, *, percent: bool) -> str:
    """An amount of a metric as text: "0.41 points" are 0.0041, or the number itself."""
    return f"{100 * amount:.3g} points" if percent else f"{amount:.3g}"


# fmt: off
# The options that several commands have.
_DEVICE = option(
    "Where the files run: auto, cpu or cuda.", "output", metavar="DEVICE", common=True,
    choices=("auto", "cpu", "cuda"),
)
_REQUIRE_GPU = option("Fail if there is no GPU, instead of checking on the CPU.", "output")
_ATOL = option(
    "Tolerance instead of the noise: 1e-3 or logits=1e-3.", "proof", metavar="TOL", common=True, repeated=True,
    parse=parse_tolerance,
    more="Allow |file - original| <= atol + rtol * |original| instead of the measured noise.",
)
_RTOL = option(
    "Relative part of that tolerance, in the same form; the part that isn't set is 0.", "proof", metavar="TOL",
    repeated=True, parse=parse_tolerance,
)
_JUNIT = option(
    "Also write the result as JUnit XML.", "output", metavar="FILE", parse=file_ending(".xml"),
    more="An earlier file is removed at the start. It gets an error too.",
)
_SARIF = option(
    "Also write the result as SARIF 2.1.0.", "output", metavar="FILE", parse=file_ending(".sarif", ".sarif.json"),
    more="An earlier file is removed at the start. It gets an error too.",
)


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What `export` takes besides the model and its inputs; its docstring explains each."""

    output: Path = field(metadata=option(
        "Folder of the bundle.", "output", metavar="DIR", common=True, parse=path_of("folder"),
        default_text="dist/ and the name of the file or of the library model", recorded=False,
    ))
    formats: Sequence[str] = field(default=("torchscript", "onnx"), metadata=option(
        "Formats: torchscript, onnx, pt2, aoti.", "output", metavar="LIST", common=True, parse=parse_names,
    ))
    batch_sizes: Sequence[int] | None = field(default=None, metadata=option(
        "Batch sizes at which the files are compared.", "shapes", metavar="LIST", parse=parse_batch_sizes,
        default_text="1,2,3,5,8; for large inputs 1,2,3",
    ))
    static_batch: bool = field(default=False, metadata=option(
        "Fix the batch size to that of the example inputs.", "shapes", common=True,
    ))
    dynamic: Mapping[str, Any] | None = field(default=None, metadata=option(
        "Dynamic dims of an input: ids:0=batch,1=time.", "shapes", metavar="DIMS", common=True, repeated=True,
        parse=parse_dynamic, default_text="dim 0",
        more="By its name in the files, instead of dim 0: x:0,2, or with names x:0=batch,2=time. Dims with the same "
        "name have the same size.",
    ))
    input_names: Sequence[str] | None = field(default=None, metadata=option(
        "Names of the inputs in the files.", "shapes", metavar="LIST", parse=parse_names,
        default_text="from forward's signature",
    ))
    output_names: Sequence[str] | None = field(default=None, metadata=option(
        "Names of the outputs in the files.", "shapes", metavar="LIST", parse=parse_names,
        default_text="from the output's keys",
    ))
    opset: int | None = field(default=None, metadata=option(
        "Opset version of the ONNX file.", "output", metavar="N", parse=whole_number(0, 1 << 31, "17"),
        default_text="torch's",
    ))
    metadata: Mapping[str, str] | None = field(default=None, metadata=option(
        "Add a text to every file, such as author=Jane.", "output", metavar="KEY=VALUE", repeated=True,
        parse=parse_metadata,
    ))
    device: str = field(default="auto", metadata=_DEVICE)
    reference_device: str | None = field(default=None, metadata=option(
        "Where the original runs: cpu or cuda, instead of where the files run.", "proof", metavar="DEVICE",
        choices=("cpu", "cuda"),
    ))
    require_gpu: bool = field(default=False, metadata=_REQUIRE_GPU)
    force: bool = field(default=False, metadata=option(
        "Replace the bundle that is at --output.", "output", common=True, recorded=False,
    ))
    strict: bool = field(default=False, metadata=option(
        "Fail if a pass or a format fails.", "proof", common=True,
        more="Also if a pass is rolled back. Nothing is published if a format is missing.",
    ))
    atol: Tolerance = field(default=None, metadata=_ATOL)
    rtol: Tolerance = field(default=None, metadata=_RTOL)
    row_independence: bool = field(default=False, metadata=option(
        "Also check that each row of the outputs is independent of the other rows of its batch.", "proof",
    ))
    effort: Effort = field(default="normal", metadata=option(
        "Number of runs of the proof.", "proof", common=True,
        flags={
            "quick": (
                "quick", "Prove with fewer runs; the manifest says so.",
                "Files are compared at two batch sizes, and rounding noise is measured at one.",
            ),
            "thorough": (
                "thorough", "Prove with more runs.",
                "Files are compared with three samples of the inputs at each batch size, and noise is measured at all.",
            ),
        },
    ))
    bench: bool | None = field(default=None, metadata=option(
        "Whether to time the files.", "speed",
        flags={
            "no-bench": (False, "Don't time the files next to the original, and recommend none.", ""),
        },
    ))
    tune: bool | None = field(default=None, metadata=option(
        "Try every runtime and its settings; recommend the best.", "speed", common=True,
        more="Lossy precisions are tried within --accuracy.",
    ))
    tune_seconds: float = field(default=120.0, metadata=option(
        "About how long --tune may take.", "speed", metavar="N", parse=above_zero, default_text="120",
    ))
    accuracy: str | float = field(default="exact", metadata=option(
        'Budget of lossy files: exact, 0.999, "drop<=0.5%".', "speed", metavar="BUDGET", common=True,
        more="A number is the least cosine of any output, top1=0.99 the least share of rows with the same largest score. "
        "drop<=0.5% is the largest drop of your own metric, which the file's evaluate(run) computes. Implies --tune, unless "
        "there are --choices.",
    ))
    confidence: str | float = field(default="95%", metadata=option(
        "How sure the bound of the drop must be.", "speed", metavar="LEVEL",
        more="The chance that a file which drops more is shipped is at most the rest, such as 5 %. With --accuracy "
        '"drop<=0.5%".',
    ))
    finite_inputs: bool = field(default=False, metadata=option(
        "Inputs never have NaN or infinity, so a file that computes something else for them may be recommended.",
        "speed",
    ))
    choices: Path | None = field(default=None, metadata=option(
        "Ship what this tuned bundle recommends, proven again but without timing.", "speed", metavar="BUNDLE",
        parse=path_of("bundle"), recorded=False,
    ))
    seed: int = field(default=0, metadata=option(
        "Seed for all random values.", "proof", metavar="N", parse=whole_number(0, 2**63 - 1, "7"), default_text="0",
    ))
    debug_dir: Path | None = field(default=None, metadata=option(
        "New folder for reproductions of files that differ.", "proof", metavar="DIR", parse=path_of("folder"),
        recorded=False,
    ))
    profile_dir: Path | None = field(default=None, metadata=option(
        "Profile the original, the optimized model and the ONNX file, into this new folder.", "speed", metavar="DIR",
        parse=path_of("folder"), recorded=False,
    ))

    # fmt: on
    @property
    def budget(self) -> AccuracyBudget:
        return parse_accuracy(self.accuracy, self.confidence)

    def check(self, calibration: object = None) -> None:
        """Raise `UsageError` if a value is invalid, two contradict each other, or one has no effect without another."""
        if self.effort not in get_args(Effort):
            raise UsageError(f"effort must be 'quick', 'normal' or 'thorough', not {self.effort!r}.")
        is_to_be_timed(self.bench)
        if self.tune is not None and not isinstance(self.tune, bool):
            raise UsageError(f"tune must be True, False or None, not {self.tune!r}.")
        seconds: object = self.tune_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise UsageError(f"The time for tuning must be a number of seconds above 0, not {seconds!r}.")
        budget, default = self.budget, next(each for each in fields(ExportSettings) if each.name == "confidence").default
        if budget.drop is None and self.confidence != default:
            raise UsageError('The confidence has an effect only with a budget such as `accuracy="drop<=0.5%"`: add one.')
        if self.tune and self.choices is not None:
            raise UsageError("Tuning and choices contradict each other: choices are taken without timing.")
        if calibration is not None and budget.is_exact:
            raise UsageError(
                "Calibration data have an effect only with an accuracy budget: add one, such as `accuracy=0.999`."
            )
        if self.tunes and self.tune is False:
            raise UsageError("An accuracy budget has an effect only with tuning or choices: leave out `tune=False`.")
        if self.tunes and self.bench is False:
            why = "Tuning times" if self.tune else "An accuracy budget implies tuning, which times"
            raise UsageError(f"{why} the files: leave out `bench=False`.")

    @property
    def tunes(self) -> bool:
        """Whether to tune: an accuracy budget implies it, unless earlier choices are taken."""
        return bool(self.tune) or (not self.budget.is_exact and self.choices is None)


def parse_accuracy(given: object, confidence: object = "95%") -> AccuracyBudget:
    """Parse "exact", a cosine such as 0.999 or "0.999", "top1=0.99", "drop<=0.5%", or several parts separated by commas.

    Args:
        confidence: of the bound of a drop, such as "95%" or 0.95.
    """
    if given == "exact":
        return AccuracyBudget()
    sure = _share(confidence)
    if not 0.5 <= sure < 1:
        raise UsageError(f"The confidence must be from 50% to below 100%, such as 95%, not {confidence!r}.")
    found: dict[str, Any] = {}
    for part in str(given).split(","):
        spelled, _, number = part.strip().rpartition("=")
        name = {"": "cosine", "cosine": "cosine", "top1": "top1", "drop<": "drop"}.get(spelled)
        value = _share(number) if name == "drop" else number_in(number)
        if name is None or not 0 < value < (math.inf if name == "drop" else 1):
            raise UsageError(
                f"accuracy {given!r} isn't a budget: use exact, a cosine above 0 and below 1 such as 0.999, top1=0.99 or "
                "drop<=0.5%."
            )
        if name in found:
            raise UsageError(f"accuracy {given!r} has two values for {name}.")
        found[name] = value
        if name == "drop":
            found |= {"confidence": sure, "percent": number.strip().endswith("%")}
    return AccuracyBudget(**found)


def _share(given: object) -> float:
    """A number, or a text with a number or a percentage; NaN for anything else."""
    text = str(given).strip()
    return number_in(text.removesuffix("%")) / 100 if text.endswith("%") else number_in(text)


def is_to_be_timed(bench: object) -> bool:
    """Whether to time files: as `bench` says; for None, unless OPTIMIZE_EXPORT_NO_BENCH is set."""
    if bench is None:
        return not os.environ.get(NO_BENCH)
    if not isinstance(bench, bool):
        raise UsageError(f"bench must be True, False or None, not {bench!r}.")
    return bench


def check_new_folder(directory: str | Path | None, purpose: str, *others: str | Path | None) -> None:
    """Check that nothing exists at the path, if any, and that it isn't inside of the other folders.

    Raises:
        UsageError: a file or folder exists there, or it is in one of the others.
    """
    if directory is None:
        return
    if os.path.lexists(directory):
        raise UsageError(f"{directory} already exists: choose a new folder for {purpose}, or delete it.")
    for other in others:
        if other is not None and Path(os.path.realpath(directory)).is_relative_to(os.path.realpath(other)):
            raise UsageError(f"{directory} is in the folder {other}, which has other files: use another folder.")


# fmt: off
# The commands -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ExportSettings):
    """Make a bundle of a model: the settings of `export`, and what the command loads."""

    model: str
    """MODEL."""
    name: str | None = field(default=None, metadata=option(
        "The model in the file: an instance, a class or a factory.", "model", names=("--model",), metavar="NAME",
        recorded=False,
    ))
    inputs: tuple[str, ...] = field(default=(), metadata=option(
        "An example input, such as 2x3x224x224.", "model", names=("--input",), metavar="SPEC", common=True,
        repeated=True, default_text="example_inputs or get_example_inputs() of the file",
        more="Also float32[2,3], x=float32[2,3]:-1..1 or ids=int64[2,128]:0..30000; repeat for each argument.",
    ))
    input_files: tuple[Path, ...] = field(default=(), metadata=option(
        "A call from a file: .safetensors, .npz, image, text.", "model", names=("--inputs",), metavar="FILE",
        common=True, repeated=True, parse=parse_files, recorded=False,
        more="Its tensors are named after forward's arguments, or by position (0, 1, ...); images and .txt files are "
        "for library models. The first file has the example inputs; further files are checked as they are.",
    ))
    weights: Path | None = field(default=None, metadata=option(
        "Weights: .safetensors, or a state dict.", "model", metavar="FILE", common=True, parse=path_of("file"),
        recorded=False,
        more="A state dict has the suffix .pt, .pth, .bin or .ckpt; w.pt:net takes the key net in it.",
    ))
    passes: str | None = field(default=None, metadata=option(
        "Passes in order; none disables all passes.", "model", metavar="LIST", common=True, parse=parse_passes,
        default_text="the preset",
        more="Such as fold-conv-bn,channels-last; options follow a name after colons.",
    ))
    calibration: Path | None = field(default=None, metadata=option(
        "Typical inputs for int8: a file or a folder.", "speed", metavar="PATH", common=True, parse=path_of("file"),
        recorded=False,
        more=".safetensors or .npz files, or images and .txt files for a library model. With --accuracy.",
    ))
    if_changed: bool = field(default=False, metadata=option(
        "Build only if something changed since the last build.", "output", common=True, recorded=False,
        more="Compares the model, its files, options and versions with those of the bundle at --output.",
    ))
    given: dict[str, Any] = field(default_factory=dict, compare=False)
    """The options that shape the bundle and aren't files, by their long names, as the user wrote them."""

    def settings(self) -> dict[str, Any]:
        """The arguments of `export` that are settings, by their names."""
        return {each.name: getattr(self, each.name) for each in fields(ExportSettings)}


@dataclass(frozen=True)
class DiagnoseOptions:
    """Diagnose a model."""

    load: ExportOptions
    """What model to load, and where to run it."""
    fail_on: str | None = field(default=None, metadata=option(
        "Exit with 10 if there is a finding of this level or a higher one.", "output", metavar="LEVEL", common=True,
        choices=("error", "warning", "note"),
    ))
    junit: Path | None = field(default=None, metadata=_JUNIT)
    sarif: Path | None = field(default=None, metadata=_SARIF)


DIAGNOSED = ("name", "inputs", "input_files", "weights", "device", "require_gpu", "seed")
"""The options of an export that say what model to load, and where to run it."""


@dataclass(frozen=True)
class TuneTrainingOptions:
    """Tune a training step."""

    load: ExportOptions
    """What model to load, and where to run it."""
    output: Path | None = field(default=None, metadata=option(
        "New folder for the report, the choices and all figures.", "output", metavar="PATH", common=True,
        parse=path_of("folder"), more="A path that ends with .html, .toml or .json is that file alone.",
    ))
    memory: int | None = field(default=None, metadata=option(
        "Find the largest batch within this memory: 16GiB.", "speed", metavar="SIZE", common=True, parse=parse_size,
        more="Of a whole step, without and with checkpoints; also the limit for --batch-size.",
    ))
    batch_size: int | None = field(default=None, metadata=option(
        "Rows of an optimizer step that you wish to train with.", "speed", metavar="N", common=True,
        parse=whole_number(1, 1 << 31, "256"), default_text="those of the batch",
    ))
    tune_seconds: float = field(default=180.0, metadata=option(
        "About how long tuning may take.", "speed", metavar="N", common=True, parse=above_zero, default_text="180",
    ))
    steps: int = field(default=0, metadata=option(
        "Also compare the losses after this many steps.", "proof", metavar="N", common=True,
        parse=whole_number(0, 1 << 20, "50"), default_text="0",
        more="For choices that change precision, over 3 seeds.",
    ))
    curve: bool = field(default=False, metadata=option(
        "Also measure the time of the step in less and less memory.", "speed", common=True,
        more="With our checkpoints, uniform ones, and torch.compile's own budget.",
    ))


@dataclass(frozen=True)
class VerifyOptions:
    """Verify a bundle again."""

    bundle: Path
    device: str = field(default="auto", metadata=_DEVICE)
    require_gpu: bool = field(default=False, metadata=_REQUIRE_GPU)
    expect: str | None = field(default=None, metadata=option(
        "SHA-256 of SHA256SUMS from the builder.", "proof", metavar="SHA256", common=True, parse=parse_digest,
        more="Any other bundle is refused before it is loaded.",
    ))
    run: bool = field(default=True, metadata=option(
        "Whether to run the files.", "proof", common=True,
        flags={
            "no-run": (False, "Check hashes and golden data; load no model file.", ""),
        },
    ))
    sets: tuple[tuple[str, ...], ...] = field(default=(), metadata=option(
        "Run the files with other versions: onnxruntime==1.24.1.", "proof", names=("--with",), metavar="SET", common=True,
        repeated=True, parse=parse_sets,
        more="Requirements for pip, separated by spaces. Each set gets an environment of its own, in the cache folder of the "
        "user; repeat the option for another set.",
    ))
    seconds: float | None = field(default=None, metadata=option(
        "About how long each file is measured in each set.", "speed", metavar="N", common=True, parse=above_zero,
        default_text="10; goes with --with",
    ))
    junit: Path | None = field(default=None, metadata=_JUNIT)
    sarif: Path | None = field(default=None, metadata=_SARIF)


@dataclass(frozen=True)
class BenchOptions:
    """Time the files of a bundle."""

    bundle: Path
    device: str = field(default="auto", metadata=_DEVICE)
    soak: float | None = field(default=None, metadata=option(
        "Call the recommended file for this time, and tell whether memory grows: 10m.", "speed", metavar="TIME", common=True,
        parse=parse_duration,
    ))
    throughput: bool = field(default=False, metadata=option(
        "Find the settings of the most calls a second.", "speed", common=True,
        more="On the CPU, with the recommended file, for `load(bundle, batching=True)`.",
    ))
    p95: float | None = field(default=None, metadata=option(
        "Limit of the 95th percentile of a call: 20ms.", "speed", metavar="TIME", common=True, parse=parse_duration,
        default_text="none; goes with --throughput",
    ))
    seconds: float | None = field(default=None, metadata=option(
        "About how long it may take.", "speed", metavar="N", common=True, parse=above_zero,
        default_text="5; with --throughput 60",
    ))
    save: bool = field(default=False, metadata=option(
        "Put the settings into the bundle's manifest.", "speed", common=True,
        more="Its SHA-256 for --expect changes. Goes with --throughput.",
    ))


@dataclass(frozen=True)
class CompareOptions:
    """Compare two bundles."""

    bundle: Path
    other: Path
    seconds: float | None = field(default=None, metadata=option(
        "About how long they are timed in turn.", "speed", metavar="N", common=True, parse=above_zero, default_text="5",
    ))


@dataclass(frozen=True)
class RejudgeOptions:
    """Judge the measurements of a bundle again."""

    bundle: Path
    atol: Tolerance = field(default=None, metadata=_ATOL)
    rtol: Tolerance = field(default=None, metadata=_RTOL)
    factor: float | None = field(default=None, metadata=option(
        "Allowed error in multiples of the noise.", "proof", metavar="K", common=True, parse=above_zero,
        default_text="4, or 16 if the original ran on another kind of device",
    ))


@dataclass(frozen=True)
class TritonOptions:
    """Write an artifact of a bundle into a model repository of Triton."""

    bundle: Path
    output: Path = field(metadata=option(
        "The model repository.", "output", metavar="DIR", common=True, parse=path_of("repository"),
    ))
    format: str | None = field(default=None, metadata=option(
        "onnx or torchscript.", "output", metavar="FORMAT", common=True, default_text="the recommended one",
    ))


@dataclass(frozen=True)
class PushOptions:
    """Push a bundle to the Hugging Face Hub."""

    bundle: Path
    repo_id: str
    private: bool = field(default=True, metadata=option(
        "Whether a new repository is private.", "output", common=True,
        flags={
            "public": (False, "Make a new repository public; it is private otherwise.", ""),
        },
    ))
    revision: str | None = field(default=None, metadata=option(
        "The branch, created if it is missing.", "output", metavar="BRANCH", common=True, default_text="main",
    ))


@dataclass(frozen=True)
class ListOptions:
    """List the available passes."""


@dataclass(frozen=True)
class BuildOptions:
    """Build several models of a config."""

    commands: dict[str, list[str]]
    """The arguments of the command that builds each model, by its name."""
    models: Mapping[str, ExportOptions]
    """The options of each model, by its name."""
    resources: Mapping[str, Mapping[str, float]]
    """The resources that each model needs of a machine, such as 1 GPU."""
    folders: Sequence[str]
    """The folders that the builds of all models of the config write. `--on` doesn't send them."""
    all: bool = field(default=False, metadata=option(
        "Build all models of the config.", "build", common=True,
    ))
    config: Path | None = field(default=None, metadata=option(
        "A TOML file with models and their options.", "build", metavar="FILE", common=True, parse=path_of("file"),
        default_text="pyproject.toml",
    ))
    jobs: int = field(default=1, metadata=option(
        "How many models to build side by side.", "build", names=("-j", "--jobs"), metavar="N", common=True,
        parse=whole_number(1, 9999, "-j 2"), default_text="1",
    ))
    shard: tuple[int, int] = field(default=(1, 1), metadata=option(
        "Build only every Nth model, from the Ith on.", "build", metavar="I/N", common=True, parse=parse_shard,
        default_text="1/1",
    ))
    on: str | None = field(default=None, metadata=option(
        "Build on a cluster: ray, or ray://HOST:PORT.", "build", metavar="CLUSTER", parse=parse_cluster,
        default_text="this machine",
        more="Each build runs on a machine with the `resources` that the config asks for. Needs the extra ray.",
    ))


@dataclass(frozen=True)
class ShowOptions:
    """What a command shows of its result."""

    details: bool = field(default=False, metadata=option(
        "Also show routes, tensors and errors of each call.", "output", common=True,
    ))
    as_json: bool = field(default=False, metadata=option(
        "Print one JSON document to stdout, also for an error.", "output", names=("--json",), common=True,
    ))
    quiet: bool = field(default=False, metadata=option(
        "Show only errors and the path of the bundle.", "output", common=True,
    ))
    debug: bool = field(default=False, metadata=option(
        "Show the traceback of an error.", "output",
    ))


# fmt: on
Options = (
    ExportOptions
    | BuildOptions
    | DiagnoseOptions
    | TuneTrainingOptions
    | VerifyOptions
    | BenchOptions
    | CompareOptions
    | RejudgeOptions
    | TritonOptions
    | PushOptions
    | ListOptions
)
