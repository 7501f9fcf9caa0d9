"""What the command prints: progress on stderr, the result on stdout, and errors as one sentence.

Only this module prints. While the user's code runs, everything written to stdout goes to stderr, so that stdout has only
the result.
"""

import contextlib
import errno
import json
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from optimize_export.errors import BundleError, all_printable, failure_document, printable
from optimizer.command.commands import PROGRAM
from optimizer.options import ShowOptions

if TYPE_CHECKING:
    from optimizer.report import Progress

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


# stdout ---------------------------------------------------------------------------------------------------


def prepare_streams() -> None:
    """Connect closed standard streams (`>&-`, daemons) to the null device, and escape what stdout can't encode.

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
    with contextlib.suppress(AttributeError, ValueError):  # a notebook's stdout takes every text
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextlib.contextmanager
def stdout_goes_to_stderr() -> Iterator[None]:
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


def silence_stdout() -> None:
    """Redirect stdout to stderr until the process ends: what the user's code prints at exit, and to a closed pipe."""
    _flush(sys.stdout)
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    sys.stdout = sys.stderr


# Progress -------------------------------------------------------------------------------------------------------------


@dataclass
class _Stage:
    """One uninterrupted part of a stage."""

    stage: str
    started: float
    text: str = ""
    """The last reported step."""
    names: dict[str, None] = field(default_factory=dict)
    """The passes or exporters that ran, in order."""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return ", ".join(self.names) or self.text


class Stages:
    """Times each stage and prints one line for it on stderr.

    On a terminal, a live line counts the seconds of the current stage.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._live: Any = None
        self._current: _Stage | None = None
        self._done: list[_Stage] = []

    def __enter__(self) -> "Stages":
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
            say(f"{done.stage}{' ' * bool(done.name)}{done.name}: {done.seconds:.1f} s")

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


class Voice(ShowOptions):
    """Prints what the user asked to be shown."""

    def tell(self, text: str, figures: Mapping[str, Any]) -> int:
        """Print the text, or the figures as a JSON document; return the exit code."""
        told = print_json({"ok": True, "exit_code": 0, **figures}) if self.as_json else print_line(text)
        return 0 if told else BundleError.exit_code

    def show(self, document: Mapping[str, Any]) -> bool:
        """Print the result on stdout and its problems on stderr; return False if stdout couldn't be written."""
        written = True
        if self.as_json:
            written = print_json(document)
        elif document.get("up_to_date") and not self.quiet:
            written = print_line(printable(f"up to date: {document['bundle']}"))
        elif not self.quiet:
            written = print_tables(document, details=self.details)
        elif "bundle" in document:
            made = next(document[name] for name in ("commit_url", "triton_model", "bundle") if name in document)
            written = print_line(printable(str(made)))
        problems = [document["error"]["message"]] if "error" in document else document.get("problems", ())
        for problem in problems:
            say(f"error: {problem}")
        return written

    def fail(self, code: int, kind: str, sentence: str, error: BaseException) -> int:
        """Print an error on one line of stderr, and with --json also as a JSON document; return the exit code."""
        if self.debug:
            for line in "".join(traceback.format_exception(error)).removesuffix("\n").split("\n"):
                to_stderr(f"| {line}")  # mark every line of a message, so that none looks like the program's own
        if self.as_json:
            print_json(failure_document(code, kind, sentence))
        say(sentence if code in (EXIT_INTERRUPTED, EXIT_TERMINATED) else f"error: {sentence}")
        return code


def say(sentence: str) -> None:
    """Print one line on stderr."""
    to_stderr(f"{PROGRAM}: {sentence}")


def to_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        # In one write: builds that run side by side must not share a line.
        sys.stderr.write(f"{printable(line)}\n")


def print_json(document: Mapping[str, Any]) -> bool:
    # JSON allows DEL in a string, so `json.dumps` doesn't escape it.
    return print_line(json.dumps(document, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def print_line(text: str) -> bool:
    """Print on stdout; return False if that fails, as on a full disk.

    A reader that has gone away (`| head`), or never existed, is not an error.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        silence_stdout()
        if error.errno in (errno.EPIPE, errno.EBADF):
            return True
        say(f"error: the result couldn't be written to stdout: {error.strerror}.")
        return False
    return True


def print_tables(document: Mapping[str, Any], *, details: bool) -> bool:
    from optimizer.command.tables import as_text

    terminal = sys.stdout.isatty()
    text = as_text(all_printable(document), terminal=terminal, details=details)
    return print_line(text)


# The library's messages -------------------------------------------------------------------------------------------------

_ARGUMENT = re.compile(r"`(\w+)=([^`]*)`")


def with_options(value: Any, known: Set[str]) -> Any:
    """A message, or every text of a document, with --static-batch where the library speaks of `static_batch=True`."""
    if isinstance(value, str):
        return _ARGUMENT.sub(lambda found: _as_option(found, known), value)
    if isinstance(value, dict):
        return {key: with_options(each, known) for key, each in value.items()}
    return [with_options(each, known) for each in value] if isinstance(value, list | tuple) else value


def _as_option(found: re.Match[str], known: Set[str]) -> str:
    name, value = f"--{found[1].replace('_', '-')}", found[2]
    if value == "False":
        name = f"--no-{name.removeprefix('--')}"
    if name not in known:
        return found[0]
    if value in ("True", "False", "…"):
        return name
    return f"{name} {value.strip('()').replace(', ', ',')}"
