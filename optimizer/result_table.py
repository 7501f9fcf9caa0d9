"""The result of the command as tables: a view of its JSON document, made for people."""

import io
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from optimizer.report import remark_lines

# Where nobody looks at a terminal, lines are as long as they have to be for `grep` to find them whole.
_WIDE = 4096
_STYLES = {"applied": "green", "ok": "green", "rolled-back": "yellow", "vacuous": "yellow", "failed": "red"}

# What every file says of itself (`exporters.metadata`).
_OURS = "optimize_export."

Document = Mapping[str, Any]


def as_text(document: Document, *, terminal: bool, encoding: str = "utf-8", details: bool = False) -> str:
    """The tables of a document; colours, frames and the width of the screen only for a terminal.

    Args:
        details: show the figures of every call, too.
    """
    stream = io.StringIO()
    width = shutil.get_terminal_size().columns if terminal else _WIDE
    # rich believes in the width of a dumb terminal only where it is given a height, too.
    console = Console(
        file=stream, force_terminal=terminal, width=width, height=25, highlight=False, emoji=False, markup=False
    )
    frames = box.SIMPLE_HEAD if terminal and encoding.lower().startswith("utf") else None
    for part in _parts(document, frames, details=details):
        console.print(part, soft_wrap=isinstance(part, Text))  # a path that is broken in two can't be copied
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def _parts(document: Document, frames: box.Box | None, *, details: bool) -> Iterable[RenderableType]:
    if "available_passes" in document:
        yield _available(document["available_passes"], frames)
        return
    if document.get("passes"):
        yield _passes(document["passes"], frames)
        for line in (line for each in document["passes"] for line in remark_lines(each)):
            yield Text(line)
        yield ""
    if any("bytes" in artifact for artifact in document.get("artifacts", ())):
        yield _artifacts(document["artifacts"], frames)
        yield ""
    elif any("calls" in artifact for artifact in document.get("artifacts", ())):
        yield _ran(document["artifacts"], frames)
        yield ""
    outputs = [
        (artifact, output)
        for artifact in document.get("artifacts", ())
        for output in (artifact.get("parity") or artifact).get("outputs", ())
        if "max_error" in output
    ]
    if outputs:
        yield _parity(outputs, frames)
        yield ""
    if details and any(output.get("calls") for _, output in outputs):
        yield _every_call(outputs, frames)
        yield ""
    for artifact in document.get("artifacts", ()):
        if rows := (artifact.get("parity") or {}).get("rows"):
            yield Text(_rows(artifact["format"], rows))
    for artifact in document.get("artifacts", ()):
        if given := [item for item in artifact.get("metadata", {}).items() if not item[0].startswith(_OURS)]:
            yield Text(_metadata(artifact["format"], given))
    for artifact in document.get("artifacts", ()):
        if (place := artifact.get("divergence")) is not None:
            yield Text(_differs(artifact["format"], place))
    for note in document.get("notes", ()):
        yield Text(f"note: {note}")
    if "report" in document:
        yield Text(_gained(document["report"]))
    if "sha256sums" in document:
        yield Text(f"SHA-256 for --verify --expect: {document['sha256sums']}")
    if "bundle" in document:
        yield Text(f"bundle: {document['bundle']}")


def _metadata(format: str, given: Sequence[tuple[str, str]]) -> str:
    texts = (f"{key}={' '.join(value.split())}" for key, value in given)
    return f"metadata of {format}: {', '.join(texts)}"


def _rows(format: str, rows: Document) -> str:
    if not rows["ok"]:
        return f"rows of {format}: {rows['problem']}"
    otherwise = (
        "alone, in other places and among other rows" if rows["alone"] else "in other places and among other rows"
    )
    lacking = (
        f"; not looked at, as they have no rows: {', '.join(rows['without_rows'])}" if rows["without_rows"] else ""
    )
    sizes = ", ".join(map(str, rows["batch_sizes"]))
    return f"rows of {format}: none depends on the others, of batches of {sizes}, run {otherwise}{lacking}"


def _gained(report: Document) -> str:
    before, after, coverage = report["before"], report["after"], report["coverage"]
    return (
        f"operations: {before['operations']:,} -> {after['operations']:,}; "
        f"parameters: {before['parameters']:,} -> {after['parameters']:,}; "
        f"within reach of passes: {coverage['reached']:,} of {coverage['parameterised']:,} modules with parameters"
    )


def _table(frames: box.Box | None, *columns: str) -> Table:
    table = Table(box=frames, pad_edge=False, padding=(0, 2, 0, 0) if frames is None else (0, 1))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _passes(passes: Sequence[Document], frames: box.Box | None) -> Table:
    table = _table(frames, "pass", "status", "changes", "skips", "seconds", "reason")
    for each in passes:
        table.add_row(
            each["name"],
            _coloured(each["status"]),
            _count(each.get("changes", 0)),
            _count(each.get("skips", 0)),
            f"{each.get('seconds') or 0:.2f}",
            Text(each.get("reason") or ""),
        )
    return table


def _artifacts(artifacts: Sequence[Document], frames: box.Box | None) -> Table:
    table = _table(frames, "file", "size", "route", "inputs", "outputs", "nodes on", "parity")
    for each in artifacts:
        verdict = (each.get("parity") or {}).get("verdict", "not checked")
        table.add_row(
            each["path"],
            _size(each["bytes"]),
            Text(each["route"]),
            Text(_tensors(each["inputs"])),
            Text(_tensors(each["outputs"])),
            _placement(each.get("placement")),
            _coloured(verdict),
        )
    return table


def _ran(artifacts: Sequence[Document], frames: box.Box | None) -> Table:
    """What was run to judge a bundle again."""
    table = _table(frames, "file", "run on", "calls", "nodes on", "parity")
    for each in artifacts:
        verdict = (each.get("parity") or {}).get("verdict", "failed")
        nodes = _placement(each.get("placement"))
        table.add_row(each["path"], each["device"], str(each["calls"]), nodes, _coloured(verdict))
    return table


def _placement(counts: Mapping[str, int] | None) -> str:
    """How many nodes ran on each of a runtime's providers."""
    if not counts:
        return "-"
    return ", ".join(f"{name.removesuffix('ExecutionProvider')} {count}" for name, count in counts.items())


_FIGURES = ("mean", "99.9 %", "cosine", "top-1")


def _parity(outputs: Sequence[tuple[Document, Document]], frames: box.Box | None) -> Table:
    """One row per output: what it is judged by, and the worst of its other figures over all calls."""
    table = _table(frames, "parity of", "output", "largest error", "allowed", *_FIGURES, "verdict")
    for artifact, output in outputs:
        # An artifact fails for one of its outputs; that it is vacuous is true of each.
        overall = (artifact.get("parity") or artifact).get("verdict", "ok")
        verdict = "failed" if output.get("problem") else "ok" if overall == "failed" else overall
        error, allowed = _judged(output)
        figures = _figures(output)
        table.add_row(artifact["format"], Text(str(output["name"])), error, allowed, *figures, _coloured(verdict))
    return table


def _judged(output: Document) -> tuple[str, str]:
    """What an output is off by, and what is allowed: from the reference, or by a user's tolerance from the original itself."""
    allowed = _number(output.get("tolerance"))
    if output.get("by_user") and output.get("max_difference") is not None:
        return _number(output["max_difference"]), f"{allowed} (yours)"
    return _number(output["max_error"]), allowed


def _every_call(outputs: Sequence[tuple[Document, Document]], frames: box.Box | None) -> Table:
    table = _table(frames, "parity of", "output", "batch size", "draw", "largest error", *_FIGURES)
    for artifact, output in outputs:
        for call in output.get("calls", ()):
            rows = "-" if call["batch_size"] is None else str(call["batch_size"])
            size = ", ".join([rows, *(f"{name} {size}" for name, size in call.get("sizes", {}).items())])
            error, figures = _number(call["max_error"]), _figures(call)
            table.add_row(artifact["format"], Text(str(output["name"])), size, str(call["draw"]), error, *figures)
    return table


def _figures(of: Document) -> tuple[str, ...]:
    cosine = of.get("cosine")
    return (
        _number(of.get("mean_error")),
        _number(of.get("p999_error")),
        "-" if cosine is None else f"{cosine:.6f}",
        _agreement(of.get("agreement"), of.get("undecided", 0)),
    )


def _agreement(share: float | None, undecided: int) -> str:
    # Rounded down: what is 100 % agrees everywhere.
    shown = "-" if share is None else "100 %" if share == 1 else f"{math.floor(1000 * share) / 10:.1f} %"
    return f"{shown} ({undecided} left out)" if undecided else shown


def _available(passes: Sequence[Document], frames: box.Box | None) -> Table:
    table = _table(frames, "pass", "what it does", "options")
    for each in passes:
        table.add_row(each["name"], Text(each["summary"]), Text(_options(each["options"])))
    return table


def _options(options: Any) -> str:
    if isinstance(options, Mapping):
        return ", ".join(f"{name}={value}" for name, value in options.items())
    return ", ".join(map(str, options))


def _coloured(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, ""))


def _count(value: int | Sequence[Any]) -> str:
    return str(value if isinstance(value, int) else len(value))


def _tensors(tensors: Sequence[Document]) -> str:
    return " ".join(f"{each['name']}[{','.join(map(str, each['shape']))}]" for each in tensors)


def _number(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.2g}"


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _differs(name: str, place: Mapping[str, Any]) -> str:
    """Where an artifact first differs from the model, with the places that may be meant as well."""
    places = (place, *place["also"])
    named = " or ".join(
        f"{each['module'] or 'the model itself'} ({each['line']}, {each['operation']})" for each in places
    )
    return f"{name} first differs at {named}: {place['problem']}"
