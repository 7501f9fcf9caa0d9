"""The command `optimize-export`: parses the options, shows progress and results, and sets the exit code.

Only this module prints. `_torch_side` imports torch late, so that `--help` answers at once. While the user's code runs,
everything written to stdout goes to stderr, so that stdout has only the result.
"""

import contextlib
import errno
import json
import os
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import click
from click.core import ParameterSource

from optimize_export.arguments import other_gpu, parse_digest
from optimize_export.errors import (
    BundleError,
    OptimizeExportError,
    Terminated,
    UsageError,
    all_printable,
    failure_document,
    missing_package,
    printable,
)
from optimizer.command.all_models import builds, joined, parse_jobs, parse_shard, summary
from optimizer.command.config import FOLDERS, Config, is_named, may_be_named, read_config
from optimizer.command.early_checks import check_early, check_names
from optimizer.command.option_names import all_with_options, suggestion, with_options
from optimizer.command.up_to_date import changes, up_to_date_document
from optimizer.command.user_code import import_own_packages
from optimizer.options import (
    DEFAULT_FORMATS,
    AllOptions,
    BenchOptions,
    DiagnoseOptions,
    Effort,
    ExportOptions,
    LayoutOptions,
    ListOptions,
    Options,
    RejudgeOptions,
    VerifyOptions,
    default_output,
    is_to_be_tuned,
    parse_batch_sizes,
    parse_dynamic,
    parse_factor,
    parse_metadata,
    parse_names,
    parse_opset,
    parse_seconds,
    parse_seed,
    parse_tolerance,
)

if TYPE_CHECKING:
    from optimizer.report import Progress

PROGRAM = "optimize-export"
AnyWork = ExportOptions | DiagnoseOptions | VerifyOptions | BenchOptions | RejudgeOptions | LayoutOptions | ListOptions
# How libraries say that memory is lacking, in lower case.
_MEMORY_ERRORS = (
    "cannot allocate memory",
    "can't allocate memory",
    "failed to map segment",
    "bad_alloc",
    "bad allocation",
)
_OUT_OF_MEMORY = "Out of memory: this machine, or a limit such as ulimit -v, leaves too little for torch and the model."
EXIT_DEFECT, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143

_MODES = {
    "verify": "--verify", "bench": "--bench", "rejudge": "--rejudge", "layout": "--layout",
    "list_passes": "--list-passes", "diagnose": "--diagnose",
}  # fmt: skip
_COMMON = {"as_json", "quiet", "debug"}
_ALL = {"all_models", "jobs", "shard", "config"}
# The options that a model of a config can't have: those of other commands, and of what is shown.
_NOT_IN_CONFIG = {
    *_COMMON,
    *_MODES,
    *_ALL,
    "name",
    "details",
    "expect",
    "no_run",
    "fail_on",
    "factor",
    "version",
    "help",
}
# The options that don't shape the bundle, or name files, which are compared by their content.
_FILES = {"output", "debug_dir", "profile_dir", "weights", "input_files", "calibration", "choices"}
_NOT_RECORDED = {*_COMMON, *_ALL, *_FILES, "details", "name", "force", "if_changed"}
_ALLOWED = {
    "verify": _COMMON | {"verify", "device", "require_gpu", "details", "expect", "no_run"},
    "bench": _COMMON | {"bench", "device"},
    "rejudge": _COMMON | {"rejudge", "atol", "rtol", "factor", "details"},
    "layout": _COMMON | {"layout", "model", "output", "formats"},
    "list_passes": _COMMON | {"list_passes"},
    "diagnose": _COMMON
    | {"diagnose", "fail_on", "model", "name", "inputs", "input_files", "weights", "device", "require_gpu", "seed"},
}

_EPILOG = """
\b
Examples:
  optimize-export model.py
  optimize-export timm:resnet50 --inputs photo.jpg
  optimize-export transformers:bert-base-uncased
  optimize-export model.py:build_model --input 2x3x224x224 --output dist/net
  optimize-export models.bert:tiny --input ids=int64[2,128]:0..30000
  optimize-export models.bert:tiny --dynamic ids:0=batch,1=time --dynamic mask:0=batch,1=time
  optimize-export model.py --weights net.safetensors --passes fold-conv-bn,channels-last
  optimize-export --all --if-changed -j 2
  optimize-export --diagnose model.py --fail-on error
  optimize-export --verify dist/net
  optimize-export --bench dist/net
  optimize-export --rejudge dist/net --atol logits=1e-3
  optimize-export --layout triton dist/net --output models

\b
Inputs (--input), one for each argument of forward:
  2x3x224x224                 float32, standard normal
  float32[2,3,224,224]        any torch dtype, also f16, bf16, i64, ...; float32[] is a scalar
  x=float32[2,3]:-1..1        a keyword argument, evenly between -1 and 1
  ids=int64[2,128]:0..30000   integers from 0 to 29999; without a range from 0 to 9

\b
Exit codes:
  0    done
  1    a defect of the program itself, or out of memory
  2    an option, or a combination of options, is invalid
  3    the model, its weights or its inputs couldn't be loaded
  4    a requested format is missing from the bundle: it couldn't be exported, or its file isn't proven
  5    the required device is missing
  6    the files aren't proven to compute the same as the original; an export publishes nothing
  7    a pass failed or was rolled back under --strict, or a requested pass isn't available
  8    the bundle couldn't be written, read or verified
  9    the model's outputs carry no signal, so nothing could be proven
  10   --diagnose has findings of the level of --fail-on, or of a higher one
  130  interrupted (Ctrl-C); 143 if terminated
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: the arguments; None means `sys.argv[1:]`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    if exchange := sys.modules.get("optimizer.bundle.exchange"):
        exchange.published.clear()
    voice = _Voice(*(option in arguments for option in ("--json", "--quiet", "--debug", "--details")))
    with contextlib.ExitStack() as kept:
        kept.enter_context(_sigterm_unwinds())
        try:
            code = _run(arguments, voice)
        except (KeyboardInterrupt, click.Abort) as interrupt:
            code = voice.fail(EXIT_INTERRUPTED, "Interrupted", _stopped("interrupted"), interrupt)
        except Terminated as termination:
            code = voice.fail(EXIT_TERMINATED, "Terminated", _stopped("terminated"), termination)
        except click.NoSuchOption as error:
            hint = suggestion(error.option_name, _option_names()) or f"{PROGRAM} --help lists all."
            told = f"There is no option {error.option_name}: {hint}"
            code = voice.fail(EXIT_USAGE, "UsageError", told, error)
        except click.ClickException as error:
            code = voice.fail(EXIT_USAGE, "UsageError", " ".join(error.format_message().split()), error)
        except OptimizeExportError as error:
            told = with_options(str(error), _option_names())
            code = voice.fail(error.exit_code, type(error).__name__, told, error)
        except ModuleNotFoundError as error:
            lack = missing_package(error)
            code, kind = (EXIT_USAGE, "UsageError") if lack else (EXIT_DEFECT, "Defect")
            code = voice.fail(code, kind, lack or _defect(error), error)
        except BaseException as error:  # noqa: BLE001 - the last resort: a defect is also reported in one sentence
            if _lacks_memory(error):
                code = voice.fail(EXIT_DEFECT, "OutOfMemory", _OUT_OF_MEMORY, error)
            else:
                code = voice.fail(EXIT_DEFECT, "Defect", _defect(error), error)
    if argv is None:
        _silence_stdout()
        _keep_exit_code(code)
    return code


def _run(arguments: list[str], voice: "_Voice") -> int:
    options = command.main(arguments, prog_name=PROGRAM, standalone_mode=False, obj=voice)
    if isinstance(options, AllOptions):
        return _build_all(options, voice)
    if not isinstance(options, AnyWork):
        return int(options)  # --help and --version have already printed
    with _stdout_goes_to_stderr():
        document = _work(options, voice)
    told = {
        key: document[key]
        for key in ("error", "missing", "notes", "problems", "unproven", "benchmark")
        if key in document
    }
    document |= all_with_options(told, _option_names())
    code = int(document.get("exit_code", 0))
    return code if voice.show(document) else code or BundleError.exit_code


def _build_all(options: AllOptions, voice: "_Voice") -> int:
    """Build several models, and show the result of each when it ends; return the exit code."""
    documents: dict[str, dict[str, Any]] = {}

    def tell(name: str) -> None:
        if not voice.quiet:
            _say(f"building {name}")

    with contextlib.closing(builds(options, tell)) as running:
        for name, document, log in running:
            documents[name] = document
            for line in log.splitlines():
                _to_stderr(f"{name}: {line.removeprefix(f'{PROGRAM}: ')}")
            if "artifacts" in document and not (document.get("up_to_date") or voice.as_json or voice.quiet):
                _torch_side()  # the tables need it
                _print_line(f"--- {name}")
                _print_tables(document, details=voice.details)
    document = joined(documents, options.commands)
    bundles = [str(each["bundle"]) for each in document["models"].values() if "bundle" in each]
    lines = bundles if voice.quiet else summary(document)
    shown = _print_json(document) if voice.as_json else not lines or _print_line("\n".join(map(printable, lines)))
    return int(document["exit_code"]) if shown else document["exit_code"] or BundleError.exit_code


def _work(options: Options, voice: "_Voice") -> dict[str, Any]:
    with _Stages(shown=not voice.quiet) as stages:
        if isinstance(options, DiagnoseOptions) or (isinstance(options, ExportOptions) and options.profile_dir):
            # torch's profiler logs its own steps to stderr; it reads the level once.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        if isinstance(options, ExportOptions):
            check_early(options)
            changed = changes(options) if options.if_changed else []
            if options.if_changed and not changed:
                return up_to_date_document(options.output)
            if changed and not voice.quiet:
                _say(f"building {options.output}: {', '.join(changed)}")
            stages.start("importing torch and onnxruntime")
        if isinstance(options, DiagnoseOptions):
            check_early(options.load)
            stages.start("importing torch")
        engine = _torch_side()
        if isinstance(options, ListOptions):
            return dict(engine.list_passes())
        if isinstance(options, VerifyOptions):
            return dict(engine.verify(options))
        if isinstance(options, BenchOptions):
            stages.start("timing the files")
            return dict(engine.bench(options))
        if isinstance(options, RejudgeOptions):
            return dict(engine.rejudge(options))
        if isinstance(options, LayoutOptions):
            return dict(engine.lay_out(options))
        if isinstance(options, DiagnoseOptions):
            return dict(engine.diagnose_model(options, stages))
        document = dict(engine.export_model(options, stages))
        stages.finish()
        if changed:
            document |= {"up_to_date": False, "changed": changed}
        return {**document, "stages": stages.times()}


def _torch_side() -> ModuleType:
    """Import all modules of the program, including those that need torch, and return `engine`.

    After this call, the program imports none of its own modules. A user's module of the same name can't replace one.
    """
    import_own_packages()
    from optimizer.command import engine

    return engine


# The options ----------------------------------------------------------------------------------------------------------


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        versions = {"version": _installed(PROGRAM), "torch": _installed("torch")}
        context.exit(context.obj.tell(f"{PROGRAM} {versions['version']} (torch {versions['torch']})", versions))


def _help(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        text = context.get_help()
        context.exit(context.obj.tell(text, {"help": text}))


class _Flag(click.Option):
    """A flag that a config may set: `--no-NAME`, which the help leaves out, switches it off."""

    def __init__(self, names: Sequence[str], **settings: Any) -> None:
        super().__init__(names, is_flag=True, **settings)
        self.secondary_opts = [f"--no-{self.opts[-1].removeprefix('--')}"]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.opts[-1], self.help or ""


class _Device(click.Choice):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A choice of devices that says how to take a GPU by its number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if way := other_gpu(str(value)):
            self.fail(f"{value!r} is not one of {', '.join(map(repr, self.choices))}; {way}.", param, ctx)
        return super().convert(value, param, ctx)


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


@click.command(
    epilog=_EPILOG,
    context_settings={"max_content_width": 110},
    add_help_option=False,
    no_args_is_help=False,
)
@click.argument("model", required=False)
@click.option("--model", "name", metavar="NAME", help="The model in the file: an instance, a class or a factory.")
@click.option(
    "--input", "inputs", metavar="SPEC", multiple=True, help="An example input (see below); repeat for each input."
)
@click.option(
    "--inputs",
    "input_files",
    metavar="FILE",
    multiple=True,
    help="A call of the model: a .safetensors or .npz file whose tensors are named after forward's arguments, or by "
    "position (0, 1, ...); or, for a library model, an image or a .txt file. The first file has the example inputs; "
    "further files are checked as they are.",
)
@click.option("--weights", metavar="FILE", help="Weights: .safetensors, or a state dict (.pt, .pth, .bin, .ckpt).")
@click.option(
    "--passes", metavar="LIST", help="Passes in order, such as fold-conv-bn,channels-last; none disables all passes."
)
@click.option(
    "--formats",
    metavar="LIST",
    default=",".join(DEFAULT_FORMATS),
    show_default=True,
    help="Formats to write: torchscript, onnx, pt2, aoti.",
)
@click.option("--output", metavar="DIR", help="The folder of the bundle.  [default: dist/<name of the file>]")
@click.option(
    "--device",
    type=_Device(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device to run and check on; auto uses the GPU if there is one.",
)
@click.option(
    "--reference-device",
    type=_Device(["cpu", "cuda"]),
    help="Device of the original that the files are compared with.  [default: the device of the files]",
)
@click.option("--require-gpu", cls=_Flag, help="Fail if there is no GPU, instead of checking on the CPU.")
@click.option(
    "--batch-sizes",
    metavar="LIST",
    help="Batch sizes to check.  [default: 1,2,3,5,8; for large inputs 1,2,3]",
)
@click.option("--static-batch", cls=_Flag, help="Fix the batch size to that of the example inputs.")
@click.option(
    "--dynamic",
    metavar="NAME:DIMS",
    multiple=True,
    help="Dynamic dims of an input, by its name in the files, instead of dim 0: x:0,2, or x:0=batch,2=time with "
    "names; dims with the same name have the same size. Repeat for each input.",
)
@click.option("--input-names", metavar="LIST", help="Names of the inputs in the files.")
@click.option("--output-names", metavar="LIST", help="Names of the outputs in the files.")
@click.option("--opset", metavar="N", help="Opset version of the ONNX file.  [default: torch's]")
@click.option("--metadata", metavar="KEY=VALUE", multiple=True, help="Add a text to every file, such as author=Jane.")
@click.option(
    "--atol",
    metavar="TOL",
    multiple=True,
    help="Allow |file - original| <= atol + rtol * |original| instead of the measured noise: 1e-3, or logits=1e-3, "
    "repeated for each output.",
)
@click.option(
    "--rtol",
    metavar="TOL",
    multiple=True,
    help="Relative part of that tolerance, in the same form; the part that isn't set is 0.",
)
@click.option(
    "--row-independence",
    cls=_Flag,
    help="Also check that each row of the outputs is independent of the other rows of its batch.",
)
@click.option(
    "--quick",
    cls=_Flag,
    help="Prove with fewer runs: files at two batch sizes, rounding noise at one. The manifest says so.",
)
@click.option(
    "--thorough",
    cls=_Flag,
    help="Prove with more runs: three samples of the inputs at each batch size, rounding noise at all of them.",
)
@click.option(
    "--strict",
    cls=_Flag,
    help="Fail if a pass fails or is rolled back; publish nothing if a format is missing.",
)
@click.option("--seed", metavar="N", default="0", show_default=True, help="Seed for all random values.")
@click.option("--force", cls=_Flag, help="Replace the bundle that is at --output.")
@click.option(
    "--if-changed",
    cls=_Flag,
    help="Build only if the model, its files, options or versions changed since the bundle at --output was built.",
)
@click.option(
    "--debug-dir", metavar="DIR", help="If a file computes something different, write a reproduction to this folder."
)
@click.option(
    "--profile",
    "profile_dir",
    metavar="DIR",
    help="Also profile the original, the optimized model and the ONNX file, and write the traces to this new folder.",
)
@click.option(
    "--verify", metavar="BUNDLE", help="Verify a bundle again; no MODEL. This runs its files, which are programs."
)
@click.option(
    "--expect",
    metavar="SHA256",
    help="With --verify: the SHA-256 of SHA256SUMS from the builder. Any other bundle is refused before it is loaded.",
)
@click.option("--no-run", is_flag=True, help="With --verify: check hashes and golden data, and load no model file.")
@click.option(
    "--tune",
    cls=_Flag,
    default=None,
    help="Try every installed runtime with its settings, and lossy precisions within --accuracy; recommend the best.",
)
@click.option("--tune-seconds", metavar="N", default="120", show_default=True, help="About how long --tune may take.")
@click.option(
    "--accuracy",
    metavar="BUDGET",
    default="exact",
    show_default=True,
    help="What a lossy route may cost: exact, the least cosine of any output such as 0.999, or top1=0.99. "
    "Implies --tune.",
)
@click.option(
    "--finite-inputs",
    cls=_Flag,
    help="Inputs never have NaN or infinity, so a file that computes something else for them may be recommended.",
)
@click.option(
    "--calibration",
    metavar="PATH",
    help="Calls to calibrate int8 with: a .safetensors or .npz file, or, for a library model, an image or a .txt "
    "file; or a folder of them. With --accuracy.",
)
@click.option(
    "--choices", metavar="BUNDLE", help="Ship what this tuned bundle recommends, proven again but without timing."
)
@click.option("--no-bench", is_flag=True, help="Don't time the files next to the original, and recommend none.")
@click.option("--diagnose", is_flag=True, help="Find what good practice would change in MODEL's code; no bundle.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "note"]),
    help="With --diagnose: exit with 10 if there is a finding of this level or a higher one.",
)
@click.option("--bench", metavar="BUNDLE", help="Time the files of a bundle on this machine; no MODEL.")
@click.option(
    "--rejudge",
    metavar="BUNDLE",
    help="Judge the stored measurements of a bundle again with --atol, --rtol or --factor; nothing is run.",
)
@click.option(
    "--factor",
    metavar="K",
    help="Allowed error of an output in multiples of its noise; with --rejudge.  [default: 4, or 16 if the original ran on another kind of device]",
)
@click.option(
    "--layout",
    type=click.Choice(["triton"]),
    help="Write a file of a bundle into Triton's model repository at --output; MODEL is the bundle. --formats chooses "
    "the file.  [default: the recommended one]",
)
@click.option(
    "--config",
    metavar="FILE",
    help="A TOML file with models (a config); MODEL is the name of one.  [default: pyproject.toml]",
)
@click.option("--all", "all_models", is_flag=True, help="Build all models of the config; no MODEL.")
@click.option("-j", "--jobs", metavar="N", help="With --all: how many models to build side by side.  [default: 1]")
@click.option("--shard", metavar="I/N", help="With --all: build only every Nth model, from the Ith on.")
@click.option("--list-passes", is_flag=True, help="List the passes with their options; no MODEL.")
@click.option(
    "--details",
    is_flag=True,
    help="Also show the routes, tensors and errors of each file, for every output and call.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document to stdout, also for an error.")
@click.option("--quiet", is_flag=True, help="Show only errors and the path of the bundle.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@click.option("-h", "--help", is_flag=True, is_eager=True, expose_value=False, callback=_help, help="Show this help.")
@click.pass_context
def command(context: click.Context, /, **values: Any) -> Options:
    """Make a PyTorch model faster and put it into deployable files, with proof that it still computes the same.

    MODEL is a file (model.py, model.py:NAME), package.module:factory, a library model (timm:NAME, torchvision:NAME,
    transformers:FOLDER-or-hub-name), or a model's name in the config. Without a NAME it is the `model` of the file, else
    its get_model, build_model or create_model, else its only nn.Module that needs no arguments. Its inputs are the
    example_inputs or get_example_inputs() of the file, or those of --input or --inputs.
    """
    _refuse_deleted_folder()
    _refuse_swallowed(context, values)
    mode = next((mode for mode in _MODES if values[mode] not in (None, False)), None)
    if mode is not None:
        _refuse_others(context, mode)
    if mode == "list_passes":
        return ListOptions()
    if mode != "diagnose" and values["fail_on"] is not None:
        raise UsageError("--fail-on goes with --diagnose only.")
    if mode is not None and values["require_gpu"] and values["device"] == "cpu":
        raise UsageError("--require-gpu and --device cpu contradict each other.")
    if mode == "verify":
        if not values["verify"].strip():
            raise UsageError("--verify names no folder.")
        return _verify_options(context, values)
    if mode == "bench":
        if not values["bench"].strip():
            raise UsageError("--bench names no folder.")
        return BenchOptions(_path(values["bench"]), values["device"])
    if mode == "rejudge":
        return _rejudge_options(values)
    if mode == "layout":
        return _layout_options(context, values)
    if mode == "diagnose":
        return DiagnoseOptions(_export_options(context, values), values["fail_on"])
    if values["factor"] is not None:
        raise UsageError("--factor goes with --rejudge only.")
    for option in ("expect", "no_run"):
        if values[option] not in (None, False):
            raise UsageError(f"--{option.replace('_', '-')} goes with --verify only.")
    if values["all_models"]:
        return _all_options(context, values)
    for option in ("jobs", "shard"):
        if values[option] is not None:
            raise UsageError(f"--{option} goes with --all only.")
    if values["config"] is not None or may_be_named(values["model"]):
        config = _read_config(context, values)
        if values["config"] is not None or is_named(values["model"], config):
            return _configured(context, values, config, values["model"])
    return _export_options(context, values)


def _option_names() -> set[str]:
    options = [each for each in command.params if isinstance(each, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def _read_config(context: click.Context, values: Mapping[str, Any]) -> Config:
    options = [each for each in context.command.params if isinstance(each, click.Option)]
    allowed = {each.opts[-1].lstrip("-"): each for each in options if each.name not in _NOT_IN_CONFIG}
    return read_config(None if values["config"] is None else _path(values["config"]), allowed)


def _configured(context: click.Context, values: Mapping[str, Any], config: Config, name: str) -> ExportOptions:
    """The options of a model in the config; those on the command line take precedence."""
    given = {parameter: values[parameter] for parameter in _on_command_line(context) if parameter != "model"}
    merged = {**values, **config.named(name), **given}
    with config.blamed(name):
        options = _export_options(context, merged)
        check_names(options)
    return options


def _on_command_line(context: click.Context) -> list[str]:
    return [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def _all_options(context: click.Context, values: Mapping[str, Any]) -> AllOptions:
    if values["model"] is not None:
        raise UsageError(f"--all builds all models of the config: leave out {values['model']}, or --all.")
    number, count = (1, 1) if values["shard"] is None else parse_shard(values["shard"])
    jobs = 1 if values["jobs"] is None else parse_jobs(values["jobs"])
    config = _read_config(context, values)
    if not config.models:
        raise UsageError(
            f"{config.path} has no models for --all: add a table such as [tool.{PROGRAM}.models.net], or name another "
            "file with --config."
        )
    outputs: dict[Path, str] = {}
    for name in config.models:
        output = _configured(context, values, config, name).output.resolve()
        for other, its_name in outputs.items():
            if output.is_relative_to(other) or other.is_relative_to(output):
                where = (
                    f"the same output, {os.path.relpath(output)}" if output == other else "outputs inside each other"
                )
                raise UsageError(
                    f"{config.path}: the models {its_name} and {name} have {where}: give one of them another."
                )
        outputs[output] = name
    given = [f"--config={config.path}", "--json"]
    chosen = [*config.models][number - 1 :: count]
    return AllOptions({name: [name, *given, *_given_again(context, name)] for name in chosen}, jobs)


def _given_again(context: click.Context, model: str) -> Iterator[str]:
    """The options on the command line that the command of each model gets too; a folder of files is one for each."""
    names = set(_on_command_line(context)) - {*_ALL, "as_json", "details"}
    for option in context.command.params:
        if option.name not in names:
            continue
        value = context.params[option.name]
        long = (option.secondary_opts if value is False else option.opts)[-1]
        if isinstance(value, bool):
            yield long
        else:
            texts = value if option.multiple else [value]
            yield from (f"{long}={Path(text, model) if option.name in FOLDERS else text}" for text in texts)


def _refuse_deleted_folder() -> None:
    """Refuse a current folder that was deleted: no relative path can be resolved, and torch's libraries don't load."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("The current folder was deleted: change to another one.") from error


def _refuse_swallowed(context: click.Context, values: Mapping[str, Any]) -> None:
    """Refuse an option name as the value of another option: `--verify --json` names no bundle."""
    options = [parameter for parameter in context.command.params if isinstance(parameter, click.Option)]
    names = _option_names()
    for option in options:
        value = values.get(option.name or "")
        given = value if isinstance(value, tuple) else (value,)
        swallowed = next((text for text in given if text in names), None)
        if swallowed is not None:
            raise UsageError(f"{option.opts[-1]} needs a {option.metavar or 'value'}, but {swallowed} follows it.")


def _refuse_others(context: click.Context, mode: str) -> None:
    """Refuse the options that this mode would ignore."""
    given = [name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    others = [parameter for parameter in context.command.params if parameter.name in set(given) - _ALLOWED[mode]]
    if others:
        called = [param.opts[0] if isinstance(param, click.Option) else "MODEL" for param in others]
        raise UsageError(f"{_MODES[mode]} can't be combined with {', '.join(called)}.")


def _verify_options(context: click.Context, values: Mapping[str, Any]) -> VerifyOptions:
    device_given = context.get_parameter_source("device") is not ParameterSource.DEFAULT
    if values["no_run"] and (device_given or values["require_gpu"]):
        raise UsageError(f"--no-run and {'--device' if device_given else '--require-gpu'} contradict each other.")
    return VerifyOptions(
        bundle=_path(values["verify"]),
        # Nothing is run, so there is no device to choose.
        device="cpu" if values["no_run"] else values["device"],
        require_gpu=values["require_gpu"],
        expect=None if values["expect"] is None else parse_digest("--expect", values["expect"]),
        run=not values["no_run"],
    )


def _rejudge_options(values: Mapping[str, Any]) -> RejudgeOptions:
    if not values["rejudge"].strip():
        raise UsageError("--rejudge names no folder.")
    return RejudgeOptions(
        bundle=_path(values["rejudge"]),
        atol=parse_tolerance("--atol", values["atol"]),
        rtol=parse_tolerance("--rtol", values["rtol"]),
        factor=None if values["factor"] is None else parse_factor(values["factor"]),
    )


def _layout_options(context: click.Context, values: Mapping[str, Any]) -> LayoutOptions:
    for name, what in (("model", "bundle: add its folder"), ("output", "repository: add --output DIR")):
        if values[name] is None or not values[name].strip():
            raise UsageError(f"--layout has no {what}, as in --layout triton dist/net --output models.")
    formats_given = context.get_parameter_source("formats") is not ParameterSource.DEFAULT
    formats = parse_names("--formats", values["formats"]) if formats_given else (None,)
    if len(formats) > 1:
        raise UsageError(f"--layout writes one file: choose one of {', '.join(map(str, formats))}.")
    return LayoutOptions(_path(values["model"]), _path(values["output"]), formats[0])


def _export_options(context: click.Context, values: Mapping[str, Any]) -> ExportOptions:
    model = values["model"]
    if values["require_gpu"] and values["device"] == "cpu":
        raise UsageError("--require-gpu and --device cpu contradict each other.")
    if model is None:
        raise UsageError(
            f"MODEL is missing: pass a Python file such as model.py, or a name such as timm:resnet50 ({PROGRAM} --help shows more)."
        )
    if values["inputs"] and values["input_files"]:
        raise UsageError(
            "--input and --inputs contradict each other: inputs are either drawn at random or read from a file."
        )
    if "" in map(str.strip, values["input_files"]):
        raise UsageError("--inputs names no file: add one, or leave out the option.")
    sizes = values["batch_sizes"]
    if values["static_batch"] and sizes is not None:
        raise UsageError("--static-batch and --batch-sizes contradict each other.")
    passes = values["passes"]
    if passes is not None and not passes.strip():
        raise UsageError("--passes names no pass: list passes, use none for no pass, or leave out the option.")
    for option, what in (("output", "folder"), ("weights", "file"), ("debug-dir", "folder"), ("profile", "folder")):
        value = values["profile_dir" if option == "profile" else option.replace("-", "_")]
        if value is not None and not value.strip():
            raise UsageError(f"--{option} names no {what}: add one, or leave out the option.")
    if values["if_changed"] and values["force"]:
        raise UsageError("--if-changed and --force contradict each other: --if-changed replaces its own bundle anyway.")
    if values["if_changed"] and values["profile_dir"] is not None:
        raise UsageError("--if-changed and --profile contradict each other: nothing runs if the bundle is up to date.")
    _check_tuning(values)
    model = os.path.expanduser(model)
    return ExportOptions(
        model=model,
        name=values["name"],
        inputs=values["inputs"],
        input_files=tuple(map(_path, values["input_files"])),
        weights=_path(values["weights"]) if values["weights"] is not None else None,
        passes="" if passes is not None and passes.strip() == "none" else passes,
        formats=parse_names("--formats", values["formats"]),
        output=_path(values["output"]) if values["output"] is not None else default_output(model),
        device=values["device"],
        reference_device=values["reference_device"],
        require_gpu=values["require_gpu"],
        batch_sizes=None if sizes is None else parse_batch_sizes(sizes),
        static_batch=values["static_batch"],
        dynamic=parse_dynamic(values["dynamic"]),
        input_names=_optional_names("--input-names", values["input_names"]),
        output_names=_optional_names("--output-names", values["output_names"]),
        opset=None if values["opset"] is None else parse_opset(values["opset"]),
        metadata=parse_metadata(values["metadata"]),
        strict=values["strict"],
        force=values["force"] or values["if_changed"],
        if_changed=values["if_changed"],
        given=_given(context, values),
        debug_dir=_path(values["debug_dir"]) if values["debug_dir"] is not None else None,
        profile_dir=_path(values["profile_dir"]) if values["profile_dir"] is not None else None,
        seed=parse_seed(values["seed"]),
        atol=parse_tolerance("--atol", values["atol"]),
        rtol=parse_tolerance("--rtol", values["rtol"]),
        row_independence=values["row_independence"],
        bench=not values["no_bench"],
        tune=values["tune"],
        tune_seconds=parse_seconds(values["tune_seconds"]),
        accuracy=values["accuracy"],
        finite_inputs=values["finite_inputs"],
        calibration=_path(values["calibration"]) if values["calibration"] is not None else None,
        choices=_path(values["choices"]) if values["choices"] is not None else None,
        effort=_effort(quick=values["quick"], thorough=values["thorough"]),
    )


def _path(text: str) -> Path:
    """A path in an option. A shell expands no `~` after `=`, and none is there for a config: so it is expanded here."""
    return Path(os.path.expanduser(text))


def _given(context: click.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that shape the bundle and differ from their defaults, by their long names."""
    options = [each for each in context.command.params if isinstance(each, click.Option) and each.name in values]
    recorded = [(each, values[each.name or ""]) for each in options if each.name not in _NOT_RECORDED]
    return {each.opts[0].lstrip("-"): value for each, value in recorded if value and value != each.default}


def _check_tuning(values: Mapping[str, Any]) -> None:
    for option, what in (("calibration", "file"), ("choices", "bundle")):
        if values[option] is not None and not values[option].strip():
            raise UsageError(f"--{option} names no {what}: add one, or leave out the option.")
    is_to_be_tuned(
        False if values["no_bench"] else None,
        values["tune"],
        parse_seconds(values["tune_seconds"]),
        values["accuracy"],
        values["calibration"],
        values["choices"],
    )


def _effort(*, quick: bool, thorough: bool) -> Effort:
    if quick and thorough:
        raise UsageError("--quick and --thorough contradict each other: use only one of them.")
    return "quick" if quick else "thorough" if thorough else "normal"


def _optional_names(option: str, text: str | None) -> tuple[str, ...] | None:
    return None if text is None else parse_names(option, text)


# stdout and signals ---------------------------------------------------------------------------------------------------


def _open_closed_streams() -> None:
    """Connect closed standard streams (`>&-`, daemons) to the null device.

    Otherwise the next opened file, such as a file of the bundle, gets the free descriptor. Everything that a library
    prints would then go into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # `os.open` takes the lowest free descriptor, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends


@contextlib.contextmanager
def _stdout_goes_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr for Python's `print`, for C libraries and for child processes."""
    kept_stream = sys.stdout
    _flush(kept_stream)
    kept_descriptor = os.dup(1)
    sys.stdout = sys.stderr
    os.dup2(2, 1)
    try:
        yield
    finally:
        _flush(sys.stdout)
        sys.stdout = kept_stream
        os.dup2(kept_descriptor, 1)
        os.close(kept_descriptor)


def _flush(stream: TextIO | None) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()  # type: ignore[union-attr]


def _silence_stdout() -> None:
    """Redirect stdout to stderr until the process ends.

    Output that the user's code prints at exit goes to stderr, and a closed pipe is not an error.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    sys.stdout = sys.stderr


def _keep_exit_code(code: int) -> None:
    """Keep the exit code of a failure, even if the user's code calls `os._exit(0)` at exit."""
    end = os._exit
    os._exit = lambda status: end(status or code)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    def raise_terminated(number: int, frame: FrameType | None) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, raise_terminated)
    except ValueError:  # only the main thread can handle signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Progress -------------------------------------------------------------------------------------------------------------


@dataclass
class _Stage:
    """One uninterrupted part of a stage.

    Attributes:
        text: the last reported step.
        names: the passes or exporters that ran, in order.
    """

    stage: str
    started: float
    text: str = ""
    names: dict[str, None] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return ", ".join(self.names) or self.text


class _Stages:
    """Times each stage and prints one line for it on stderr.

    On a terminal, a live line counts the seconds of the current stage.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._live: Any = None
        self._current: _Stage | None = None
        self._done: list[_Stage] = []

    def __enter__(self) -> "_Stages":
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True, highlight=False),
                get_renderable=self._now,
                transient=True,
                refresh_per_second=4,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        self._current = None
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: "Progress") -> None:
        if self._current is None or self._current.stage != progress.stage:
            if 0 < progress.total <= progress.done:
                return  # the end of a stage that another stage interrupted
            self._begin(progress.stage)
        assert self._current is not None
        if progress.text:
            self._current.text = progress.text
        if progress.name:
            self._current.names[progress.name] = None

    def start(self, text: str) -> None:
        """Time the work before the engine reports its first stage."""
        self._begin("start")
        assert self._current is not None
        self._current.text = text

    def times(self) -> list[dict[str, Any]]:
        """Return the stage, name and seconds of each finished stage, in order."""
        return [{"stage": each.stage, "name": each.name, "seconds": round(each.seconds, 3)} for each in self._done]

    def _begin(self, stage: str) -> None:
        self.finish()
        self._current = _Stage(stage, time.perf_counter())

    def finish(self) -> None:
        """End the current stage and print its time."""
        done, self._current = self._current, None
        if done is None:
            return
        done.seconds = time.perf_counter() - done.started
        self._done.append(done)
        if self._live is not None:
            console = self._live.console
            line = _stage_line(done.stage, done.seconds, printable(done.name), console.width)
            console.print(line, soft_wrap=True)
        elif self._shown:
            _say(f"{done.stage}{' ' * bool(done.name)}{done.name}: {done.seconds:.1f} s")

    def _now(self) -> Any:
        now = self._current
        return "" if now is None else _stage_line(now.stage, time.perf_counter() - now.started, printable(now.text))


def _stage_line(stage: str, seconds: float, text: str, width: int = 0) -> Any:
    """A line with columns, cut at the edge of the screen, or wrapped at spaces if a width is given."""
    from rich.text import Text

    line = f"{stage:<8} {seconds:6.1f} s  {text}"
    if width:
        line = textwrap.fill(line, width, subsequent_indent=" " * 19, break_long_words=False, break_on_hyphens=False)
    return Text(line, no_wrap=True, overflow="ellipsis")


# Output ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Voice:
    as_json: bool
    quiet: bool
    debug: bool
    details: bool

    def tell(self, text: str, figures: Mapping[str, Any]) -> int:
        """Print the text, or the figures as a JSON document; return the exit code."""
        told = _print_json({"ok": True, "exit_code": 0, **figures}) if self.as_json else _print_line(text)
        return 0 if told else BundleError.exit_code

    def show(self, document: Mapping[str, Any]) -> bool:
        """Print the result on stdout and its problems on stderr; return False if stdout couldn't be written."""
        written = True
        if self.as_json:
            written = _print_json(document)
        elif document.get("up_to_date") and not self.quiet:
            written = _print_line(printable(f"up to date: {document['bundle']}"))
        elif not self.quiet:
            written = _print_tables(document, details=self.details)
        elif "bundle" in document:
            written = _print_line(printable(str(document.get("triton_model", document["bundle"]))))
        problems = [document["error"]["message"]] if "error" in document else document.get("problems", ())
        for problem in problems:
            _say(f"error: {problem}")
        return written

    def fail(self, code: int, kind: str, sentence: str, error: BaseException) -> int:
        """Print an error on one line of stderr, and with --json also as a JSON document; return the exit code."""
        if self.debug:
            for line in "".join(traceback.format_exception(error)).removesuffix("\n").split("\n"):
                _to_stderr(f"| {line}")  # mark every line of a message, so that none looks like the program's own
        if self.as_json:
            _print_json(failure_document(code, kind, sentence))
        _say(sentence if code in (EXIT_INTERRUPTED, EXIT_TERMINATED) else f"error: {sentence}")
        return code


def _stopped(how: str) -> str:
    """A sentence about an interrupt: it may come after the new bundle was put in place, which it doesn't undo."""
    exchange = sys.modules.get("optimizer.bundle.exchange")
    done = sorted(map(str, exchange.published)) if exchange else []
    return f"{how}, after the new bundle was put in place: {', '.join(done)}" if done else how


def _lacks_memory(error: BaseException) -> bool:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, MemoryError) or (isinstance(link, OSError) and link.errno == errno.ENOMEM):
            return True
        if any(each in str(link).casefold() for each in _MEMORY_ERRORS):
            return True
        link = link.__cause__ or link.__context__
    return False


def _defect(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return (
        f"a defect of {PROGRAM} itself: {type(error).__name__}{': ' if text else ''}{text}; please report it with "
        "the output of --debug."
    )


def _say(sentence: str) -> None:
    """Print one line on stderr."""
    _to_stderr(f"{PROGRAM}: {sentence}")


def _to_stderr(line: str) -> None:
    encoding = _encoding(sys.stderr)
    with contextlib.suppress(OSError, ValueError):
        print(printable(line).encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)


def _print_json(document: Mapping[str, Any]) -> bool:
    # JSON allows DEL in a string, so `json.dumps` doesn't escape it.
    return _print_line(json.dumps(document, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def _print_line(text: str) -> bool:
    """Print on stdout; return False if that fails, as on a full disk.

    A reader that has gone away (`| head`), or never existed, is not an error.
    """
    encoding = _encoding(sys.stdout)
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        _silence_stdout()
        if error.errno in (errno.EPIPE, errno.EBADF):
            return True
        _say(f"error: the result couldn't be written to stdout: {error.strerror}.")
        return False
    return True


def _print_tables(document: Mapping[str, Any], *, details: bool) -> bool:
    from optimizer.command.tables import as_text

    terminal = sys.stdout.isatty()
    text = as_text(all_printable(document), terminal=terminal, details=details)
    return _print_line(text)


def _encoding(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"
