"""The entry point of the command `optimize-export`: it parses the call, does the work and sets the exit code.

`_torch_side` imports torch late, so that `--help` answers at once.
"""

import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import click

from optimize_export.errors import (
    BundleError,
    OptimizeExportError,
    Terminated,
    failure_document,
    missing_package,
    printable,
    with_causes,
)
from optimizer.command.build import builds, joined, summary
from optimizer.command.ci_reports import CIReports
from optimizer.command.commands import PROGRAM, field_options, option_names, parse, why_no_option
from optimizer.command.early_checks import check_early
from optimizer.command.output import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    Stages,
    Voice,
    prepare_streams,
    print_json,
    print_line,
    print_tables,
    say,
    silence_stdout,
    stdout_goes_to_stderr,
    to_stderr,
    with_options,
)
from optimizer.command.up_to_date import changes, up_to_date_document
from optimizer.command.user_code import import_own_packages
from optimizer.options import (
    BenchOptions,
    BuildOptions,
    CompareOptions,
    DiagnoseOptions,
    ExportOptions,
    ListOptions,
    Options,
    PushOptions,
    RejudgeOptions,
    ShowOptions,
    TritonOptions,
    TuneTrainingOptions,
    VerifyOptions,
    check_new_folder,
)

EXIT_DEFECT, EXIT_USAGE = 1, 2
# The functions of `engine` that need no model.
_BUNDLE_WORK = {
    VerifyOptions: "verify",
    BenchOptions: "bench",
    CompareOptions: "compare",
    RejudgeOptions: "rejudge",
    TritonOptions: "lay_out",
    PushOptions: "push_bundle",
    ListOptions: "list_passes",
}
# The fields of a document that may have sentences of the library.
_WITH_SENTENCES = ("error", "missing", "notes", "problems", "unproven", "benchmark")
# How libraries say that memory is lacking, in lower case.
_MEMORY_ERRORS = (
    "cannot allocate memory",
    "can't allocate memory",
    "failed to map segment",
    "bad_alloc",
    "bad allocation",
)
_OUT_OF_MEMORY = "Out of memory: this machine, or a limit such as ulimit -v, leaves too little for torch and the model."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default `sys.argv[1:]`, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    if exchange := sys.modules.get("optimizer.bundle.exchange"):
        exchange.published.clear()
    voice = Voice(*(option.long in arguments for option in field_options(ShowOptions)))
    with contextlib.ExitStack() as kept:
        kept.enter_context(_sigterm_unwinds())
        try:
            code = _run(arguments, voice)
        except BaseException as error:  # noqa: BLE001 - the last resort: a defect is also reported in one sentence
            code = voice.fail(*_failure(error), error)
    if argv is None:
        silence_stdout()
    return code


def _failure(error: BaseException) -> tuple[int, str, str]:
    """The exit code, the kind and the sentence of an error."""
    match error:
        case KeyboardInterrupt() | click.Abort():
            return EXIT_INTERRUPTED, "Interrupted", _stopped("interrupted")
        case Terminated():
            return EXIT_TERMINATED, "Terminated", _stopped("terminated")
        case click.NoSuchOption():
            command = error.ctx.command.name if error.ctx else None
            return EXIT_USAGE, "UsageError", why_no_option(error.option_name, command or "export")
        case click.ClickException():
            return EXIT_USAGE, "UsageError", " ".join(error.format_message().split())
        case OptimizeExportError():
            return error.exit_code, type(error).__name__, with_options(str(error), option_names())
        case ModuleNotFoundError() if lack := missing_package(error):
            return EXIT_USAGE, "UsageError", lack
        case _ if _lacks_memory(error):
            return EXIT_DEFECT, "OutOfMemory", _OUT_OF_MEMORY
    text = " ".join(str(error).split())[:300]
    named = f"{type(error).__name__}{': ' if text else ''}{text}"
    sentence = f"a defect of {PROGRAM} itself: {named}; please report it with the output of --debug."
    return EXIT_DEFECT, "Defect", sentence


def _run(arguments: list[str], voice: Voice) -> int:
    options = parse(arguments, voice)
    if isinstance(options, int):
        return options  # the help or the version is printed
    if isinstance(options, BuildOptions):
        return _build_all(options, voice)
    reports = CIReports(options)
    with stdout_goes_to_stderr():
        try:
            document = _work(options, voice)
        except BaseException as error:
            with contextlib.suppress(BundleError):  # the error itself is reported
                reports.write(failure_document(*_failure(error)))
            raise
    known = option_names()
    document |= {key: with_options(document[key], known) for key in _WITH_SENTENCES if key in document}
    reports.write(document)
    code = int(document.get("exit_code", 0))
    return code if voice.show(document) else code or BundleError.exit_code


def _build_all(options: BuildOptions, voice: Voice) -> int:
    """Build several models, and show the result of each when it ends; return the exit code."""
    documents: dict[str, dict[str, Any]] = {}

    def tell(name: str) -> None:
        if not voice.quiet:
            say(f"building {name}")

    if options.on is not None:
        _torch_side()  # putting bundles in their places needs it
    with contextlib.closing(builds(options, tell)) as running:
        for name, document, log in running:
            documents[name] = document
            for line in log.splitlines():
                to_stderr(f"{name}: {line.removeprefix(f'{PROGRAM}: ')}")
            if "artifacts" in document and not (document.get("up_to_date") or voice.as_json or voice.quiet):
                _torch_side()  # the tables need it
                print_line(f"--- {name}")
                print_tables(document, details=voice.details)
    document = joined(documents, options.commands)
    bundles = [str(each["bundle"]) for each in document["models"].values() if "bundle" in each]
    lines = bundles if voice.quiet else summary(document)
    shown = print_json(document) if voice.as_json else not lines or print_line("\n".join(map(printable, lines)))
    return int(document["exit_code"]) if shown else document["exit_code"] or BundleError.exit_code


def _work(options: Options, voice: Voice) -> dict[str, Any]:
    with Stages(shown=not voice.quiet) as stages:
        if isinstance(options, DiagnoseOptions) or (isinstance(options, ExportOptions) and options.profile_dir):
            # torch's profiler logs its own steps to stderr; it reads the level once.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        if isinstance(options, ExportOptions):
            check_early(options)
            changed = changes(options) if options.if_changed else []
            if options.if_changed and not changed:
                return up_to_date_document(options.output)
            if changed and not voice.quiet:
                say(f"building {options.output}: {', '.join(changed)}")
            stages.start("importing torch")
        elif isinstance(options, DiagnoseOptions | TuneTrainingOptions):
            check_early(options.load)
            if isinstance(options, TuneTrainingOptions):
                check_new_folder(options.output, "the result")
            stages.start("importing torch")
        engine = _torch_side()
        if isinstance(options, BenchOptions):
            stages.start("putting the bundle under load" if options.throughput else "timing the files")
        if isinstance(options, CompareOptions):
            stages.start("comparing the bundles")
        if isinstance(options, VerifyOptions) and options.sets:
            stages.start("running the files with other versions")
        if isinstance(options, DiagnoseOptions):
            return dict(engine.diagnose_model(options, stages))
        if isinstance(options, TuneTrainingOptions):
            return dict(engine.tune_training_step(options, stages))
        if not isinstance(options, ExportOptions):
            return dict(getattr(engine, _BUNDLE_WORK[type(options)])(options))
        document = dict(engine.export_model(options, stages))
        stages.finish()
        if changed:
            document |= {"up_to_date": False, "changed": changed}
        return {**document, "stages": stages.times()}


def _torch_side() -> ModuleType:
    """Import all modules of the program, so that no module of the user can replace one later, and return `engine`."""
    import_own_packages()
    # Python would print what the library logs, which the command prints itself.
    logging.getLogger("optimizer").addHandler(logging.NullHandler())
    from optimize_export.runtime.torch_runner import keep_to_quota
    from optimizer.command import engine

    keep_to_quota()
    return engine


def _stopped(how: str) -> str:
    """A sentence about an interrupt: it may come after the new bundle was put in place, which it doesn't undo."""
    exchange = sys.modules.get("optimizer.bundle.exchange")
    done = sorted(map(str, exchange.published)) if exchange else []
    return f"{how}, after the new bundle was put in place: {', '.join(done)}" if done else how


def _lacks_memory(error: BaseException) -> bool:
    return any(
        isinstance(link, MemoryError)
        or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        or any(each in str(link).casefold() for each in _MEMORY_ERRORS)
        for link in with_causes(error)
    )


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
