"""The commands: their options, made from the dataclasses of `optimizer.options`, and what a call of each asks for."""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from optimize_export.arguments import other_gpu
from optimize_export.errors import OptimizeExportError, UsageError
from optimizer.command.build import FOLDERS, read_config
from optimizer.command.early_checks import default_output
from optimizer.options import (
    DIAGNOSED,
    GROUPS,
    BenchOptions,
    BuildOptions,
    CompareOptions,
    DiagnoseOptions,
    ExportOptions,
    ListOptions,
    Option,
    Options,
    PushOptions,
    RejudgeOptions,
    ShowOptions,
    TritonOptions,
    TuneTrainingOptions,
    VerifyOptions,
    options_of,
)

PROGRAM = "optimize-export"

_HELP = """
Make a PyTorch model faster and put it into deployable files, with proof that it still computes the same.

MODEL is a file (model.py, model.py:NAME), package.module:factory, or a library model (timm:NAME, torchvision:NAME,
transformers:FOLDER). --help-all shows all options, examples and exit codes.

Commands: build [NAMES]; verify, bench, compare, rejudge, triton or push BUNDLE; diagnose, profile or
tune-training MODEL; passes. Each has --help.
"""
_EPILOG = """
Without a NAME, the model is the `model` of the file, else its get_model, build_model or create_model, else its only
nn.Module that needs no arguments. A module that is named like a command is reached by its file, such as ./verify.py.

Examples:
  optimize-export model.py
  optimize-export timm:resnet50 --inputs photo.jpg
  optimize-export transformers:bert-base-uncased
  optimize-export model.py:build_model --input 2x3x224x224 --output dist/net
  optimize-export models.bert:tiny --input ids=int64[2,128]:0..30000
  optimize-export models.bert:tiny --dynamic ids:0=batch,1=time --dynamic mask:0=batch,1=time
  optimize-export model.py --weights net.safetensors --passes fold-conv-bn,channels-last
  optimize-export build --all --if-changed -j 2
  optimize-export diagnose model.py --fail-on error
  optimize-export tune-training model.py --memory 16GiB
  optimize-export verify dist/net
  optimize-export verify dist/net --with onnxruntime==1.24.1
  optimize-export compare dist/old dist/new
  optimize-export rejudge dist/net --atol logits=1e-3
  optimize-export triton dist/net --output models
  optimize-export push dist/net jane/net

Inputs (--input), one for each argument of forward:
  2x3x224x224                 float32, standard normal
  float32[2,3,224,224]        any torch dtype, also f16, bf16, i64, ...; float32[] is a scalar
  x=float32[2,3]:-1..1        a keyword argument, evenly between -1 and 1
  ids=int64[2,128]:0..30000   integers from 0 to 29999; without a range from 0 to 9

Exit codes:
  0    done
{codes}
  130  interrupted (Ctrl-C); 143 if terminated
"""


def _exit_codes() -> str:
    known: list[type[OptimizeExportError]] = [OptimizeExportError, *OptimizeExportError.__subclasses__()]
    texts = {each.exit_code: (each.__doc__ or "").rstrip(".") for each in known}
    texts[1] = "a defect of the program itself, or out of memory"
    return "\n".join(f"  {code:<4} {text[:1].lower()}{text[1:]}" for code, text in texts.items())


def parse(arguments: Sequence[str], shows: Any = None) -> Options | int:
    """What a call asks for; the exit code if it asked only for help or the version, which `shows` has printed.

    The first word is a command, or else MODEL of an export. Raises UsageError or click.ClickException for an invalid call.
    """
    name, rest = "export", list(arguments)
    words = [each for each in rest if each not in ("--json", "--quiet", "--details", "--debug")]
    if words and words[0] in COMMANDS:
        name = words[0]
        rest.remove(name)
    elif len(words) > 1 and not words[1].startswith("-") and words[0].isidentifier() and not os.path.exists(words[0]):
        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}."
        raise UsageError(f"There is no command or file {words[0]}: {hint}")
    command = COMMANDS[name]
    found: Options | int = command.main(rest, prog_name=command.called, standalone_mode=False, obj=shows)
    return found


def option_names(command: str | None = None) -> set[str]:
    """The names of the options of a command; None for all commands."""
    made = [each for name, each in COMMANDS.items() if command in (None, name)]
    options = [each for one in made for each in one.params if isinstance(each, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def why_no_option(name: str, command: str) -> str:
    """Why a command doesn't have an option, as a sentence: it goes with another command, or doesn't exist."""
    homes = [
        f"{PROGRAM} {'MODEL' if each.name == 'export' else each.name}"
        for each in COMMANDS.values()
        if name in option_names(each.name)
    ]
    if homes:
        return f"There is no option {name} here: it goes with {homes[0]}."
    near = difflib.get_close_matches(name.replace("_", "-"), sorted(option_names(command)), 1, 0.8)
    hint = f"did you mean {near[0]}?" if near else f"{PROGRAM} --help-all lists all."
    return f"There is no option {name}: {hint}"


# From a field to an option ----------------------------------------------------------------------------------------


class FieldOption(click.Option):
    """An option that sets a field of a dataclass, or one of its flags. Errors name the option and its text."""

    def __init__(self, field: Field[Any], flag: str = "") -> None:
        spelled: Option = field.metadata["option"]
        self.field, self.spelled = field, spelled
        self.value: Any
        self.value, help, self.more = spelled.flags[flag] if flag else (MISSING, spelled.help, spelled.more)
        names = [f"--{flag}"] if flag else [*spelled.names] or [f"--{field.name.replace('_', '-')}"]
        self.parameter = parameter = flag.replace("-", "_") or field.name
        if flag or not spelled.metavar:
            super().__init__([*names, parameter], is_flag=True, default=None, help=help)
            if not flag.startswith("no-"):
                # A config may have switched it on; the help leaves this name out.
                self.secondary_opts = [f"--no-{names[-1].removeprefix('--')}"]
        else:
            kind = click.Choice(spelled.choices) if spelled.choices else click.STRING
            super().__init__(
                [*names, parameter], metavar=spelled.metavar, multiple=spelled.repeated, type=kind, help=help
            )

    @property
    def long(self) -> str:
        return self.opts[-1]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """The names and the help line; with `--help-all` also all that is known of the option."""
        name = ", ".join(self.opts) + ("" if self.is_flag else f" {self.metavar}")
        return name, self.full_help() if ctx.meta.get(_ALL_HELP) else self.help or ""

    def full_help(self) -> str:
        default = self.spelled.default_text
        if not default and not self.is_flag and isinstance(self.field.default, str | tuple) and self.field.default:
            own = self.field.default
            default = own if isinstance(own, str) else ",".join(own)
        text = " ".join(filter(None, (self.help, self.more)))
        return f"{text}  [default: {default}]" if default else text

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        if self.spelled.choices and (way := other_gpu(str(value))):
            listed = ", ".join(map(repr, self.spelled.choices))
            raise UsageError(f"{self.long}: {value!r} is not one of {listed}; {way}.")
        return super().type_cast_value(ctx, value)


def field_options(cls: type, names: Sequence[str] | None = None) -> Iterator[FieldOption]:
    """The options of a dataclass, or those of some of its fields."""
    for name, (field, spelled) in options_of(cls).items():
        if names is None or name in names:
            yield from (FieldOption(field, flag) for flag in spelled.flags or ("",))


# The commands -----------------------------------------------------------------------------------------------------

_ALL_HELP = f"{PROGRAM}: all help"


@dataclass(frozen=True)
class _Call:
    """A call of a command."""

    options: Sequence[FieldOption]
    """Those that the command has."""
    words: tuple[str, ...]
    """Its arguments: MODEL, BUNDLE or NAMES."""
    given: dict[str, Any]
    """The texts and flags of the options that the user gave, by the names of their parameters."""

    def values(self, cls: type) -> dict[str, Any]:
        """The fields of a dataclass that the options set."""
        found: dict[str, Any] = {}
        own, flags = {each.name for each in fields(cls)}, dict[str, str]()
        for option in self.options:
            raw, name = self.given.get(option.parameter), option.field.name
            if raw is None or name not in own:
                continue
            if option.value is MISSING:
                parse = None if option.is_flag else option.spelled.parse
                found[name] = raw if parse is None else parse(option.long, raw)
            elif raw:
                if name in flags:
                    raise UsageError(f"{flags[name]} and {option.long} contradict each other: use only one of them.")
                flags[name], found[name] = option.long, option.value
        if found.get("require_gpu") and found.get("device") == "cpu":
            raise UsageError("--require-gpu and --device cpu contradict each other.")
        return found

    def model(self) -> str:
        if not self.words:
            raise UsageError(
                "MODEL is missing: pass a Python file such as model.py, or a name such as timm:resnet50 "
                f"({PROGRAM} --help shows more)."
            )
        return self.words[0]

    def bundle(self) -> Path:
        if not self.words or not self.words[0].strip():
            raise UsageError(
                f"BUNDLE is missing: name the folder of a bundle, such as dist/net ({PROGRAM} --help shows more)."
            )
        return Path(os.path.expanduser(self.words[0]))


class _Command(click.Command):
    """A command, with the help of its options in groups."""

    def __init__(
        self,
        name: str,
        help: str,
        word: str,
        options: Sequence[FieldOption],
        ask: Callable[[_Call], Options],
        *,
        has_details: bool = False,
    ) -> None:
        shown = None if has_details else ("as_json", "quiet", "debug")
        self.options, self.ask = [*options, *field_options(ShowOptions, shown)], ask
        told = [(("-h", "--help"), _show_help), (("--help-all",), _show_help), (("--version",), _show_version)]
        eager = [
            click.Option(names, is_flag=True, is_eager=True, expose_value=False, callback=show) for names, show in told
        ]
        # Where the word is missing, our own sentence shows what it may be.
        shape: Any = {"nargs": -1} if word == "[NAMES]" else {"required": False}
        arguments = [click.Argument([one.strip("[]").lower()], metavar=one, **shape) for one in word.split()]
        super().__init__(
            name,
            params=[*arguments, *self.options, *eager],
            help=help,
            add_help_option=False,
            context_settings={"max_content_width": 110},
        )

    @property
    def called(self) -> str:
        return PROGRAM if self.name == "export" else f"{PROGRAM} {self.name}"

    def invoke(self, ctx: click.Context) -> Options:
        """What the call asks for."""
        try:
            os.getcwd()
        except FileNotFoundError as error:
            raise UsageError("The current folder was deleted: change to another one.") from error
        named = {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        given = {option.parameter: ctx.params[option.parameter] for option in self.options if option.parameter in named}
        self._refuse_swallowed(given)
        words = [ctx.params[each.name or ""] for each in self.params if isinstance(each, click.Argument)]
        flat = [word for each in words for word in (each if isinstance(each, tuple) else (each,)) if word is not None]
        return self.ask(_Call(self.options, tuple(flat), given))

    def _refuse_swallowed(self, given: Mapping[str, Any]) -> None:
        """Refuse an option name as the value of another option, as in `--output --json`."""
        names = option_names(self.name)
        for option in self.options:
            value = given.get(option.parameter)
            for text in value if isinstance(value, tuple) else (value,):
                if text in names:
                    raise UsageError(f"{option.long} needs a {option.metavar}, but {text} follows it.")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups."""
        for group, title in GROUPS.items():
            shown = [each for each in self.options if each.spelled.group == group]
            rows = [each.get_help_record(ctx) for each in shown if each.spelled.common or ctx.meta.get(_ALL_HELP)]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, the syntax of inputs and the exit codes, where all is asked for."""
        if self.name == "export" and ctx.meta.get(_ALL_HELP):
            formatter.write(_EPILOG.format(codes=_exit_codes()))


def _show_help(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        context.meta[_ALL_HELP] = "--help-all" in option.opts
        text = context.get_help()
        context.exit(context.obj.tell(text, {"help": text}))


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        versions = {"version": _installed(PROGRAM), "torch": _installed("torch")}
        context.exit(context.obj.tell(f"{PROGRAM} {versions['version']} (torch {versions['torch']})", versions))


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


# What each asks for -----------------------------------------------------------------------------------------------


def _export(call: _Call) -> ExportOptions:
    return _export_options(call, call.model())


def _profile(call: _Call) -> ExportOptions:
    options = _export(call)
    return options if options.profile_dir else replace(options, profile_dir=Path("profile", options.output.name))


def _export_options(call: _Call, model: str) -> ExportOptions:
    values = call.values(ExportOptions)
    if "inputs" in values and "input_files" in values:
        raise UsageError(
            "--input and --inputs contradict each other: inputs are either drawn at random or read from a file."
        )
    if values.get("static_batch") and "batch_sizes" in values:
        raise UsageError("--static-batch and --batch-sizes contradict each other.")
    if values.get("if_changed") and values.get("force"):
        raise UsageError("--if-changed and --force contradict each other: --if-changed replaces its own bundle anyway.")
    if values.get("if_changed") and "profile_dir" in values:
        raise UsageError("--if-changed and profiles contradict each other: nothing runs if the bundle is up to date.")
    model = os.path.expanduser(model)
    force = bool(values.get("force") or values.get("if_changed"))
    values = {"output": default_output(model), **values, "force": force}
    options = ExportOptions(model=model, given=_recorded(call, values), **values)
    options.check(options.calibration)
    return options


def _recorded(call: _Call, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that shape the bundle and differ from their defaults, by their long names."""
    found = {}
    for option in call.options:
        name, text = option.field.name, call.given.get(option.parameter)
        if text and option.spelled.recorded and name in values and values[name] != option.field.default:
            found[option.long.lstrip("-")] = text
    return found


def _verify(call: _Call) -> VerifyOptions:
    values = call.values(VerifyOptions)
    if not values.get("run", True):
        if values.keys() & {"device", "require_gpu"}:
            other = "--device" if "device" in values else "--require-gpu"
            raise UsageError(f"--no-run and {other} contradict each other.")
        if "sets" in values:
            raise UsageError("--no-run and --with contradict each other.")
        values["device"] = "cpu"  # nothing is run, so there is no device to choose
    if "sets" not in values and "seconds" in values:
        raise UsageError("--seconds goes with --with only: add --with.")
    if "sets" in values and (values.get("device") == "cuda" or "require_gpu" in values):
        raise UsageError("--with runs the files on the CPU only: leave out --device and --require-gpu.")
    return VerifyOptions(call.bundle(), **values)


def _bench(call: _Call) -> BenchOptions:
    values = call.values(BenchOptions)
    if not values.get("throughput"):
        if alone := values.keys() & {"p95", "save"}:
            raise UsageError(f"--{min(alone)} goes with --throughput only: add it.")
    elif "soak" in values:
        raise UsageError("--soak and --throughput contradict each other: use only one of them.")
    elif values.get("device") == "cuda":
        raise UsageError("--throughput measures on the CPU only: leave out --device cuda.")
    if values.keys() >= {"soak", "seconds"}:
        raise UsageError("--soak has its own time: leave out --seconds.")
    return BenchOptions(call.bundle(), **values)


def _compare(call: _Call) -> CompareOptions:
    bundle = call.bundle()
    if len(call.words) < 2 or not call.words[1].strip():
        raise UsageError(f"compare has no second bundle: name one, as in compare {bundle} dist/new.")
    return CompareOptions(bundle, Path(os.path.expanduser(call.words[1])), **call.values(CompareOptions))


def _triton(call: _Call) -> TritonOptions:
    values = call.values(TritonOptions)
    if "output" not in values:
        raise UsageError("triton has no repository: add --output DIR, as in triton dist/net --output models.")
    return TritonOptions(call.bundle(), **values)


def _push(call: _Call) -> PushOptions:
    bundle = call.bundle()
    if len(call.words) < 2:
        raise UsageError(f"push has no repository: name one, as in push {bundle} jane/resnet18.")
    return PushOptions(bundle, call.words[1], **call.values(PushOptions))


def _build(call: _Call) -> ExportOptions | BuildOptions:
    """One model by its name, in this process; or several, each in its own."""
    own = call.values(BuildOptions)
    options = {option.long.lstrip("-"): option for option in _EXPORT_OPTIONS if option.parameter != "name"}
    config, everything = read_config(own.get("config"), options), bool(own.get("all"))
    if everything and call.words:
        raise UsageError(f"--all builds all models of the config: leave out {call.words[0]}, or --all.")
    if not everything and not call.words:
        raise UsageError(f"NAME is missing: name models of {config.path} ({config.names()}), or pass --all.")
    if everything and not config.models:
        raise UsageError(
            f"{config.path} has no models for --all: add a table such as [tool.{PROGRAM}.models.net], or name another "
            "file with --config."
        )
    names = list(dict.fromkeys(call.words)) or list(config.models)
    asked = {}
    for name in names:
        # Those on the command line take precedence.
        values = {**config.named(name), **call.given}
        with config.blamed(name):
            asked[name] = _export_options(replace(call, given=values), values.pop("model"))
    if own.keys() >= {"jobs", "on"}:
        raise UsageError(
            "--jobs and --on contradict each other: Ray starts as many builds as its machines have room for."
        )
    if not everything and len(names) == 1 and "on" not in own:
        if unused := own.keys() & {"jobs", "shard"}:
            raise UsageError(f"--{min(unused)} goes with --all or several names only.")
        return asked[names[0]]
    config.refuse_shared_outputs({name: options.output for name, options in asked.items()})
    number, count = own.get("shard", (1, 1))
    given = ["build", f"--config={config.path}", "--json"]
    commands = {name: [*given, *_given_again(call, name), name] for name in names[number - 1 :: count]}
    return BuildOptions(commands, asked, config.resources, config.folders(), **own)


def _given_again(call: _Call, model: str) -> Iterator[str]:
    """The options that the command of each model gets too; a folder of files is one for each."""
    left_out = {*options_of(BuildOptions), "as_json", "details"}
    for option in call.options:
        value = call.given.get(option.parameter)
        if value is None or option.field.name in left_out:
            continue
        if isinstance(value, bool):
            yield option.long if value else option.secondary_opts[-1]
        else:
            texts = value if isinstance(value, tuple) else [value]
            yield from (f"{option.long}={Path(text, model) if option.parameter in FOLDERS else text}" for text in texts)


def _tune_training(call: _Call) -> TuneTrainingOptions:
    # Those of the same names that an export has mean something else.
    own = {option.parameter for option in field_options(TuneTrainingOptions)}
    load = replace(call, given={name: text for name, text in call.given.items() if name not in own})
    return TuneTrainingOptions(_export_options(load, call.model()), **call.values(TuneTrainingOptions))


_EXPORT_OPTIONS = [*field_options(ExportOptions)]


_BUILD_HELP = """
Build the models of a config: pyproject.toml, or the file of --config.

All options of an export (--help-all) go with it, and replace its own.
"""
_PROFILE_HELP = """
Export a model, and profile it before and after.

All options of an export go with it. The traces go to --profile-dir, by default profile/ and the name of the bundle.
"""
_TUNE_TRAINING_HELP = """
Measure and prove what makes a model's training step faster, and print the best combination as code.

MODEL has `training_step(model, batch)`, which returns the loss; optionally `optimizer` or `make_optimizer(parameters)`, and
`loader`, `train_loader` or `make_loader()`. The weights stay as they are.
"""
COMMANDS = {
    command.name or "": command
    for command in (
        _Command("export", _HELP, "MODEL", _EXPORT_OPTIONS, _export, has_details=True),
        _Command(
            "build",
            _BUILD_HELP,
            "[NAMES]",
            [*field_options(BuildOptions), *_EXPORT_OPTIONS],
            _build,
            has_details=True,
        ),
        _Command(
            "verify",
            "Check a bundle's hashes and run its files again. They are programs.",
            "BUNDLE",
            [*field_options(VerifyOptions)],
            _verify,
            has_details=True,
        ),
        _Command(
            "bench",
            "Time the files of a bundle on this machine.",
            "BUNDLE",
            [*field_options(BenchOptions)],
            _bench,
        ),
        _Command(
            "compare",
            "Show what differs between two bundles: files, outputs, latency and versions.",
            "BUNDLE OTHER",
            [*field_options(CompareOptions)],
            _compare,
        ),
        _Command(
            "rejudge",
            "Judge the stored measurements of a bundle by other tolerances. Nothing is run.",
            "BUNDLE",
            [*field_options(RejudgeOptions)],
            lambda call: RejudgeOptions(call.bundle(), **call.values(RejudgeOptions)),
            has_details=True,
        ),
        _Command(
            "triton",
            "Write a file of a bundle into Triton's model repository at --output.",
            "BUNDLE",
            [*field_options(TritonOptions)],
            _triton,
        ),
        _Command(
            "push",
            "Push a bundle to a repository of the Hugging Face Hub.",
            "BUNDLE REPO_ID",
            [*field_options(PushOptions)],
            _push,
        ),
        _Command(
            "diagnose",
            "Find what good practice would change in a model's code. No bundle is written.",
            "MODEL",
            [*field_options(DiagnoseOptions), *field_options(ExportOptions, DIAGNOSED)],
            lambda call: DiagnoseOptions(_export_options(call, call.model()), **call.values(DiagnoseOptions)),
        ),
        _Command(
            "tune-training",
            _TUNE_TRAINING_HELP,
            "MODEL",
            [*field_options(TuneTrainingOptions), *field_options(ExportOptions, DIAGNOSED)],
            _tune_training,
        ),
        _Command("profile", _PROFILE_HELP, "MODEL", _EXPORT_OPTIONS, _profile, has_details=True),
        _Command("passes", "List the passes with their options.", "", [], lambda call: ListOptions()),
    )
}
